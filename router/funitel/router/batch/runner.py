"""Run batches: validate their files, start requests where there is room, record each result, write the files.

Event loop only. A process that begins anew goes on where the store says that the last one was: a request without a
result is run again.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from funitel.proto.errors import FunitelError, StorageFailed
from funitel.router.batch.active import ActiveBatch
from funitel.router.batch.folder import BatchFolder
from funitel.router.batch.formats import (
    BatchAnswer,
    CheckModel,
    InputCheck,
    InputRules,
    answer_line,
    check_input,
    internal_answer,
    new_id,
    parse_object,
)
from funitel.router.batch.output import write_output
from funitel.router.batch.records import BatchError, BatchRequest, BatchStatus, StoredBatch
from funitel.router.batch.store import BatchStore, StoreThread, storage_errors
from funitel.router.core.background_tasks import Tasks

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.02  # between two looks for room, while there are requests to start
IDLE_SECONDS = 1.0  # between two looks for batches that expire
READ_AHEAD = 200  # requests read from the store at once
REQUESTS_A_TURN = 500  # written to the store at once
RETRY_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
_BUSY = frozenset({429, 503})  # no place, no quota, not ready: later
_FAILED = frozenset({424, 500, 502, 504})


class Execute(Protocol):
    """Runs requests as if they had come by HTTP."""

    async def run(self, endpoint: str, body: bytes, owner: str, request_id: str) -> BatchAnswer | None:
        """Answer one request; None where its owner's key is not valid any more."""

    def model_check(self, owner: str) -> CheckModel:
        """What says which models an owner may not ask for."""


class BatchMetrics(Protocol):
    """The counts of batches."""

    def count_batch_request(self, state: str) -> None:
        """Count a request that ended as `completed` or `failed`, or was `retried`."""

    def set_batches(self, num_batches: int, num_running: int) -> None:
        """Set the batches that have not ended, and their requests under way."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Bounds of an input file."""

    max_requests: int
    max_line_bytes: Callable[[], int]  # asked for each file: models may come to be loaded


