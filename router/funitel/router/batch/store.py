"""The store of batches: one SQLite file with the records of files, batches and requests, and the results of these.

A result is written in one transaction with the counts of its batch, once per request. Methods block: `StoreThread`
calls them off the event loop.
"""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from funitel.proto.errors import StorageFailed
from funitel.router.batch.records import (
    BatchError,
    BatchRequest,
    BatchStatus,
    Page,
    RequestResult,
    StoredBatch,
    StoredFile,
)

VERSION = 1  # of the tables
BUSY_SECONDS = 10.0

_TABLES = """
CREATE TABLE files (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, created_at INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL
);
CREATE TABLE batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, metadata TEXT NOT NULL, status TEXT NOT NULL, times TEXT NOT NULL,
    errors TEXT NOT NULL, output_file_id TEXT, error_file_id TEXT, num_requests INTEGER NOT NULL,
    num_completed INTEGER NOT NULL, num_failed INTEGER NOT NULL
);
CREATE TABLE requests (
    batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, is_success INTEGER, content BLOB, PRIMARY KEY (batch, line)
);
"""
_FILE = "id, owner, created_at, num_bytes, filename, purpose"
_BATCH = (
    "id, owner, endpoint, input_file_id, completion_window, created_at, expires_at, metadata, status, times, errors, "
    "output_file_id, error_file_id, num_requests, num_completed, num_failed"
)

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def storage_errors() -> Iterator[None]:
    """Translate errors of the database and the file system to StorageFailed, such as that of a full disk."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StorageFailed(f"--batch-dir: {reason}") from error


class BatchStore:
    """The records in one SQLite file. One thread only."""

    def __init__(self, path: Path) -> None:
        """Open the file, and make it if there is none; raises StorageFailed."""
        with storage_errors():
            self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise StorageFailed(f"--batch-dir: {path.name} is of version {version}, this server reads {VERSION}")
            if version == 0:
                self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")

    def close(self) -> None:
        """Write what is left and close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All that the block writes, or nothing of it."""
        with storage_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:  # it failed; a full disk may have ended it
                    self._db.execute("ROLLBACK")

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with storage_errors():
            return self._db.execute(query, values).fetchall()

    # Files ----------------------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile) -> None:
        """Add the record of a file; its content is in the folder."""
        with self._transaction() as db:
            _insert_file(db, file)

    def file(self, id: str, owner: str) -> StoredFile | None:
        """A file of an owner by its id."""
        rows = self._rows(f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?", id, owner)
        return _file(rows[0]) if rows else None

    def files(self, owner: str, page: Page, purpose: str | None) -> tuple[list[StoredFile], bool]:
        """A page of the files of an owner, and whether there are more."""
        rows, has_more = self._page("files", _FILE, owner, page, "AND purpose = ?" if purpose else "", purpose)
        return list(map(_file, rows)), has_more

    def file_ids(self) -> set[str]:
        """The ids of all files."""
        return {id for (id,) in self._rows("SELECT id FROM files")}

    def remove_file(self, id: str, owner: str) -> str | None:
        """Forget a file, unless a batch that has not ended reads it: returns the id of that batch."""
        ended = [status for status in BatchStatus if status.has_ended]
        with self._transaction() as db:
            users = db.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status NOT IN ({_marks(ended)}) LIMIT 1",
                (id, *ended),
            ).fetchall()
            if users:
                return str(users[0][0])
            db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (id, owner))
        return None

    def _page(
        self, table: str, columns: str, owner: str, page: Page, more: str = "", value: str | None = None
    ) -> tuple[list[tuple[Any, ...]], bool]:
        order, beyond = ("DESC", "<") if page.is_newest_first else ("ASC", ">")
        values: list[Any] = [owner, *([] if value is None else [value])]
        behind = ""
        if page.after is not None:
            behind = f"AND place {beyond} (SELECT place FROM {table} WHERE id = ? AND owner = ?)"
            values += [page.after, owner]
        query = f"SELECT {columns} FROM {table} WHERE owner = ? {more} {behind} ORDER BY place {order} LIMIT ?"
        rows = self._rows(query, *values, page.limit + 1)
        return rows[: page.limit], len(rows) > page.limit

    # Batches --------------------------------------------------------------------------------------------------------

    def add_batch(self, batch: StoredBatch) -> None:
        """Add a batch; raises LookupError if its input file is gone by now."""
        values = (
            batch.id,
            batch.owner,
            batch.endpoint,
            batch.input_file_id,
            batch.completion_window,
            batch.created_at,
            batch.expires_at,
            json.dumps(None if batch.metadata is None else dict(batch.metadata)),
            batch.status,
            json.dumps(dict(batch.times)),
            _errors_json(batch.errors),
            batch.output_file_id,
            batch.error_file_id,
            batch.num_requests,
            batch.num_completed,
            batch.num_failed,
        )
        with self._transaction() as db:
            known = (batch.input_file_id, batch.owner)
            if not db.execute("SELECT 1 FROM files WHERE id = ? AND owner = ?", known).fetchall():
                raise LookupError(batch.input_file_id)
            db.execute(f"INSERT INTO batches ({_BATCH}) VALUES ({_marks(values)})", values)

    def batch(self, id: str, owner: str | None = None) -> StoredBatch | None:
        """A batch by its id, of an owner if one is given."""
        rows = self._rows(f"SELECT {_BATCH} FROM batches WHERE id = ? AND owner = coalesce(?, owner)", id, owner)
        return _batch(rows[0]) if rows else None

    def batches(self, owner: str, page: Page) -> tuple[list[StoredBatch], bool]:
        """A page of the batches of an owner, and whether there are more."""
        rows, has_more = self._page("batches", _BATCH, owner, page)
        return list(map(_batch, rows)), has_more

    def unfinished(self) -> list[StoredBatch]:
        """The batches of all owners that have not ended, oldest first."""
        ended = [status for status in BatchStatus if status.has_ended]
        query = f"SELECT {_BATCH} FROM batches WHERE status NOT IN ({_marks(ended)}) ORDER BY place"
        return list(map(_batch, self._rows(query, *ended)))

    def set_status(
        self, id: str, status: BatchStatus, now: int, *, of: Iterable[BatchStatus], errors: Iterable[BatchError] = ()
    ) -> StoredBatch | None:
        """Move a batch to a status if it is in one of `of`; returns the batch as it is then, None if it is unknown."""
        with self._transaction() as db:
            self._enter(db, id, status, now, of, tuple(errors))
        return self.batch(id)

    def _enter(
        self,
        db: sqlite3.Connection,
        id: str,
        status: BatchStatus,
        now: int,
        of: Iterable[BatchStatus],
        errors: tuple[BatchError, ...] = (),
    ) -> bool:
        allowed = tuple(of)
        changed = db.execute(
            f"UPDATE batches SET status = ?, times = json_set(times, '$.' || ?, ?), errors = ? "
            f"WHERE id = ? AND status IN ({_marks(allowed)})",
            (status, status, now, _errors_json(errors), id, *allowed),
        )
        return changed.rowcount > 0

    def fail_batch(self, id: str, errors: Iterable[BatchError], now: int) -> None:
        """End a batch that cannot be run, and forget its requests."""
        unfinished = [status for status in BatchStatus if not status.has_ended]
        with self._transaction() as db:
            if self._enter(db, id, BatchStatus.FAILED, now, unfinished, tuple(errors)):
                db.execute("DELETE FROM requests WHERE batch = ?", (id,))

    # Requests -------------------------------------------------------------------------------------------------------

    def clear_requests(self, id: str) -> None:
        """Forget the requests of a batch before its validation begins anew."""
        with self._transaction() as db:
            db.execute("DELETE FROM requests WHERE batch = ?", (id,))

    def add_requests(self, id: str, requests: Iterable[BatchRequest]) -> None:
        """Add requests of a batch that is validated."""
        rows = [(id, each.line, each.custom_id, each.offset, each.length) for each in requests]
        with self._transaction() as db:
            db.executemany("INSERT INTO requests (batch, line, custom_id, offset, length) VALUES (?, ?, ?, ?, ?)", rows)

    def begin(self, id: str, num_requests: int, now: int) -> StoredBatch | None:
        """Move a batch that is valid to `in_progress`; it may have been cancelled meanwhile."""
        with self._transaction() as db:
            db.execute("UPDATE batches SET num_requests = ? WHERE id = ?", (num_requests, id))
            self._enter(db, id, BatchStatus.IN_PROGRESS, now, [BatchStatus.VALIDATING])
        return self.batch(id)

    def pending(self, id: str, after: int, limit: int) -> list[BatchRequest]:
        """The next requests of a batch behind a line that have no result."""
        query = (
            "SELECT line, custom_id, offset, length FROM requests "
            "WHERE batch = ? AND line > ? AND is_success IS NULL ORDER BY line LIMIT ?"
        )
        return [BatchRequest(*row) for row in self._rows(query, id, after, limit)]

    def record(self, id: str, result: RequestResult) -> bool:
        """Write the result of a request, and count it; False where it has one, or its batch takes no more."""
        with self._transaction() as db:
            written = db.execute(
                "UPDATE requests SET is_success = ?, content = ? WHERE batch = ? AND line = ? AND is_success IS NULL "
                "AND EXISTS (SELECT 1 FROM batches WHERE id = ? AND status = ?)",
                (result.is_success, result.content, id, result.line, id, BatchStatus.IN_PROGRESS),
            )
            if not written.rowcount:
                return False
            column = "num_completed" if result.is_success else "num_failed"
            db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (id,))
        return True

    def results(self, id: str, after: int, limit: int) -> list[RequestResult]:
        """The next requests of a batch behind a line, with their results."""
        query = (
            "SELECT line, custom_id, coalesce(is_success, 0), content FROM requests WHERE batch = ? AND line > ? "
            "ORDER BY line LIMIT ?"
        )
        rows = self._rows(query, id, after, limit)
        return [RequestResult(line, custom_id, bool(success), content) for line, custom_id, success, content in rows]

    def end_batch(self, batch: StoredBatch, files: Iterable[StoredFile], now: int) -> bool:
        """End a batch with the status, counts and files that `batch` has, and forget its requests.

        Returns False, and changes nothing, where it has ended already.
        """
        with self._transaction() as db:
            unfinished = [status for status in BatchStatus if not status.has_ended]
            if not self._enter(db, batch.id, batch.status, now, unfinished):
                return False
            for file in files:
                _insert_file(db, file)
            db.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, num_failed = ? WHERE id = ?",
                (batch.output_file_id, batch.error_file_id, batch.num_failed, batch.id),
            )
            db.execute("DELETE FROM requests WHERE batch = ?", (batch.id,))
        return True


class StoreThread:
    """Calls the methods of a store in a thread of its own, one after another."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-store")

    async def __call__(self, method: Callable[Concatenate[BatchStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store; raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(self._store, *args, **kwargs))

    async def close(self) -> None:
        """Let calls under way end, then close the store."""
        await self(BatchStore.close)
        self._thread.shutdown(wait=False)


def _insert_file(db: sqlite3.Connection, file: StoredFile) -> None:
    values = (file.id, file.owner, file.created_at, file.num_bytes, file.filename, file.purpose)
    db.execute(f"INSERT INTO files ({_FILE}) VALUES ({_marks(values)})", values)


def _file(row: tuple[Any, ...]) -> StoredFile:
    id, owner, created_at, num_bytes, filename, purpose = row
    return StoredFile(
        id=id, owner=owner, created_at=created_at, num_bytes=num_bytes, filename=filename, purpose=purpose
    )


def _batch(row: tuple[Any, ...]) -> StoredBatch:
    values = dict(zip(_BATCH.split(", "), row, strict=True))
    values["metadata"] = json.loads(values["metadata"])
    values["status"] = BatchStatus(values["status"])
    values["times"] = {BatchStatus(name): at for name, at in json.loads(values["times"]).items()}
    values["errors"] = tuple(BatchError(**each) for each in json.loads(values["errors"]))
    return StoredBatch(**values)


def _errors_json(errors: Iterable[BatchError]) -> str:
    return json.dumps([asdict(error) for error in errors])


def _marks(values: Iterable[Any]) -> str:
    return ", ".join("?" for _ in values)
