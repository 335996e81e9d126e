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

VERSION = 2
Migration = Callable[[Connection], None]

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
USERS = Table(
    "users",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("subject", Text, unique=True),  # of OpenID Connect
    Column("password_hash", Text),
    Column("generation", Integer, nullable=False),
    Column("content", Text, nullable=False),  # JSON
)
KEYS = Table(
    "keys",
    METADATA,
    Column("id", _NUMBER, primary_key=True, autoincrement=True),
    Column("user", Text, nullable=False),
    Column("digest", Text, nullable=False, unique=True),
    Column("content", Text, nullable=False),  # JSON
    Index("keys_by_user", "user"),
    sqlite_autoincrement=True,
)
ENDED_SESSIONS = Table(
    "ended_sessions",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("until", Float(53), nullable=False),  # then it would have expired
)
SECRETS = Table(
    "secrets",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
PRICES = Table(
    "prices",
    METADATA,
    Column("model", Text, primary_key=True),
    Column("prompt", Float(53), nullable=False),
    Column("completion", Float(53), nullable=False),
)
USAGE = Table(
    "usage",
    METADATA,
    Column("day", Text, primary_key=True),
    Column("user", Text, primary_key=True),
    Column("key", _NUMBER, primary_key=True, autoincrement=False),  # 0 for sessions
    Column("model", Text, primary_key=True),
    Column("requests", _NUMBER, nullable=False),
    Column("prompt_tokens", _NUMBER, nullable=False),
    Column("completion_tokens", _NUMBER, nullable=False),
    Column("cost", Float(53), nullable=False),
)
RESERVATIONS = Table(  # of requests that have not ended, as far as is known: they count as used
    "reservations",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("at", Float(53), nullable=False),
    Column("user", Text, nullable=False),
    Column("key", _NUMBER, nullable=False),
    Column("model", Text, nullable=False),
    Column("tokens", _NUMBER, nullable=False),
    Column("cost", Float(53), nullable=False),
)
CHARGE_BATCHES = Table(  # the last batch of each router, which may send it twice
    "charge_batches",
    METADATA,
    Column("router", Text, primary_key=True),
    Column("number", _NUMBER, nullable=False),
    Column("at", Float(53), nullable=False),
)
AUDIT = Table(
    "audit",
    METADATA,
    Column("place", _NUMBER, primary_key=True, autoincrement=True),
    Column("at", Float(53), nullable=False),
    Column("actor", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("content", Text, nullable=False),  # JSON
    Index("audit_by_actor", "actor", "place"),
    Index("audit_by_object", "object", "place"),
    sqlite_autoincrement=True,
)
OF_TENANTS = (USERS, KEYS, ENDED_SESSIONS, SECRETS, PRICES, USAGE, RESERVATIONS, CHARGE_BATCHES, AUDIT)


def _add_tenants(connection: Connection) -> None:
    METADATA.create_all(connection, tables=OF_TENANTS)
    protect_audit(connection)


MIGRATIONS: Mapping[int, Migration] = {2: _add_tenants}
"""By the version that a migration leads to; each alters the tables of the version before."""


def protect_audit(connection: Connection) -> None:
    """Have the database refuse to change or delete rows of the audit."""
    if connection.dialect.name == "sqlite":
        for what in ("UPDATE", "DELETE"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER audit_no_{what.lower()} BEFORE {what} ON audit "
                "BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END"
            )
        return
    connection.exec_driver_sql(
        "CREATE OR REPLACE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit is append-only'; END $$"
    )
    connection.exec_driver_sql(
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()"
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
        protect_audit(connection)
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
