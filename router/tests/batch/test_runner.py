"""The runner of batches over a store and a folder: turns, refusals, two ends of one batch."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from funitel.router.batch import runner as runner_module
from funitel.router.batch.active import ActiveBatch
from funitel.router.batch.folder import BatchFolder
from funitel.router.batch.formats import BatchAnswer, CheckModel
from funitel.router.batch.records import BatchRequest, BatchStatus, StoredBatch, StoredFile
from funitel.router.batch.runner import BatchRunner, RunnerLimits
from funitel.router.batch.store import BatchStore, StoreThread

LINE = b'{"body": {}}\n'


def stored_batch(name: str, expires_at: int) -> StoredBatch:
    """A batch of completions that was made at the instant 0."""
    return StoredBatch(
        id=name,
        owner="",
        endpoint="/v1/completions",
        input_file_id=f"file-{name}",
        completion_window="1h",
        created_at=0,
        expires_at=expires_at,
    )


class Execute:
    """Answers by a function of the request's place among those that were run."""

    def __init__(self, answer: Callable[[int], BatchAnswer]) -> None:
        self.answer = answer
        self.began: list[float] = []

    async def run(self, endpoint: str, body: bytes, owner: str, request_id: str) -> BatchAnswer | None:
        self.began.append(time.monotonic())
        await asyncio.sleep(0)
        return self.answer(len(self.began) - 1)

    def model_check(self, owner: str) -> CheckModel:
        return lambda model: None


class NoMetrics:
    def count_batch_request(self, state: str) -> None:
        """Count nothing."""

    def set_batches(self, num_batches: int, num_running: int) -> None:
        """Set nothing."""


class Bench:
    """A runner that is turned by hand, or runs."""

    def __init__(self, root: Path, answer: Callable[[int], BatchAnswer]) -> None:
        self.folder = BatchFolder(root)
        assert self.folder.lock()
        self.store = StoreThread(BatchStore(self.folder.database))
        self.execute = Execute(answer)
        self.now = 1000.0
        self.runner = BatchRunner(
            self.store,
            self.folder,
            self.execute,
            lambda n: n < 4,
            RunnerLimits(100, lambda: 1000),
            NoMetrics(),
            self.clock,
        )

    def clock(self) -> float:
        return self.now

    async def batch(self, name: str, num_requests: int = 1) -> StoredBatch:
        """A batch in progress, of so many requests."""
        await self.store(BatchStore.add_file, _file(name))
        self.folder.path_of(f"file-{name}").write_bytes(LINE)
        batch = stored_batch(name, expires_at=2000)
        await self.store(BatchStore.add_batch, batch)
        requests = [BatchRequest(line, f"r{line}", 0, len(LINE)) for line in range(1, num_requests + 1)]
        await self.store(BatchStore.add_requests, name, requests)
        begun = await self.store(BatchStore.begin, name, num_requests, 0)
        assert begun is not None
        return begun

    async def found(self, name: str) -> StoredBatch:
        batch = await self.store(BatchStore.batch, name)
        assert batch is not None
        return batch

    async def ended(self, name: str) -> StoredBatch:
        async with asyncio.timeout(5):
            while not (batch := await self.found(name)).status.has_ended:  # noqa: ASYNC110 - nothing says when
                await asyncio.sleep(0.005)
        return batch


@asynccontextmanager
async def bench(root: Path, answer: Callable[[int], BatchAnswer]) -> AsyncIterator[Bench]:
    made = Bench(root, answer)
    try:
        yield made
    finally:
        await made.runner._tasks.cancel()
        await made.store.close()
        made.folder.release()


def _file(name: str) -> StoredFile:
    return StoredFile(id=f"file-{name}", owner="", created_at=0, num_bytes=1, filename="in", purpose="batch")


def answered(status: int, retry_after: float | None = None) -> BatchAnswer:
    return BatchAnswer(status, b"{}", "id", retry_after)


