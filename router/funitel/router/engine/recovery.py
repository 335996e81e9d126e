"""What becomes of the sequences of a replica when a step has failed: whoever is to blame ends, all others begin again.

Whom a failure is put down to is `bisector`' to say. Runs on the event loop, between two turns of a `StepLoop`.

The smallest step there is, to tell a replica that computes nothing from a sequence that cannot be computed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container

from funitel.proto.errors import FunitelError, InvalidRequest, ResourceExhausted, ShardFailed, ShardUnsound, StepFailed
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

PROBE_ID = 2**64 - 1  # of a sequence that no request has
PROBE_SECONDS = 30.0  # in which it is answered


async def is_sound(replica: Replica, blocks: BlockPool) -> bool:
    """Whether a replica that holds nothing computes a prompt of one token; it holds nothing afterwards."""
    num_tokens = 1 + replica.info.num_opening_tokens
    lent = blocks.allocate(blocks.blocks_for(num_tokens))
    start = SequenceStart(
        request_id=PROBE_ID,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=1, ignore_eos=True),
        input_ids=(0,),
        blocks=lent,
        chunk_len=num_tokens,
    )
    load = StepLoad()
    load.add_chunk(0, num_tokens)
    step = replica.send(StepPlan((start,), (), {PROBE_ID: num_tokens}, load))
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            replica.settle(step, await step.results)
            await replica.clear()
    except (FunitelError, TimeoutError):
        return False
    finally:
        blocks.free(lent)
    return True


logger = logging.getLogger(__name__)


class Recovery:
    """Begins again after a failed step, over the parts of a step loop.

    Args:
        replica: whose step failed.
        scheduler: planned it.
        pipeline: has it under way.
        requests: get the error, if they are to blame.
        metrics: told of the failure.
        compiling: ids of sequences whose grammar is compiled, which survive the failure of all others.
        lose: tells who is to know that the shards are gone; whether there is anyone.
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
        """The oldest call under way has failed: who is to blame gets the error, all others begin again.

        The shards hold nothing afterwards. What they computed in later calls is not taken into account: a sequence
        that is resumed computes the same once more.
        """
        call = self._pipeline.oldest
        plan = call.plan if call is not None else None
        await self._pipeline.drain()
        if plan is not None:
            self._metrics.count_step_failure(plan.method)
        blamed = self._blame(plan, error)
        self._scheduler.abandon()
        self._scheduler.preempt_all()
        try:
            await self._replica.clear()
        except FunitelError as failure:
            if not await has_lost_shards(failure):
                self._requests.fail_all(failure, self._compiling)
            return
        if blamed:
            await self._punish(blamed, plan, error)

    def _blame(self, plan: StepPlan | None, error: FunitelError) -> list[Sequence]:
        """Whom a failure is put down to; nobody when dropping rows failed, or it is still to be found out."""
        scheduler = self._scheduler
        running = scheduler.running
        logger.error("step failed: %s", error.message)
        if isinstance(error, ShardUnsound) or not scheduler.can_resume:
            return list(running.values())
        if plan is None:
            return []
        goals = scheduler.goals(plan)
        if isinstance(error, InvalidRequest) and plan.starts:  # refused for what a newcomer asks for
            goals = {start.request_id: goals[start.request_id] for start in plan.starts if start.request_id in goals}
        if not goals:  # all have left
            return []
        lacks_memory = isinstance(error, ResourceExhausted)
        blamed = scheduler.bisector.fail(goals, plan.num_tokens, lacks_memory=lacks_memory)
        return [] if blamed is None else [running[blamed]]

    async def _punish(self, blamed: list[Sequence], plan: StepPlan | None, error: FunitelError) -> None:
        """Give the error to those to blame, unless it is the replica that computes nothing at all."""
        is_refused = isinstance(error, InvalidRequest) and plan is not None and bool(plan.starts)
        if not isinstance(error, ShardFailed | StepFailed) and not is_refused:
            error = StepFailed(error.message)
        if (
            is_refused
            or self._scheduler.bisector.has_succeeded_since
            or await is_sound(self._replica, self._scheduler.blocks)
        ):
            for sequence in blamed:
                self._requests.fail(sequence, error)
        elif not await self._lose(error):
            self._requests.fail_all(error, self._compiling)

    def may_send(self) -> bool:
        """Whether a step may be sent now; not before what is under way is answered when others are to be tried next."""
        bisector = self._scheduler.bisector
        while bisector.is_trying and bisector.has_passed(self._scheduler.computed()):
            if bisector.has_other_half:  # they are tried apart from those that have passed
                if self._pipeline.oldest is not None:
                    return False
                self._scheduler.preempt_all()
            bisector.try_other_half()
        return True
