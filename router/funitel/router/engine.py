"""The loop between HTTP and the shards: settle, plan, send, deliver. Owns admission, cancellation and draining.

Runs on the event loop. A turn is made whenever something has happened: a step was answered, a request came or left. It
takes answers into account in order, sends further steps before it delivers what was answered, and never waits; so the
shards compute while tokens go to their clients (`pipeline`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from funitel.proto.errors import (
    DeadlineExceeded,
    FunitelError,
    InvalidRequest,
    NotReady,
    Overloaded,
    ShardFailed,
    StepFailed,
)
from funitel.proto.step import Generation
from funitel.router.admission import Admission, InFlight
from funitel.router.chunking import MIN_CHUNK_TOKENS
from funitel.router.deadlines import Deadlines
from funitel.router.metrics import Metrics
from funitel.router.peer import check_capabilities
from funitel.router.pipeline import Pipeline
from funitel.router.placement import Standing
from funitel.router.replica import Replica
from funitel.router.scheduler import Scheduler, StepPlan
from funitel.router.sequence import Limits, Request, Sequence
from funitel.router.step_time import StepTimeModel
from funitel.router.stream import TokenStream

logger = logging.getLogger(__name__)

MOST_FAILED_STEPS = 3  # in a row, before it is no longer put down to those in them


class Engine:
    """Runs requests over one replica. `submit` from the event loop only."""

    def __init__(
        self,
        replica: Replica,
        scheduler: Scheduler,
        limits: Limits,
        metrics: Metrics,
        admission: Admission,
        pipeline_steps: int = 1,
    ) -> None:
        self.limits = limits
        self._replica = replica
        self._scheduler = scheduler
        self._metrics = metrics
        self._admission = admission
        self._deadlines = Deadlines(self._expire)
        self._streams: dict[int, TokenStream] = {}
        self._next_id = 0
        self._wake = asyncio.Event()
        self._pipeline = Pipeline(replica, pipeline_steps, self._wake.set)
        self._compiling: dict[asyncio.Task[None], Sequence] = {}
        self._left = asyncio.Event()  # set whenever a request ends
        self._is_draining = False
        self._has_given_up = False
        self._num_failed_steps = 0  # since one has succeeded
        self._preempted = (0, 0)  # sequences, and tokens computed again, that metrics know of
        self._has_told_target = False
        self.on_lost: Callable[[FunitelError], None] | None = None  # told once shards are gone; is to call `give_up`
        self._loop = asyncio.create_task(self._run(), name="engine")

    @property
    def compute_type(self) -> str:
        """Shards and device, such as "2-cpu"."""
        return f"{len(self._replica.infos)}-{self._replica.info.device_type}"

    def submit(self, request: Request) -> TokenStream:
        """Queue a request.

        Raises:
            InvalidRequest: the shards would ignore a part of it.
            Overloaded: there is no place for it, or it would wait longer than its deadline.
            DeadlineExceeded: its deadline has passed.
            NotReady: the router is draining.
            ShardFailed: the engine has stopped.
        """
        check_capabilities(request.sampling, self._replica.capabilities)
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._loop.done():
            raise ShardFailed("the engine has stopped")
        sequence = Sequence(self._next_id, request, arrived=time.monotonic())
        self._next_id += 1
        return self.accept(sequence)

    def accept(self, sequence: Sequence, in_flight: InFlight | None = None) -> TokenStream:
        """Queue a sequence whose id is new here, if there is a place for it.

        The bounds on requests hold for `in_flight`, when others than those here count too.

        Raises:
            Overloaded, DeadlineExceeded: as `submit`.
        """
        self._admit(sequence, in_flight or self.in_flight(sequence.request.key))
        stream = TokenStream(sequence.request, cancel=partial(self._cancel, sequence))
        self._take(sequence, stream)
        return stream

    def take_over(self, sequence: Sequence, stream: TokenStream) -> None:
        """Go on with what another engine gave up, draining or not."""
        stream.move(partial(self._cancel, sequence))
        self._take(sequence, stream)

    def give_up(self) -> list[tuple[Sequence, TokenStream]]:
        """Stop, and hand over whatever has not ended, oldest first; the shards are not asked."""
        self._has_given_up = True
        for task in (self._loop, *self._compiling):
            task.cancel()
        for sequence in self._scheduler.running.values():
            sequence.num_losses += 1
        scheduler = self._scheduler
        # One whose grammar has just been compiled may still be among those that compile.
        here = {s.id: s for s in (*scheduler.running.values(), *scheduler.waiting, *self._compiling.values())}
        handed_over = [
            (here[i].afresh(), self._streams[i])
            for i in sorted(here)
            if i in self._streams  # a client may have left while its grammar is compiled
        ]
        for sequence in here.values():
            self._deadlines.forget(sequence)
        self._streams.clear()
        self._left.set()
        return handed_over

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    def in_flight(self, key: bytes) -> InFlight:
        """Requests in flight: all, and those of an API key."""
        return InFlight(len(self._streams), sum(stream.request.key == key for stream in self._streams.values()))

    @property
    def can_resume(self) -> bool:
        """Whether a sequence can go on behind tokens that it has got already, here or elsewhere."""
        return not self._scheduler.policy.is_plain

    def standing(self, sequence: Sequence) -> Standing:
        """How suitable this replica is for a sequence that is not here."""
        return Standing(self._scheduler.load_tokens, self._scheduler.cached_prefix_len(sequence))

    def _take(self, sequence: Sequence, stream: TokenStream) -> None:
        self._streams[sequence.id] = stream
        self._deadlines.watch(sequence)
        if sequence.request.sampling.grammar:
            task = asyncio.create_task(self._compile_and_queue(sequence))
            self._compiling[task] = sequence
            task.add_done_callback(self._compiling.pop)
        else:
            self._queue(sequence)

    def _admit(self, sequence: Sequence, in_flight: InFlight) -> None:
        """Make sure that there is a place for a sequence; one of a key with more may lose its own."""
        if sequence.request.deadline is not None and sequence.request.deadline <= sequence.arrived:
            self._metrics.count_expired("arriving")
            raise DeadlineExceeded("the deadline passed before the request was queued")
        waiting, running = self._scheduler.waiting, self._scheduler.running.values()
        try:
            leaving = self._admission.check(sequence, in_flight, waiting, self._scheduler.shares, running)
        except Overloaded as refused:
            self._metrics.count_refused(refused.reason)
            raise
        if leaving is not None:
            place = self._admission.place_of(leaving, waiting, running)
            self._metrics.count_refused("displaced")
            lost = ": its place went to an API key that has fewer"
            self._fail(leaving, Overloaded(lost, place.position, place.wait_seconds, "displaced"))

    def _expire(self, sequence: Sequence) -> None:
        """End a sequence whose deadline has passed; it is in no later step."""
        is_running = sequence.id in self._scheduler.running
        self._metrics.count_expired("running" if is_running else "waiting")
        done = f"after {len(sequence.output_ids)} tokens" if sequence.output_ids else "before its first token"
        self._fail(sequence, DeadlineExceeded(f"the deadline passed {done}"))
        self._wake.set()

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
            if not await self._has_lost_shards(error):
                self._fail(sequence, error)
            return
        except Exception as error:  # a stream must not hang
            logger.exception("compiling a grammar failed")
            self._fail(sequence, StepFailed(f"{type(error).__name__}: {error}"))
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
        await self.drained()
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self._pipeline.drain()
        if not self._has_given_up:  # rows of clients that left while the last steps were under way
            self._pipeline.drop_all_but(())
            await self._pipeline.drain()
        await self._replica.close()

    async def drained(self) -> None:
        """Return once no request is here."""
        while self._streams:
            self._left.clear()
            await self._left.wait()

    async def _has_lost_shards(self, error: FunitelError) -> bool:
        """Whether a call failed because a shard is gone; if so, who is to know was told, and nothing is left here.

        A shard whose steps all fail is as good as gone, whatever it says of its health: with next to nothing to do, it
        would be given all that comes.
        """
        if self.on_lost is None:
            return False
        if self._num_failed_steps < MOST_FAILED_STEPS:
            try:
                await self._replica.health()
                return False
            except FunitelError:
                pass
        self.on_lost(error)
        return True

    # The loop -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._has_given_up:
            self._wake.clear()
            try:
                self._turn()
            except FunitelError as error:
                self._num_failed_steps += not isinstance(error, InvalidRequest)
                if not await self._has_lost_shards(error):
                    await self._recover(error)
                continue
            except Exception:
                logger.exception("the engine stops")
                failure = ShardFailed("the engine has stopped")
                self._fail_all(failure)
                if self.on_lost is not None:
                    self.on_lost(failure)
                raise
            await self._wake.wait()

    def _turn(self) -> None:
        """Settle what has been answered and send what may be sent; deliver meanwhile.

        Raises:
            FunitelError: the oldest call under way has failed.
        """
        while self._pipeline.is_answered:
            delivered = self._settle()
            try:
                self._send_steps()
            finally:
                for sequence, generation in delivered:
                    self._deliver(sequence, generation)
        self._send_steps()
        self._report()

    def _settle(self) -> list[tuple[Sequence, Generation]]:
        """Take the oldest answer into account; returns what to deliver."""
        settled = self._pipeline.settle()
        if settled.plan is None or settled.answer is None:
            self._pipeline.done()
            self._metrics.observe_filter("decode", settled.seconds)
            return []
        self._metrics.observe_step(settled.plan.method, settled.seconds, settled.answer.by_rank)
        try:
            delivered = self._scheduler.commit(settled.plan, settled.answer.combined, settled.seconds)
        except KeyError as error:
            raise ShardFailed(f"the shards gave no token for request {error}") from error
        self._pipeline.done()
        self._num_failed_steps = 0
        num_tokens = sum(settled.plan.computed.values())
        self._admission.throughput.observe_step(num_tokens, settled.seconds, time.monotonic())
        return delivered

    def _send_steps(self) -> None:
        """Send steps while there is something to compute and not too many are under way.

        Planning and sending happen without a pause between, so a client seen to leave is in no later step.
        """
        scheduler, pipeline = self._scheduler, self._pipeline
        while pipeline.has_room:
            scheduler.preempt()
            pipeline.drop_all_but(scheduler.running)
            if not pipeline.has_room:
                return
            joined = self._reason_to_join() if scheduler.running else None
            plan = scheduler.schedule()
            if plan is None:
                return
            self._send(plan, joined)

    def _reason_to_join(self) -> str:
        """Why sequences that the next step lets in would join running ones, in TGI's words."""
        if self._scheduler.policy.is_chunked:
            return "chunking"
        return "wait_exceeded" if self._scheduler.has_waited_long else "backpressure"

    def _send(self, plan: StepPlan, joined: str | None) -> None:
        begin = time.monotonic()
        for start in plan.starts:
            timings = self._streams[start.request_id].timings
            timings.started = timings.started or begin
        self._note_prefixes(plan)
        if plan.starts:
            self._metrics.observe_new_batch(len(plan.starts), joined)
        self._metrics.count_step(plan.method)
        self._pipeline.send(plan)

    def _note_prefixes(self, plan: StepPlan) -> None:
        """Tell clients and metrics how much of each new prompt was found computed."""
        for start in plan.starts:
            if start.output_ids:
                continue  # resumed: what it finds is its own
            self._streams[start.request_id].num_cached_tokens = start.cache_len
            self._metrics.count_prefix(len(start.input_ids), start.cache_len)

    def _deliver(self, sequence: Sequence, generation: Generation) -> None:
        if any(logprob != logprob for logprob in generation.tokens.logprobs):
            self._fail(sequence, StepFailed("the model's scores are not numbers (NaN)"))
            return
        stream = self._streams[sequence.id]
        if generation.finished is not None:
            self._forget(sequence)
            self._admission.throughput.observe_end(sequence)
        stream.deliver(generation)

    def _forget(self, sequence: Sequence) -> TokenStream | None:
        self._left.set()
        self._deadlines.forget(sequence)
        return self._streams.pop(sequence.id, None)

    # Failures -------------------------------------------------------------------------------------------------------

    async def _recover(self, error: FunitelError) -> None:
        """The oldest call under way has failed: whom it concerns gets the error, all others begin again.

        The shards hold nothing afterwards. What they computed in later calls is not taken into account: a sequence
        that is resumed computes the same once more.
        """
        call = self._pipeline.oldest
        plan = call.plan if call is not None else None
        await self._pipeline.drain()
        self._scheduler.abandon()
        if plan is not None:
            self._metrics.count_step_failure(plan.method)
        if isinstance(error, InvalidRequest) and plan is not None and plan.starts and self.can_resume:
            self._refuse(plan, error)
        else:
            self._fail_step(plan, error if isinstance(error, ShardFailed) else StepFailed(error.message))
        self._scheduler.preempt_all()
        try:
            await self._replica.clear()
        except FunitelError as failure:
            if not await self._has_lost_shards(failure):
                self._fail_all(failure)

    def _refuse(self, plan: StepPlan, error: InvalidRequest) -> None:
        """The shards refused a step and changed nothing: a newcomer is to blame, and gets the error.

        Of several nobody knows which; they enter again one by one.
        """
        logger.warning("a step was refused: %s", error.message)
        running = self._scheduler.running
        newcomers = [running[start.request_id] for start in plan.starts if start.request_id in running]
        if len(plan.starts) == 1:
            for sequence in newcomers:
                self._fail(sequence, error)
        for sequence in newcomers:
            sequence.enters_alone = True

    def _fail_step(self, plan: StepPlan | None, error: FunitelError) -> None:
        """Give the error to the sequences of a step; to every running one where no other can be resumed.

        When dropping rows failed nobody is to blame, unless it goes on like this.
        """
        logger.error("step failed: %s", error.message)
        is_hopeless = not self.can_resume or self._num_failed_steps >= MOST_FAILED_STEPS
        for sequence in tuple(self._scheduler.running.values()):
            if is_hopeless or (plan is not None and sequence.id in plan.computed):
                self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: FunitelError) -> None:
        self._scheduler.remove(sequence)
        stream = self._forget(sequence)
        if stream is not None:
            stream.deliver(error)

    def _fail_all(self, error: FunitelError) -> None:
        """Give every sequence, waiting ones too, the error; only those whose grammar is compiled stay."""
        for sequence in (*self._scheduler.running.values(), *self._scheduler.waiting):
            self._fail(sequence, error)
        compiling = {sequence.id for sequence in self._compiling.values()}
        for i in [i for i in self._streams if i not in compiling]:  # ended, and not told
            self._streams.pop(i).deliver(error)

    def _report(self) -> None:
        scheduler, metrics = self._scheduler, self._metrics
        metrics.set_sequences(len(scheduler.waiting), len(scheduler.running))
        metrics.set_queue(scheduler.waiting.num_preempted, scheduler.waiting.num_prompt_tokens)
        metrics.set_pool(scheduler.blocks.num_used, scheduler.blocks.num_free, scheduler.blocks.num_cached)
        metrics.set_batch_tokens(scheduler.blocks.num_used * scheduler.blocks.block_size)
        metrics.set_cached_batches(self._replica.num_batches)
        preempted = (scheduler.num_preempted, scheduler.shares.num_repeated)
        if preempted != self._preempted:
            metrics.count_preempted(*(now - before for now, before in zip(preempted, self._preempted, strict=True)))
            self._preempted = preempted
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
