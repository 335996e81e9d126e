"""Steps of a local executor are described in the order in which they were computed."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from funitel.llm.workers.ranks import LocalRanks
from funitel.llm.workers.threads import ComputeThread
from funitel.model_server.executor.executor import Executor
from funitel.proto.step import ShardInfo


class Steps:
    """An executor whose steps note when they are described."""

    def __init__(self) -> None:
        self.sampling = SimpleNamespace(describing_waits=False)
        self.num_computed = 0
        self.described: list[int] = []

    def compute_decode(self, *_: Any, **__: Any) -> Any:
        self.num_computed += 1
        number = self.num_computed
        return SimpleNamespace(describe=lambda: self.described.append(number))


async def test_a_step_that_is_awaited_when_it_has_ended_is_described_after_the_one_ahead() -> None:
    steps, compute = Steps(), ComputeThread()
    ranks = LocalRanks(cast(Executor, steps), ShardInfo(rank=0), compute)
    try:
        first = asyncio.ensure_future(ranks.decode((), (), (), None))
        await asyncio.sleep(0)  # it waits for its step
        second = ranks.decode((), (), (), None)
        compute.submit(lambda: None).result()  # both have ended, and the loop has not been told yet
        await asyncio.gather(first, second)
    finally:
        await ranks.close()
    assert steps.described == [1, 2]
