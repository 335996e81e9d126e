"""The store of batches: one result a request, counts that agree, and a folder that one process has."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funitel.proto.errors import StorageFailed
from funitel.router.batch.folder import BatchFolder
from funitel.router.batch.records import BatchRequest, BatchStatus, Page, RequestResult, StoredBatch, StoredFile
from funitel.router.batch.store import BatchStore, StoreThread

FILE = StoredFile(id="file-1", owner="a", created_at=1, num_bytes=5, filename="in", purpose="batch")
BATCH = StoredBatch(
    id="batch_1",
    owner="a",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=1,
    expires_at=100,
    metadata={"k": "v"},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "batches.sqlite3"


@pytest.fixture
def store(path: Path) -> BatchStore:
    """A store with a batch of three requests in progress."""
    store = BatchStore(path)
    store.add_file(FILE)
    store.add_batch(BATCH)
    store.add_requests(BATCH.id, [BatchRequest(line, f"r{line}", line * 10, 10) for line in (1, 2, 3)])
    begun = store.begin(BATCH.id, 3, 7)
    assert begun is not None
    assert begun.status is BatchStatus.IN_PROGRESS
    assert begun.times == {BatchStatus.IN_PROGRESS: 7}
    return store


def result(line: int, content: bytes = b"{}", *, is_success: bool = True) -> RequestResult:
    return RequestResult(line, f"r{line}", is_success, content)


def test_a_result_is_written_once(store: BatchStore) -> None:
    assert store.record(BATCH.id, result(2, b"first"))
    assert not store.record(BATCH.id, result(2, b"second"))
    assert store.record(BATCH.id, result(3, is_success=False))
    found = store.batch(BATCH.id)
    assert found is not None
    assert (found.num_requests, found.num_completed, found.num_failed) == (3, 1, 1)
    assert [each.line for each in store.pending(BATCH.id, 0, 10)] == [1]
    assert store.results(BATCH.id, 0, 10) == [
        RequestResult(1, "r1", False, None),
        result(2, b"first"),
        result(3, is_success=False),
    ]


def test_a_batch_that_is_cancelled_takes_no_results(store: BatchStore) -> None:
    cancelled = store.set_status(BATCH.id, BatchStatus.CANCELLING, 9, of=[BatchStatus.IN_PROGRESS])
    assert cancelled is not None
    assert cancelled.times == {BatchStatus.IN_PROGRESS: 7, BatchStatus.CANCELLING: 9}
    assert not store.record(BATCH.id, result(1))
    again = store.set_status(BATCH.id, BatchStatus.FINALIZING, 10, of=[BatchStatus.IN_PROGRESS])
    assert again is not None
    assert again.status is BatchStatus.CANCELLING


def test_what_was_written_is_there_after_another_opens_the_file(store: BatchStore, path: Path) -> None:
    store.record(BATCH.id, result(1))
    other = BatchStore(path)  # nothing was closed
    (found,) = other.unfinished()
    assert found == store.batch(BATCH.id)
    assert found.metadata == {"k": "v"}
    assert [each.custom_id for each in other.pending(BATCH.id, 0, 10)] == ["r2", "r3"]
    assert other.file_ids() == {"file-1"}


def test_the_end_of_a_batch_is_written_with_its_files_or_not_at_all(store: BatchStore) -> None:
    output = replace(FILE, id="file-2", purpose="batch_output")
    ended = replace(BATCH, status=BatchStatus.COMPLETED, output_file_id="file-2")
    with pytest.raises(StorageFailed):
        store.end_batch(ended, [output, FILE], 20)  # the second is there already
    assert store.file("file-2", "a") is None
    assert [each.status for each in store.unfinished()] == [BatchStatus.IN_PROGRESS]
    store.end_batch(ended, [output], 20)
    assert store.file("file-2", "a") == output
    assert store.unfinished() == []
    assert store.results(BATCH.id, 0, 10) == []


def test_other_owners_see_nothing(store: BatchStore) -> None:
    assert store.file(FILE.id, "b") is None
    assert store.batch(BATCH.id, "b") is None
    assert store.files("b", Page(10), None) == ([], False)
    assert store.batches("b", Page(10)) == ([], False)
    assert store.files("a", Page(10), "batch") == ([FILE], False)
    with pytest.raises(LookupError):
        store.add_batch(replace(BATCH, id="batch_2", owner="b"))
    assert store.remove_file(FILE.id, "a") == BATCH.id


def test_a_page_after_what_is_gone_is_empty(store: BatchStore) -> None:
    assert store.files("a", Page(10, after="file-9"), None) == ([], False)


def test_a_file_that_is_no_database_or_of_another_version(tmp_path: Path, store: BatchStore, path: Path) -> None:
    (tmp_path / "other").write_text("no database" * 100)
    with pytest.raises(StorageFailed, match="--batch-dir: file is not a database"):
        BatchStore(tmp_path / "other")
    store._db.execute("PRAGMA user_version = 9")
    with pytest.raises(StorageFailed, match="of version 9, this server reads 1"):
        BatchStore(path)


async def test_calls_are_made_one_after_another_in_one_thread(store: BatchStore) -> None:
    thread = StoreThread(store)
    names = await asyncio.gather(*(thread(lambda _: threading.current_thread().name) for _ in range(5)))
    assert len(set(names)) == 1
    assert names[0] != threading.current_thread().name
    found = await thread(BatchStore.batch, BATCH.id)
    assert found is not None
    await thread.close()


@pytest.mark.parametrize("seconds", [0.0, 0.001])
async def test_a_task_that_is_cancelled_while_it_opens_a_file_leaves_none(tmp_path: Path, seconds: float) -> None:
    folder = BatchFolder(tmp_path)
    folder.lock()

    async def write() -> None:
        async with folder.writing():
            await asyncio.sleep(60)

    for _ in range(20):
        tasks = [asyncio.create_task(write()) for _ in range(8)]
        await asyncio.sleep(seconds)
        for _ in range(2):  # as a runner that ends, and the loop after it
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait(tasks)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert list((tmp_path / "parts").iterdir()) == []
    folder.release()


async def test_files_are_opened_and_removed_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BatchFolder(tmp_path)
    folder.lock()
    seen: list[tuple[str, bool]] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, threading.current_thread() is threading.main_thread()))
            return method(*args, **kwargs)

        return call

    for name in ("open", "unlink"):
        monkeypatch.setattr(Path, name, watched(name, getattr(Path, name)))
    async with folder.writing() as part:
        await asyncio.to_thread(part.write, b"abc")
    assert seen == [("open", False), ("unlink", False)]
    folder.release()


def test_one_process_has_the_folder(tmp_path: Path) -> None:
    first, second = BatchFolder(tmp_path / "b"), BatchFolder(tmp_path / "b")
    assert first.lock()
    assert not second.lock()
    first.release()
    assert second.lock()
    second.release()


async def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    folder.lock()
    async with folder.writing() as part:
        part.write(b"abc")
        assert not folder.path_of("file-1").exists()
        part.keep("file-1")
    assert folder.path_of("file-1").read_bytes() == b"abc"
    async with folder.writing() as part:
        part.write(b"abc")
    assert list((tmp_path / "parts").iterdir()) == []
    folder.tidy({"file-1"})
    assert (tmp_path / "reserve").stat().st_size == 1 << 20
    folder.give_up_reserve()
    assert not (tmp_path / "reserve").exists()
    folder.remove("file-1")
    folder.release()
    assert list((tmp_path / "files").iterdir()) == []
