"""The step loop between scheduler and shards: settle, plan, send, deliver; a token leaves the engine here.

Runs on the event loop. A turn is made whenever something has happened: a step was answered, a request came or left. It
takes answers into account in order, sends further steps before it delivers what was answered, and never waits; so the
shards compute while tokens go to their clients (`pipeline`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from functools import partial

from funitel.proto.errors import BrokenScores, FunitelError, ShardFailed, ShardUnsound
from funitel.proto.step import Generation
from funitel.proto.tracing import spans as tracing
from funitel.router.core.request import Sequence
from funitel.router.engine.recovery import Recovery
from funitel.router.engine.request_table import RequestTable
from funitel.router.engine.scheduler_metrics import SchedulerReport
from funitel.router.engine.snapshot import MAX_STEPS, PastStep, PastSteps
from funitel.router.engine.step_pipeline import Pipeline, step_timeout_seconds
from funitel.router.engine.step_traces import StepTraces
from funitel.router.kv_cache.host_tier import CacheTier
from funitel.router.scheduler.cost.throughput import Throughput
from funitel.router.scheduler.plan import StepPlan
from funitel.router.scheduler.result_check import check_result
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.shard_client.replica import Replica
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5  # between two checks of how long a call has been in flight


class StepLoop:
    """Steps of one replica, for the sequences of `scheduler` and the streams of `requests`.

    Args:
        replica: computes the steps.
        scheduler: plans them.
        requests: get what comes of them.
        metrics: observe every step.
        throughput: observes every step and every end.
        pipeline_steps: maximum of steps in flight.
        compiling: ids of sequences that wait for their grammar or adapter, which survive the failure of all others.
        decode_tokens: that one `decode` span of a trace is for.
        step_timeout_s: that a step may take, as the setting.
    """

    def __init__(
        self,
        replica: Replica,
        scheduler: Scheduler,
        requests: RequestTable,
        metrics: Metrics,
        throughput: Throughput,
        pipeline_steps: int,
        compiling: Container[int],
        decode_tokens: int,
        step_timeout_s: float,
    ) -> None:
        self.on_lost: Callable[[FunitelError], None] | None = None  # called once shards are lost; must call `evacuate`
        self._replica = replica
        self._scheduler = scheduler
        self._requests = requests
        self._metrics = metrics
        self._throughput = throughput
        self._compiling = compiling
        self._report = SchedulerReport(scheduler, replica, metrics)
        self._traces = StepTraces(requests.streams, decode_tokens)
        self._woken = asyncio.Event()
        self._turned: asyncio.Event | None = None  # set after the next turn, where something waits for it
        self._pipeline = Pipeline(replica, pipeline_steps, self.wake)
        self._timer: asyncio.TimerHandle | None = None  # wakes when the next step is to be planned
        self._newest = time.monotonic()  # when a sequence came last
        self._has_halted = False
        self.is_held = False  # no step is sent: the shards hold rows that requests have not claimed yet
        self._recovery = Recovery(replica, scheduler, self._pipeline, requests, metrics, compiling, self._lose)
        self.past = PastSteps(maxlen=MAX_STEPS)
        self._timeout_of = partial(step_timeout_seconds, step_timeout_s=step_timeout_s)
        self._task = asyncio.create_task(self._run(), name="engine")
        self._clock = asyncio.create_task(self._watch_clock(min(TICK_SECONDS, step_timeout_s / 4)), name="step clock")

    @property
    def has_ended(self) -> bool:
        """Whether nothing is computed any more."""
        return self._task.done()

    def wake(self) -> None:
        """Make a turn soon: something has happened."""
        self._woken.set()

    def note_queued(self) -> None:
        """Make a turn soon: a sequence was queued."""
        self._newest = time.monotonic()
        self.wake()

    def halt(self) -> None:
        """Stop; the shards are not asked."""
        self._has_halted = True
        self._task.cancel()
        self._clock.cancel()

    async def close(self) -> None:
        """Stop once the calls in flight are answered, and close the shards; lost ones answer no more."""
        self._task.cancel()
        self._clock.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._has_halted:
            await self._replica.close()  # calls in flight fail
            await self._pipeline.drain()
            return
        await self._pipeline.drain()
        self._pipeline.drop_all_but(())  # rows of clients that left while the last steps were in flight
        await self._pipeline.drain()
        await self._replica.close()

    async def has_lost_shards(self, error: FunitelError, *, is_beside_steps: bool = False) -> bool:
        """Whether a call failed because a shard is lost; if so, `on_lost` was called, and nothing is left here.

        A shard that has shown to be unsound is lost, whatever its health check says. So is one that a step got no
        answer from: what answers by now may be another, which knows nothing. A call beside the steps may just be late.
        """
        if self.on_lost is None:
            return False
        if not isinstance(error, ShardUnsound if is_beside_steps else ShardFailed):
            try:
                await self._replica.health()
                return False
            except FunitelError:
                pass
        return await self._lose(error)

    async def rows_dropped(self) -> None:
        """Return once the shards hold no row of those sequences that have left by now, and compute none of them.

        Rows of an earlier router that no request has claimed yet have not left, and nothing is computed meanwhile.
        """
        if self.is_held:
            return
        left = self._replica.rows - self._scheduler.running.keys()
        while not self.has_ended and left & (self._replica.rows - self._scheduler.running.keys()):
            turned = self._turned = self._turned or asyncio.Event()
            self.wake()
            await turned.wait()
            await self._pipeline.answered()
        await self._pipeline.answered()

    async def _lose(self, error: FunitelError) -> bool:
        """Report the shards as lost to them and to `on_lost`; whether there is one."""
        if self.on_lost is None:
            return False
        await self._replica.dismiss(error.message)
        self.on_lost(error)
        return True

    async def _run(self) -> None:
        while not self._has_halted:
            self._woken.clear()
            try:
                has_failed = await self._has_failed_turn()
                if self._turned is not None:
                    self._turned.set()
                    self._turned = None
                if has_failed:
                    continue
            except Exception:
                logger.exception("the engine stops")
                failure = ShardFailed("the engine has stopped")
                self._requests.fail_all(failure, self._compiling)
                if self.on_lost is not None:
                    self.on_lost(failure)
                raise
            await self._woken.wait()

    async def _has_failed_turn(self) -> bool:
        """Take a turn, and recover where it fails: then it is to be taken again."""
        try:
            self._turn()
            return False
        except FunitelError as error:
            if not await self.has_lost_shards(error):
                await self._recovery.recover(error, self.has_lost_shards)
                self._traces.wait_again(self._scheduler.waiting, "restarted")
            return True

    def _turn(self) -> None:
        """Settle what has been answered and send what may be sent; deliver meanwhile.

        Raises:
            FunitelError: the oldest call in flight has failed.
        """
        while self._pipeline.is_answered:
            delivered = self._settle()
            try:
                self._send_steps()
            finally:
                self._deliver(delivered)
        self._send_steps()
        self._report.update()

    async def _watch_clock(self, tick: float) -> None:
        """Give up calls that are in flight for too long; time in which this process stood still does not count."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(tick)
            self._pipeline.tick(min(time.monotonic() - begin, 2 * tick), self._timeout_of)

    def _settle(self) -> list[tuple[Sequence, Generation]]:
        """Take the oldest answer into account; returns what to deliver."""
        settled = self._pipeline.settle()
        if settled.plan is None or settled.answer is None:
            self._pipeline.done()
            self._metrics.observe_filter("decode", settled.seconds)
            return []
        self._metrics.observe_step(settled.plan.method, settled.seconds, settled.answer.by_rank)
        if not settled.plan.load.num_prompt_tokens:
            self._metrics.observe_decode(settled.plan.load.decode_context, settled.answer.by_rank)
        combined = settled.answer.combined
        problem = check_result(settled.plan, combined, settled.answer.ended, self._scheduler.running)
        if problem is not None:
            raise ShardUnsound(f"the shards' answer cannot be: {problem}")
        delivered = self._scheduler.commit(settled.plan, combined, settled.seconds)
        self._metrics.count_generated(sum([len(generation.tokens.ids) for _, generation in delivered]))
        self._pipeline.done()
        now = time.monotonic()
        self._throughput.observe_step(settled.plan.num_tokens, settled.seconds, now)
        measured = combined.total_ns / 1e9  # by the ranks: steps in flight wait for one another
        self.past.append(PastStep(settled.plan, measured or settled.seconds, now))
        return delivered

    def _send_steps(self) -> None:
        """Send steps while there is something to compute and not too many are in flight.

        Planning and sending happen without a pause between, so a client seen to leave is in no later step.
        """
        if self.is_held:
            return
        scheduler, pipeline = self._scheduler, self._pipeline
        while pipeline.has_room and (not scheduler.bisector.on_trial or self._recovery.may_send()):
            delay = pipeline.seconds_to_plan(self._newest, has_several_keys=scheduler.shares.num_known_keys > 1)
            if delay > 0.0:
                self._wake_in(delay)
                return
            if scheduler.blocks.needs_ticks:
                scheduler.blocks.tick(time.monotonic())
            num_preempted = scheduler.num_preempted
            scheduler.preempt()
            if scheduler.num_preempted != num_preempted:
                self._traces.wait_again(scheduler.waiting, "preempted")
            pipeline.drop_all_but(scheduler.running)
            if not pipeline.has_room:
                return
            joined = scheduler.reason_to_join if scheduler.running else None
            plan = scheduler.schedule()
            if plan is None:
                return
            self._send(plan, joined)

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.wake)

    def _send(self, plan: StepPlan, joined: str | None) -> None:
        begin = time.monotonic()
        for start in plan.starts:
            stream = self._requests.streams[start.request_id]
            stream.timings.started = stream.timings.started or begin
            if not start.output_ids:  # one that is resumed finds what is its own
                stream.num_cached_tokens = start.cache_len
                tier = self._scheduler.blocks.host
                loaded = self._scheduler.running[start.request_id].num_loaded
                if tier.num_slots:
                    stream.cached_by_tier = {CacheTier.MEMORY: start.cache_len - loaded, tier.kind: loaded}
                self._metrics.count_prefix(len(start.input_ids), start.cache_len, loaded, tier.kind)
        if plan.starts:
            self._metrics.observe_new_batch(len(plan.starts), joined)
        self._metrics.count_step(plan.method)
        spans = self._traces.send(plan, self._scheduler.running) if tracing.is_recording() else []
        if not spans:
            self._pipeline.send(plan)
            return
        with tracing.propagate_to(spans):
            self._pipeline.send(plan)

    def _deliver(self, delivered: Seq[tuple[Sequence, Generation]]) -> None:
        now, streams = time.monotonic(), self._requests.streams
        for sequence, generation in delivered:
            if sequence.is_broken or sequence.estimated_seconds or generation.finished is not None:
                self._deliver_edge(sequence, generation, now)
            else:
                streams[sequence.id].deliver(generation, now)

    def _deliver_edge(self, sequence: Sequence, generation: Generation, now: float) -> None:
        """Deliver what may be the first of a sequence, or is the last."""
        if sequence.is_broken:
            self._requests.fail(sequence, BrokenScores("the model's scores are not numbers, or infinite"))
            return
        stream = self._requests.streams[sequence.id]
        if sequence.estimated_seconds:
            self._throughput.observe_first_token(sequence, now)
        if generation.finished is not None:
            self._requests.remove(sequence)
            self._throughput.observe_end(sequence)
        stream.deliver(generation, now)
