"""Recovery from a failed step: its culprits fail, all other sequences are resumed. Event loop, between two turns.

The `FaultBisector` finds the culprits. A soundness step, the smallest there is, tells a replica that computes nothing
from a sequence that cannot be computed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container

from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    ResourceExhausted,
    ShardFailed,
    ShardUnsound,
    SlotsLost,
    StepFailed,
)
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams
from funitel.router.core.request import Sequence
from funitel.router.engine.request_table import RequestTable
from funitel.router.engine.step_pipeline import Pipeline
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.plan import StepPlan
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.shard_client.replica import Replica
from funitel.router.telemetry.metrics import Metrics

SOUNDNESS_STEP_ID = 2**64 - 1  # of a sequence that no request has
SOUNDNESS_STEP_SECONDS = 30.0  # in which it is answered


async def is_sound(replica: Replica, blocks: BlockPool) -> bool:
    """Whether a replica that holds nothing computes a prompt of one token; it holds nothing afterwards."""
    num_tokens = 1 + replica.info.num_opening_tokens
    lent = blocks.allocate(blocks.blocks_for(num_tokens))
    lent_state = None if blocks.states is None else blocks.states.allocate()
    start = SequenceStart(
        request_id=SOUNDNESS_STEP_ID,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=1, ignore_eos=True),
        input_ids=(0,),
        blocks=lent,
        chunk_len=num_tokens,
        state_slot=lent_state or 0,
    )
    load = StepLoad()
    load.add_chunk(0, num_tokens)
    step = replica.send(StepPlan((start,), (), {SOUNDNESS_STEP_ID: num_tokens}, load))
    try:
        async with asyncio.timeout(SOUNDNESS_STEP_SECONDS):
            replica.settle(step, await step.results)
            await replica.clear()
    except (FunitelError, TimeoutError):
        return False
    finally:
        blocks.free(lent)
        if blocks.states is not None and lent_state is not None:
            blocks.states.release(lent_state)
    return True


logger = logging.getLogger(__name__)


class Recovery:
    """Begins again after a failed step, over the parts of a step loop.

    Args:
        replica: the step failed there.
        scheduler: planned it.
        pipeline: has it in flight.
        requests: the culprits get the error.
        metrics: count the failure.
        compiling: ids of sequences that wait for their grammar or adapter, which survive the failure of all others.
        lose: reports the shards as lost; whether another can be used.
    """

    def __init__(
        self,
        replica: Replica,
        scheduler: Scheduler,
        pipeline: Pipeline,
        requests: RequestTable,
        metrics: Metrics,
        compiling: Container[int],
        lose: Callable[[FunitelError], Awaitable[bool]],
    ) -> None:
        self._replica = replica
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._requests = requests
        self._metrics = metrics
        self._compiling = compiling
        self._lose = lose

    async def recover(self, error: FunitelError, has_lost_shards: Callable[[FunitelError], Awaitable[bool]]) -> None:
        """The oldest call in flight has failed: the culprits get the error, all others are resumed.

        There are no culprits where slots of cached blocks are lost: their tokens are computed instead.

        The shards hold nothing afterwards. What they computed in later calls is not taken into account: a sequence
        that is resumed computes the same once more.
        """
        call = self._pipeline.oldest
        plan = call.plan if call is not None else None
        await self._pipeline.drain()
        lost = error.slots if isinstance(error, SlotsLost) else ()
        if plan is not None and not lost:
            self._metrics.count_step_failure(plan.method)
        culprits = [] if lost else self._find_culprits(plan, error)
        self._scheduler.abandon()
        if lost:
            logger.warning("%s; what they held is computed again", error.message)
            self._scheduler.blocks.host.drop(lost)
        self._scheduler.preempt_all()
        try:
            await self._replica.clear()
        except FunitelError as failure:
            if not await has_lost_shards(failure):
                self._requests.fail_all(failure, self._compiling)
            return
        if culprits:
            await self._fail_culprits(culprits, plan, error)

    def _find_culprits(self, plan: StepPlan | None, error: FunitelError) -> list[Sequence]:
        """Return the culprits of a failure; none when dropping rows failed, or while they are still bisected."""
        scheduler = self._scheduler
        running = scheduler.running
        logger.error("step failed: %s", error.message)
        if isinstance(error, ShardUnsound) or not scheduler.can_resume:
            return list(running.values())
        if plan is None:
            return []
        goals = scheduler.goals(plan)
        if isinstance(error, InvalidRequest) and plan.starts:  # refused for what an entering sequence asks for
            goals = {start.request_id: goals[start.request_id] for start in plan.starts if start.request_id in goals}
        if not goals:  # all have left
            return []
        lacks_memory = isinstance(error, ResourceExhausted)
        culprit = scheduler.bisector.fail(goals, plan.num_tokens, lacks_memory=lacks_memory)
        return [] if culprit is None else [running[culprit]]

    async def _fail_culprits(self, culprits: list[Sequence], plan: StepPlan | None, error: FunitelError) -> None:
        """Fail the culprits with the error, unless it is the replica that computes nothing at all."""
        is_refused = isinstance(error, InvalidRequest) and plan is not None and bool(plan.starts)
        if not isinstance(error, ShardFailed | StepFailed) and not is_refused:
            error = StepFailed(error.message)
        if (
            is_refused
            or self._scheduler.bisector.has_succeeded_since
            or await is_sound(self._replica, self._scheduler.blocks)
        ):
            for sequence in culprits:
                self._requests.fail(sequence, error)
        elif not await self._lose(error):
            self._requests.fail_all(error, self._compiling)

    def may_send(self) -> bool:
        """Whether a step may be sent now; not before those in flight are answered when the other half is tried next."""
        bisector = self._scheduler.bisector
        while bisector.on_trial and bisector.has_passed(self._scheduler.computed()):
            if bisector.has_other_half:  # they are tried apart from those that have passed
                if self._pipeline.oldest is not None:
                    return False
                self._scheduler.preempt_all()
            bisector.try_other_half()
        return True