class BatchRunner:
    """Runs the batches of one folder.

    Args:
        store: has their state.
        folder: has their files.
        execute: runs their requests.
        has_room: whether one more may be started beside so many.
        limits: of input files.
        metrics: counts requests.
        clock: seconds of the wall clock.
    """

    def __init__(
        self,
        store: StoreThread,
        folder: BatchFolder,
        execute: Execute,
        has_room: Callable[[int], bool],
        limits: RunnerLimits,
        metrics: BatchMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._folder = folder
        self._execute = execute
        self._has_room = has_room
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._active: dict[str, ActiveBatch] = {}  # in progress; the next to get a turn is first
        self._busy: dict[str, asyncio.Task[None]] = {}  # validated or written, by id
        self._tasks = Tasks()
        self._wake = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return sum(len(active.running) for active in self._active.values())

    def now(self) -> int:
        """The instant, as records have it."""
        return int(self._clock())

    # Life -----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run batches until cancelled; what is under way then has no result."""
        try:
            for batch in await self._store(BatchStore.unfinished):
                self.take(batch)
            while True:
                await self._turn()
                waits = any(active.next or not active.is_read for active in self._active.values())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS if waits else IDLE_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self._tasks.cancel()

    def take(self, batch: StoredBatch) -> None:
        """Go on with a batch where it is."""
        match batch.status:
            case BatchStatus.VALIDATING:
                self._begin(batch, self._validate(batch))
            case BatchStatus.IN_PROGRESS:
                self._active[batch.id] = ActiveBatch(batch)
            case BatchStatus.FINALIZING:
                self._begin(batch, self._end(batch, BatchStatus.COMPLETED))
            case BatchStatus.CANCELLING:
                self._begin(batch, self._end(batch, BatchStatus.CANCELLED))
            case _:
                return
        self._wake.set()

    async def cancel(self, batch: StoredBatch) -> StoredBatch:
        """Cancel a batch that is validated or in progress; its results so far are kept."""
        of = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        found = await self._store(BatchStore.set_status, batch.id, BatchStatus.CANCELLING, self.now(), of=of)
        assert found is not None, "batches are never deleted"
        if found.status is BatchStatus.CANCELLING and batch.status is not BatchStatus.CANCELLING:
            validating = self._busy.get(batch.id)
            if validating is not None:
                validating.cancel()
                await asyncio.wait([validating])
            await self._stop(batch.id)
            self.take(found)
        return found

    async def _stop(self, id: str) -> None:
        """Start no more requests of a batch, and end those under way."""
        active = self._active.pop(id, None)
        running = [] if active is None else list(active.running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _begin(self, batch: StoredBatch, work: Coroutine[Any, Any, None]) -> None:
        """Do what a batch as a whole needs, and fail it where that fails."""
        task = self._tasks.start(self._guarded(batch, work))
        self._busy[batch.id] = task

        def forget(ended: "asyncio.Task[None]") -> None:
            if self._busy.get(batch.id) is ended:
                del self._busy[batch.id]
            self._wake.set()

        task.add_done_callback(forget)

    async def _guarded(self, batch: StoredBatch, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except FunitelError as error:
            await self._fail(batch, error)
        except Exception as error:
            logger.exception("batch %s failed", batch.id)
            await self._fail(batch, FunitelError(f"{type(error).__name__}: {error}"))

    async def _fail(self, batch: StoredBatch, error: FunitelError) -> None:
        """End a batch that cannot go on, such as on a full disk: the reserve makes room for the state that says so."""
        logger.error("batch %s failed: %s", batch.id, error.message)
        await self._stop(batch.id)
        if isinstance(error, StorageFailed):
            await asyncio.to_thread(self._folder.give_up_reserve)
        why = [BatchError("storage_failed" if isinstance(error, StorageFailed) else "internal_error", error.message)]
        try:
            await self._store(BatchStore.fail_batch, batch.id, why, self.now())
        except StorageFailed as still:  # it is found as it was at the next start
            logger.error("batch %s: its state cannot be written: %s", batch.id, still.message)

    # Validation -----------------------------------------------------------------------------------------------------

    async def _validate(self, batch: StoredBatch) -> None:
        check = InputCheck()
        rules = InputRules(
            batch.endpoint,
            self._limits.max_requests,
            self._limits.max_line_bytes(),
            self._execute.model_check(batch.owner),
        )
        await self._store(BatchStore.clear_requests, batch.id)
        found = check_input(self._folder.path_of(batch.input_file_id), rules, check)
        while requests := await asyncio.to_thread(_next_of, found):
            if not check.errors:
                await self._store(BatchStore.add_requests, batch.id, requests)
        if check.errors:
            await self._store(BatchStore.fail_batch, batch.id, check.errors, self.now())
            return
        begun = await self._store(BatchStore.begin, batch.id, check.num_requests, self.now())
        if begun is not None and begun.status is BatchStatus.IN_PROGRESS:
            self.take(begun)

    # Requests -------------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """End what has expired or is done, and start requests while there is room."""
        for active in list(self._active.values()):
            batch = active.batch
            if self._active.get(batch.id) is not active:  # cancelled since, or failed
                continue
            if self._clock() >= batch.expires_at:
                await self._stop(batch.id)
                await self._finish(batch, BatchStatus.EXPIRED)
            elif active.is_done:
                del self._active[batch.id]
                await self._finish(batch, BatchStatus.COMPLETED)
        while self._has_room(self.num_running) and (chosen := await self._next()) is not None:
            self._start(chosen, chosen.next.popleft())
        self._metrics.set_batches(len(self._active) + len(self._busy), self.num_running)

    async def _finish(self, batch: StoredBatch, status: BatchStatus) -> None:
        """Write the files of a batch once its requests have ended."""
        if status is BatchStatus.COMPLETED:
            of = (BatchStatus.IN_PROGRESS,)
            try:
                found = await self._store(BatchStore.set_status, batch.id, BatchStatus.FINALIZING, self.now(), of=of)
            except StorageFailed as error:
                await self._fail(batch, error)
                return
            if found is None or found.status is not BatchStatus.FINALIZING:  # cancelled since
                return
        self._begin(batch, self._end(batch, status))

    async def _end(self, batch: StoredBatch, status: BatchStatus) -> None:
        latest = await self._store(BatchStore.batch, batch.id)
        assert latest is not None, "batches are never deleted"
        if await write_output(self._store, self._folder, latest, status):
            logger.info("batch %s %s requests=%d", batch.id, status, latest.num_requests)

    async def _next(self) -> ActiveBatch | None:
        """The next batch that has a request to start; batches take turns."""
        now = time.monotonic()
        for id, active in list(self._active.items()):
            if active.paused_until > now:
                continue
            if not active.next and not active.is_read:
                await self._read_ahead(active)
            if active.next and id in self._active:
                self._active[id] = self._active.pop(id)
                return active
        return None

    async def _read_ahead(self, active: ActiveBatch) -> None:
        requests = await self._store(BatchStore.pending, active.batch.id, active.last_line, READ_AHEAD)
        active.next.extend(requests)
        active.is_read = len(requests) < READ_AHEAD
        if requests:
            active.last_line = requests[-1].line

    def _start(self, active: ActiveBatch, request: BatchRequest) -> None:
        task = self._tasks.start(self._run(active, request))
        active.running[request.line] = task

        def forget(_: "asyncio.Task[None]") -> None:
            del active.running[request.line]
            self._wake.set()

        task.add_done_callback(forget)

    async def _run(self, active: ActiveBatch, request: BatchRequest) -> None:
        """Run one request, and record its result or queue it again."""
        batch = active.batch
        request_id = new_id("batch_req_")
        try:
            body = await asyncio.to_thread(self._body_of, batch, request)
            answer = await self._execute.run(batch.endpoint, body, batch.owner, request_id)
        except StorageFailed as error:
            self._begin(batch, _raise(error))
            return
        except Exception as error:
            logger.exception("a request of batch %s failed", batch.id)
            answer = internal_answer(FunitelError(f"{type(error).__name__}"), request_id)
        now = time.monotonic()
        if answer is None:
            active.give_back(request, now, MAX_PAUSE_SECONDS)
            return
        if answer.status in _BUSY:
            pause = max(RETRY_SECONDS, answer.retry_after or 0.0)
            active.refuse(request, now, pause, MAX_PAUSE_SECONDS)
            self._metrics.count_batch_request("retried")
            return
        active.admit()
        if answer.status in _FAILED and active.may_retry(request.line):
            active.give_back(request, now, RETRY_SECONDS)
            self._metrics.count_batch_request("retried")
        else:
            await self._record(batch, request, answer)

    def _body_of(self, batch: StoredBatch, request: BatchRequest) -> bytes:
        with storage_errors(), self._folder.path_of(batch.input_file_id).open("rb") as file:
            file.seek(request.offset)
            return json.dumps(parse_object(file.read(request.length))["body"]).encode()

    async def _record(self, batch: StoredBatch, request: BatchRequest, answer: BatchAnswer) -> None:
        try:
            was_written = await self._store(BatchStore.record, batch.id, answer_line(request, answer))
        except StorageFailed as error:
            self._begin(batch, _raise(error))
            return
        if was_written:
            self._metrics.count_batch_request("completed" if answer.is_success else "failed")


async def _raise(error: FunitelError) -> None:
    raise error


def _next_of(found: Iterable[BatchRequest]) -> list[BatchRequest]:
    with storage_errors():
        return list(islice(found, REQUESTS_A_TURN))
