"""The loop between HTTP and the shards: plan, send, commit, deliver. Owns admission, cancellation and draining.

Runs on the event loop; planning and sending happen without a pause between, so a client seen to leave is in no later
step.
"""

import asyncio
import logging
import time
from functools import partial

from funitel.proto import tracing
from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    NotReady,
    Overloaded,
    ShardFailed,
    StepFailed,
)
from funitel.proto.step import Generation
from funitel.router.chunking import MIN_CHUNK_TOKENS
from funitel.router.metrics import Metrics
from funitel.router.peer import check_capabilities
from funitel.router.replica import Replica
from funitel.router.scheduler import Scheduler, StepPlan
from funitel.router.sequence import Limits, Request, Sequence
from funitel.router.step_time import StepTimeModel
from funitel.router.stream import TokenStream

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests over one replica. `submit` from the event loop only."""

    def __init__(
        self,
        replica: Replica,
        scheduler: Scheduler,
        limits: Limits,
        metrics: Metrics,
        max_concurrent_requests: int,
    ) -> None:
        self.limits = limits
        self._replica = replica
        self._scheduler = scheduler
        self._metrics = metrics
        self._max_concurrent_requests = max_concurrent_requests
        self._streams: dict[int, TokenStream] = {}
        self._next_id = 0
        self._wake = asyncio.Event()
        self._compiling: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()  # set whenever a request ends
        self._is_draining = False
        self._num_preempted = 0
        self._has_told_target = False
        self._loop = asyncio.create_task(self._run(), name="engine")

    @property
    def compute_type(self) -> str:
        """Shards and device, such as "2-cpu"."""
        return f"{len(self._replica.infos)}-{self._replica.info.device_type}"

    def submit(self, request: Request) -> TokenStream:
        """Queue a request.

        Raises:
            InvalidRequest: the shards would ignore a part of it.
            Overloaded: `max_concurrent_requests` are in flight.
            NotReady: the router is draining.
            ShardFailed: the engine has stopped.
        """
        check_capabilities(request.sampling, self._replica.capabilities)
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._loop.done():
            raise ShardFailed("the engine has stopped")
        if len(self._streams) >= self._max_concurrent_requests:
            raise Overloaded(f": {len(self._streams)} requests in flight, at most {self._max_concurrent_requests}")
        sequence = Sequence(self._next_id, request)
        self._next_id += 1
        stream = TokenStream(request, cancel=partial(self._cancel, sequence))
        self._streams[sequence.id] = stream
        if request.sampling.grammar:
            task = asyncio.create_task(self._compile_and_queue(sequence))
            self._compiling.add(task)
            task.add_done_callback(self._compiling.discard)
        else:
            self._queue(sequence)
        return stream

    def _queue(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._wake.set()

    async def _compile_and_queue(self, sequence: Sequence) -> None:
        """Queue a sequence once the shards have compiled its grammar, unless the client has left by then."""
        sampling = sequence.request.sampling
        try:
            await self._replica.compile_grammar(sampling.grammar_type, sampling.grammar)
            if self._loop.done():
                raise ShardFailed("the engine has stopped")
        except FunitelError as error:
            self._fail(sequence, error)
            return
        if sequence.id in self._streams:
            self._queue(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        """Take a sequence out of every later step."""
        self._forget(sequence)
        self._scheduler.remove(sequence)
        self._metrics.count_cancelled()
        self._wake.set()

    async def health(self) -> None:
        """Raise a FunitelError unless every shard answers and the loop runs."""
        if self._loop.done():
            raise ShardFailed("the engine has stopped")
        await self._replica.health()

    async def close(self) -> None:
        """Refuse new requests, let running ones finish, then let go of the shards."""
        self._is_draining = True
        while self._streams:
            self._left.clear()
            await self._left.wait()
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self._replica.close()

    # The loop -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                has_worked = await self._turn()
            except ShardFailed as error:
                await self._fail_running(error)
                continue
            except FunitelError as error:  # whatever a shard calls it, such as too little memory for a step
                await self._fail_running(StepFailed(error.message))
                continue
            except Exception:
                logger.exception("the engine stops")
                self._fail_all(ShardFailed("the engine has stopped"))
                raise
            self._report()
            if not has_worked:
                await self._wake.wait()

    async def _turn(self) -> bool:
        """One step, or the removal of rows that must not be in it. False when there is nothing to do."""
        self._scheduler.preempt()
        running = frozenset(self._scheduler.running)
        if not self._replica.held_ids <= running:
            begin = time.monotonic()
            await self._replica.retain(running)
            self._metrics.observe_filter("decode", time.monotonic() - begin)
            return True  # others may have left meanwhile: look again before planning
        joined = self._reason_to_join() if running else None
        plan = self._scheduler.schedule()
        if plan is None:
            return False
        await self._step(plan, joined)
        return True

    def _reason_to_join(self) -> str:
        """Why sequences that the next step lets in would join running ones, in TGI's words."""
        if self._scheduler.policy.is_chunked:
            return "chunking"
        return "wait_exceeded" if self._scheduler.has_waited_long else "backpressure"

    async def _step(self, plan: StepPlan, joined: str | None) -> None:
        method = "prefill" if plan.starts else "decode"
        begin = time.monotonic()
        for start in plan.starts:
            timings = self._streams[start.request_id].timings
            timings.started = timings.started or begin
        self._note_prefixes(plan)
        if plan.starts:
            self._metrics.observe_new_batch(len(plan.starts), joined)
        self._metrics.count_step(method)
        try:
            with tracing.span("batch", tracing.ROOT), tracing.span(method, attributes={"size": len(plan.computed)}):
                answer = await self._replica.step(plan)
        except InvalidRequest as error:
            self._metrics.count_step_failure(method)
            await self._refuse(plan, error)
            return
        except FunitelError:
            self._metrics.count_step_failure(method)
            raise
        seconds = time.monotonic() - begin
        self._metrics.observe_step(method, seconds, answer.by_rank)
        try:
            delivered = self._scheduler.commit(plan, answer.combined, seconds)
        except KeyError as error:
            raise ShardFailed(f"the shards gave no token for request {error}") from error
        for sequence, generation in delivered:
            self._deliver(sequence, generation)

    def _note_prefixes(self, plan: StepPlan) -> None:
        """Tell clients and metrics how much of each new prompt was found computed."""
        for start in plan.starts:
            if start.output_ids:
                continue  # resumed: what it finds is its own
            self._streams[start.request_id].num_cached_tokens = start.cache_len
            self._metrics.count_prefix(len(start.input_ids), start.cache_len)

    def _deliver(self, sequence: Sequence, generation: Generation) -> None:
        stream = self._streams[sequence.id]
        if generation.finished is not None:
            self._forget(sequence)
        stream.deliver(generation)

    def _forget(self, sequence: Sequence) -> TokenStream | None:
        self._left.set()
        return self._streams.pop(sequence.id, None)

    async def _refuse(self, plan: StepPlan, error: InvalidRequest) -> None:
        """The shards refused a step and changed nothing: the newcomers get the error, the others begin it again."""
        newcomers = {start.request_id for start in plan.starts}
        if not newcomers or self._scheduler.policy.is_plain:  # nobody to blame, or no way to resume
            raise StepFailed(error.message) from error
        logger.warning("a step was refused: %s", error.message)
        for sequence in tuple(self._scheduler.running.values()):
            if sequence.id in newcomers:
                self._fail(sequence, error)
        self._scheduler.preempt_all()
        await self._replica.clear()

    def _fail(self, sequence: Sequence, error: FunitelError) -> None:
        self._scheduler.remove(sequence)
        stream = self._forget(sequence)
        if stream is not None:
            stream.deliver(error)

    async def _fail_running(self, error: FunitelError) -> None:
        """Give every running sequence the error; the shards hold nothing of them afterwards."""
        logger.error("step failed: %s", error.message)
        for sequence in tuple(self._scheduler.running.values()):
            self._fail(sequence, error)
        try:
            await self._replica.clear()
        except FunitelError as failure:
            self._fail_all(failure)

    def _fail_all(self, error: FunitelError) -> None:
        """Give every sequence, waiting ones too, the error."""
        for sequence in (*self._scheduler.running.values(), *self._scheduler.waiting):
            self._fail(sequence, error)

    def _report(self) -> None:
        scheduler, metrics = self._scheduler, self._metrics
        metrics.set_sequences(len(scheduler.waiting), len(scheduler.running))
        metrics.set_pool(scheduler.blocks.num_used, scheduler.blocks.num_free, scheduler.blocks.num_cached)
        metrics.set_batch_tokens(scheduler.blocks.num_used * scheduler.blocks.block_size)
        metrics.set_cached_batches(self._replica.num_batches)
        while self._num_preempted < scheduler.num_preempted:
            self._num_preempted += 1
            metrics.count_preempted()
        self._tell_missed_target(scheduler.step_time)

    def _tell_missed_target(self, step_time: StepTimeModel) -> None:
        """Log once that the target is below what decoding alone takes."""
        if step_time.longest_plain_seconds is None or self._has_told_target:
            return
        self._has_told_target = True
        logger.warning(
            "--target-itl-ms %g cannot be held: decoding alone takes %.1f ms a step; beside running streams prompts "
            "advance by %d tokens a step",
            1e3 * (step_time.target_gap_seconds or 0.0),
            1e3 * step_time.longest_plain_seconds,
            MIN_CHUNK_TOKENS,
        )
