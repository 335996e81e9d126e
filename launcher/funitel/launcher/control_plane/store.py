"""The state of the control plane in a database: an SQLite file, or PostgreSQL by its URL; written by it alone.

Each method is one transaction, which is on the disk when the method returns. An error leaves the state as it was.
Methods block: `StateThread` calls them off the event loop.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    QueuePool,
    StaticPool,
    Table,
    create_engine,
    delete,
    event,
    insert,
    make_url,
    select,
    update,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from funitel.launcher.control_plane.records import LaunchRequest, ModelEntry, ModelEvent, Registration, ReplicaEntry
from funitel.launcher.control_plane.schema import EVENTS, LOADS, MODELS, REGISTRATIONS, REPLICAS, bring_up_to_date
from funitel.proto.errors import SettingsError, StorageFailed
from funitel.proto.extras import check_extra

BUSY_SECONDS = 10
MAX_EVENTS_OF_A_MODEL, MAX_EVENTS = 200, 10_000
MAX_LOADS = 9  # of one key, of which the median is expected
_LOCK = 0x66756E6974656C  # of PostgreSQL, for the one control plane of a database

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model of the state.

    Attributes:
        entry: its last state, with its replicas and the records of their executors.
        request: of its launch; None for one that is registered and was never launched.
        is_wanted: whether a start of the control plane loads it.
    """

    entry: ModelEntry
    request: LaunchRequest | None
    is_wanted: bool


class StateStore:
    """The state in a database. One thread only."""

    def __init__(self, database: str | Path | None) -> None:
        """Open the state, and make or migrate its tables.

        Args:
            database: the path of an SQLite file, a URL such as `postgresql+psycopg://user@host/name`, or None for
                memory.

        Raises:
            SettingsError: the URL is wrong, or another control plane has the database.
            StorageFailed: it cannot be opened, or is of a later version.
        """
        url, self._shown = _url_of(database)
        if isinstance(database, Path):
            _make_private(database, self._shown)
        self._engine = _engine_of(url, self._shown)
        with ExitStack() as undoing:
            undoing.callback(self.close)
            with self.transaction() as db:
                bring_up_to_date(db)
            undoing.pop_all()

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """What a block writes is on the disk when the block has ended, or nothing of it after an error."""
        with _storage_errors(self._shown), self._engine.begin() as db:
            yield db

    # Models

    def models(self) -> list[StoredModel]:
        """All models: highest priority first, then in the order of their first launch."""
        with self.transaction() as db:
            rows = db.execute(select(MODELS).order_by(MODELS.c.priority.desc(), MODELS.c.place)).all()
            replicas: dict[str, list[ReplicaEntry]] = {}
            for row in db.execute(select(REPLICAS).order_by(REPLICAS.c.id)):
                content = {**json.loads(row.entry), "executor": row.executor, "record": json.loads(row.record)}
                replicas.setdefault(row.model, []).append(ReplicaEntry.from_json(content))
        return [
            StoredModel(
                entry=replace(ModelEntry.from_json(json.loads(row.entry)), replicas=tuple(replicas.get(row.name, ()))),
                request=None if row.request is None else LaunchRequest.from_json(json.loads(row.request)),
                is_wanted=row.is_wanted,
            )
            for row in rows
        ]

    def save_model(self, entry: ModelEntry, request: LaunchRequest | None, *, is_wanted: bool) -> None:
        """Write a model and its replicas; a new one comes last."""
        values = {
            "priority": 0 if request is None else request.priority,
            "is_wanted": is_wanted,
            "request": None if request is None else json.dumps(request.to_json()),
            "entry": json.dumps(replace(entry, replicas=()).to_json()),
        }
        with self.transaction() as db:
            written = db.execute(update(MODELS).where(MODELS.c.name == entry.name).values(**values))
            if not written.rowcount:
                db.execute(insert(MODELS).values(name=entry.name, **values))
            db.execute(delete(REPLICAS).where(REPLICAS.c.model == entry.name))
            if entry.replicas:
                db.execute(insert(REPLICAS), [_replica_row(entry.name, each) for each in entry.replicas])

    def forget_model(self, name: str) -> None:
        """Remove a model and its replicas; its events stay."""
        with self.transaction() as db:
            db.execute(delete(MODELS).where(MODELS.c.name == name))
            db.execute(delete(REPLICAS).where(REPLICAS.c.model == name))

    # Registrations

    def registrations(self) -> list[Registration]:
        """All registrations, by type and name."""
        query = select(REGISTRATIONS.c.content).order_by(REGISTRATIONS.c.type, REGISTRATIONS.c.name)
        with self.transaction() as db:
            return [Registration.from_json(json.loads(content)) for content in db.execute(query).scalars()]

    def save_registration(self, registration: Registration) -> None:
        """Write a registration."""
        content = json.dumps(registration.to_json())
        key = {"type": registration.type, "name": registration.name}
        with self.transaction() as db:
            written = db.execute(update(REGISTRATIONS).filter_by(**key).values(content=content))
            if not written.rowcount:
                db.execute(insert(REGISTRATIONS).values(content=content, **key))

    def forget_registration(self, type: str, name: str) -> None:
        """Remove a registration."""
        with self.transaction() as db:
            db.execute(delete(REGISTRATIONS).filter_by(type=type, name=name))

    # Events and loads

    def add_event(self, model: str, new: ModelEvent) -> None:
        """Write an event of a model, and drop the oldest ones beyond the bounds."""
        with self.transaction() as db:
            db.execute(insert(EVENTS).values(model=model, **new.to_json()))
            _drop_oldest(db, EVENTS, EVENTS.c.model == model, MAX_EVENTS_OF_A_MODEL)
            _drop_oldest(db, EVENTS, EVENTS.c.place > 0, MAX_EVENTS)

    def events(self, model: str) -> list[ModelEvent]:
        """The events of a model, oldest first."""
        with self.transaction() as db:
            rows = db.execute(select(EVENTS).filter_by(model=model).order_by(EVENTS.c.place)).all()
        return [ModelEvent(at=row.at, stage=row.stage, message=row.message) for row in rows]

    def add_load(self, key: str, seconds: float) -> None:
        """Write how long a load took; `key` names the model and what changes the duration, such as its quantization."""
        with self.transaction() as db:
            db.execute(insert(LOADS).values(key=key, seconds=seconds))
            _drop_oldest(db, LOADS, LOADS.c.key == key, MAX_LOADS)

    def expected_load_seconds(self, key: str) -> float | None:
        """The median of the last loads; None where there was none."""
        with self.transaction() as db:
            found: Sequence[float] = db.execute(select(LOADS.c.seconds).filter_by(key=key)).scalars().all()
        return median(found) if found else None


