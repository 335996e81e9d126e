"""The tables of the control plane's state, their version, and the migrations from earlier ones.

A new database gets the tables as they are here. An older one is migrated version by version in one transaction.
"""

from collections.abc import Callable, Mapping

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    insert,
    inspect,
    select,
    update,
)

from funitel.proto.errors import StorageFailed

VERSION = 1
Migration = Callable[[Connection], None]
MIGRATIONS: Mapping[int, Migration] = {}
"""By the version that a migration leads to; each alters the tables of the version before."""

METADATA = MetaData()
_NUMBER = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts in INTEGER alone

SCHEMA_VERSION = Table("schema_version", METADATA, Column("version", Integer, nullable=False))
MODELS = Table(
    "models",
    METADATA,
    Column("place", _NUMBER, primary_key=True, autoincrement=True),  # order of the launches
    Column("name", Text, nullable=False, unique=True),
    Column("priority", Integer, nullable=False),
    Column("is_wanted", Boolean, nullable=False),
    Column("request", Text),  # JSON; NULL for a model that is registered and was never launched
    Column("entry", Text, nullable=False),  # JSON without replicas
    sqlite_autoincrement=True,
)
REPLICAS = Table(
    "replicas",
    METADATA,
    Column("model", Text, primary_key=True),
    Column("id", Integer, primary_key=True),
    Column("executor", Text, nullable=False),
    Column("entry", Text, nullable=False),  # JSON
    Column("record", Text, nullable=False),  # JSON of the executor
)
REGISTRATIONS = Table(
    "registrations",
    METADATA,
    Column("type", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("content", Text, nullable=False),  # JSON
)
EVENTS = Table(
    "events",
    METADATA,
    Column("place", _NUMBER, primary_key=True, autoincrement=True),
    Column("model", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("stage", Text, nullable=False),
    Column("message", Text, nullable=False),
    Index("events_by_model", "model", "place"),
    sqlite_autoincrement=True,
)
LOADS = Table(
    "loads",
    METADATA,
    Column("place", _NUMBER, primary_key=True, autoincrement=True),
    Column("key", Text, nullable=False),
    Column("seconds", Float(53), nullable=False),
    Index("loads_by_key", "key", "place"),
    sqlite_autoincrement=True,
)


def bring_up_to_date(
    connection: Connection, version: int = VERSION, migrations: Mapping[int, Migration] = MIGRATIONS
) -> None:
    """Make the tables, or migrate those of an earlier version; call it in a transaction.

    Raises:
        StorageFailed: the tables are those of a later version.
    """
    if not inspect(connection).has_table(SCHEMA_VERSION.name):
        METADATA.create_all(connection)
        connection.execute(insert(SCHEMA_VERSION).values(version=version))
        return
    found = connection.execute(select(SCHEMA_VERSION.c.version)).scalar_one()
    if found > version:
        raise StorageFailed(
            f"the state has tables of version {found}, this program knows {version}: use the newer program, or another "
            "--state-dir or --database"
        )
    for number in range(found + 1, version + 1):
        migrations[number](connection)
    connection.execute(update(SCHEMA_VERSION).values(version=version))
