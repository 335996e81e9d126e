"""Results of several ranks become one."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from funitel.proto.step import CachedBatch, SamplingParams, SequenceStart, ShardInfo, StepResult, StoppingParams
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.plan import StepPlan
from funitel.router.shard_client.replica import Ranks, Replica


@pytest.mark.parametrize("slowest", [0, 1])
def test_memories_of_strategies_are_kept_whichever_rank_is_the_slowest(slowest: int) -> None:
    """A rank without a request of the step describes none, and its memories are not read."""
    given: Any = SimpleNamespace(infos=(ShardInfo(rank=0), ShardInfo(rank=1)), prefill=lambda *_: None)
    replica = Replica(cast(Ranks, given))
    start = SequenceStart(request_id=6, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=2))
    step = replica.send(StepPlan((start,), (), {6: 1}, StepLoad()))
    kept = CachedBatch(step.batch_id, (6,))
    seconds = [2 if rank == slowest else 1 for rank in range(2)]
    results = (
        StepResult((), kept, total_ns=seconds[0], memories=((6, 7.5),)),
        StepResult((), kept, total_ns=seconds[1]),
    )
    assert replica.settle(step, results).combined.memories == ((6, 7.5),)