class StateThread:
    """Calls the methods of a store in a thread of its own, one after another."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")

    async def __call__(self, method: Callable[Concatenate[StateStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store; raises what it raises. A call that is cancelled is carried out nevertheless."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(self._store, *args, **kwargs))

    async def close(self) -> None:
        """Let calls under way end, then close the store."""
        await self(StateStore.close)
        self._thread.shutdown(wait=False)


def _replica_row(model: str, replica: ReplicaEntry) -> dict[str, Any]:
    return {
        "model": model,
        "id": replica.id,
        "executor": replica.executor,
        "entry": json.dumps(replica.to_json()),
        "record": json.dumps(dict(replica.record)),
    }


def _drop_oldest(db: Connection, table: Table, among: Any, kept: int) -> None:
    """Delete the oldest rows beyond `kept`."""
    newest = select(table.c.place).where(among).order_by(table.c.place.desc()).offset(kept).limit(1)
    last = db.execute(newest).scalar()
    if last is not None:
        db.execute(delete(table).where(among, table.c.place <= last))


# The database


def _url_of(database: str | Path | None) -> tuple[URL, str]:
    """The URL of a database, and how messages name it: without a password."""
    if database is None:
        return URL.create("sqlite"), "the state in memory"
    if isinstance(database, Path):
        return URL.create("sqlite", database=str(database.absolute())), f"--state-dir: {database}"
    try:
        url = make_url(database)
    except ArgumentError:
        url = URL.create("")
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise SettingsError(
            "--database must be like postgresql+psycopg://user:password@host/name; the SQLite file of --state-dir "
            "needs no URL"
        )
    check_extra("postgres", "--database postgresql")
    shown = url.set(query={}).render_as_string()
    return url.set(drivername="postgresql+psycopg"), f"--database {shown}"


def _make_private(file: Path, shown: str) -> None:
    """Have a file that this user alone reads, as that of SQLite and those beside it, which get its mode."""
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        file.chmod(0o600)
    except OSError as error:
        raise StorageFailed(f"{shown}: {error.strerror}") from error


def _engine_of(url: URL, shown: str) -> Engine:
    """An engine with one connection, as one control plane writes."""
    if url.get_backend_name() == "sqlite":
        engine = create_engine(
            url, poolclass=StaticPool, connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS}
        )
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", lambda db: db.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    name = f"funitel, process {os.getpid()} on {socket.gethostname()}"
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_pre_ping=True,  # a database that was restarted is connected to again
        connect_args={"connect_timeout": BUSY_SECONDS, "application_name": name},
    )
    event.listen(engine, "connect", lambda connection, _: _own_database(connection, shown))
    return engine


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver begins no transactions of its own
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


def _own_database(connection: Any, shown: str) -> None:
    """Take PostgreSQL's lock for this connection, which a new one takes again; it ends with the connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,))
        (is_ours,) = cursor.fetchone()
        if not is_ours:
            cursor.execute(
                "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE locktype = 'advisory' AND granted AND ((classid::bigint << 32) | objid::bigint) = %s "
                "AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())",
                (_LOCK,),
            )
            owner = cursor.fetchone()
            name = owner[0] if owner else "funitel"
            connection.close()  # the pool never gets it
            raise SettingsError(f"{shown} belongs to another control plane that runs: {name}")
    connection.commit()


@contextmanager
def _storage_errors(shown: str) -> Iterator[None]:
    """Translate errors of the database to StorageFailed, such as that of a full disk."""
    try:
        yield
    except DBAPIError as error:
        raise StorageFailed(f"{shown}: {error.orig}") from error
    except SQLAlchemyError as error:
        raise StorageFailed(f"{shown}: {error}") from error
