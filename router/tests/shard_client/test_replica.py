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


def test_an_answer_of_a_batch_that_was_joined_since_does_not_bring_it_back() -> None:
    """The rows of both are the same by then: the batch was joined to one of which the own row has left."""
    calls: Any = {name: lambda *_: None for name in ("prefill", "decode", "filter")}
    replica = Replica(cast(Ranks, SimpleNamespace(infos=(ShardInfo(rank=0),), **calls)))
    starts = [
        SequenceStart(request_id=i, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=9))
        for i in (1, 2)
    ]
    first, second = (
        replica.send(StepPlan((start,), (), {start.request_id: 1}, StepLoad(), is_alone=True)) for start in starts
    )
    joined = replica.send(StepPlan((), (), {1: 1, 2: 1}, StepLoad()))
    replica.settle(first, (StepResult((), CachedBatch(first.batch_id, (1,))),))
    replica.drop_all_but({2})
    replica.settle(second, (StepResult((), CachedBatch(second.batch_id, (2,))),))
    assert replica.send(StepPlan((), (), {2: 1}, StepLoad())).batch_id == joined.batch_id