async def test_a_batch_that_is_cancelled_during_a_turn_is_left_alone(tmp_path: Path) -> None:
    async with bench(tmp_path, lambda place: answered(200)) as made:
        first, second = await made.batch("first"), await made.batch("second", num_requests=0)
        for batch in (first, second):
            made.runner.take(batch)
        made.runner._active["second"].is_read = True
        made.now = 3000.0  # both have expired
        stop = made.runner._stop

        async def stop_while_another_is_cancelled(id: str) -> None:
            await stop(id)
            if id == "first":
                await made.runner.cancel(second)

        made.runner._stop = stop_while_another_is_cancelled  # type: ignore[method-assign]
        await made.runner._turn()
        assert (await made.ended("second")).status is BatchStatus.CANCELLED
        assert (await made.ended("first")).status is BatchStatus.EXPIRED


async def test_a_batch_that_is_done_and_cancelled_during_a_turn_ends_once(tmp_path: Path) -> None:
    async with bench(tmp_path, lambda place: answered(200)) as made:
        first, second = await made.batch("first"), await made.batch("second", num_requests=0)
        for batch in (first, second):
            made.runner.take(batch)
        made.runner._active["second"].is_read = True
        made.runner._active["first"].batch = stored_batch("first", expires_at=0)
        finish = made.runner._finish

        async def finish_while_another_is_cancelled(batch: StoredBatch, status: BatchStatus) -> None:
            if batch.id == "first":
                await made.runner.cancel(second)
            await finish(batch, status)

        made.runner._finish = finish_while_another_is_cancelled  # type: ignore[method-assign]
        await made.runner._turn()
        assert (await made.ended("second")).status is BatchStatus.CANCELLED


async def test_the_files_of_a_batch_that_ends_twice_are_those_of_its_first_end(tmp_path: Path) -> None:
    async with bench(tmp_path, lambda place: answered(200)) as made:
        batch = await made.batch("twice")
        (request,) = await made.store(BatchStore.pending, "twice", 0, 10)
        await made.runner._record(batch, request, answered(200))
        await made.runner._end(batch, BatchStatus.CANCELLED)
        first = await made.found("twice")
        await made.runner._end(batch, BatchStatus.EXPIRED)
        assert await made.found("twice") == first
        assert first.status is BatchStatus.CANCELLED
        assert first.output_file_id is not None
        kept = {path.name for path in (tmp_path / "files").iterdir()}
        assert kept == {"file-twice", first.output_file_id} == await made.store(BatchStore.file_ids)


@pytest.mark.parametrize("retry_after", [None, 0.0])
async def test_a_row_that_finds_no_place_is_tried_ever_less_often_and_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry_after: float | None
) -> None:
    monkeypatch.setattr(runner_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(runner_module, "TICK_SECONDS", 0.001)
    async with bench(tmp_path, lambda place: answered(429 if place < 5 else 200, retry_after)) as made:
        made.runner.take(await made.batch("one"))
        running = asyncio.create_task(made.runner.run())
        ended = await made.ended("one")
        running.cancel()
        await asyncio.wait([running])
        assert (ended.status, ended.num_completed, ended.num_failed) == (BatchStatus.COMPLETED, 1, 0)
        began = made.execute.began
        gaps = [later - earlier for earlier, later in zip(began, began[1:], strict=False)]
        assert len(gaps) == 5
        for number, gap in enumerate(gaps):
            assert gap >= 0.01 * 2**number


def test_refusals_at_once_lengthen_the_pause_once_and_any_other_answer_ends_it() -> None:
    active = ActiveBatch(stored_batch("b", expires_at=9))
    rows = [BatchRequest(line, "", 0, 1) for line in range(3)]
    active.next.append(rows[2])
    for row in rows[:2]:
        active.refuse(row, 100.0, 1.0, 60.0)
    assert active.paused_until == 101.0
    assert [row.line for row in active.next] == [2, 0, 1]  # others have a turn before
    active.refuse(rows[2], 101.0, 1.0, 60.0)
    assert active.paused_until == 103.0
    for _ in range(20):
        active.refuse(rows[2], active.paused_until, 1.0, 60.0)
    assert active.paused_until - 60.0 > 103.0
    before = active.paused_until
    active.refuse(rows[2], before, 1.0, 60.0)
    assert active.paused_until == before + 60.0
    active.admit()
    active.refuse(rows[2], 1e6, 1.0, 60.0)
    assert active.paused_until == 1e6 + 1.0
