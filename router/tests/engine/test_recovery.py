"""Steps that fail, over fake shards: whoever is to blame gets the error, and everybody else their own tokens."""

import asyncio
from math import ceil, log2
from pathlib import Path

import pytest
from engines import expected, request, run, running
from fakes import eventually
from fleets import running as running_fleet
from prompts import LONG

from funitel.proto.errors import BrokenScores, FunitelError, ResourceExhausted, StepFailed
from funitel.router.engine.engine import Engine

POISON = 90  # first token of prompts that fail steps


async def answers(engine: Engine, firsts: list[int], num_tokens: int = LONG) -> list[list[int] | BaseException]:
    tasks = (run(engine, request(5, num_tokens, first=first)) for first in firsts)
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)


def check(found: list[list[int] | BaseException], firsts: list[int], error: type[FunitelError]) -> None:
    """Whoever is poison got the error, and all others their tokens."""
    for first, one in zip(firsts, found, strict=True):
        if first >= POISON:
            assert type(one) is error, one
        else:
            assert one == expected(request(5, LONG, first=first)), first


@pytest.mark.parametrize("culprits", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_one_that_fails_its_steps_fails_alone_and_soon(tmp_path: Path, num_ranks: int, culprits: int) -> None:
    async with running(tmp_path, num_ranks) as (engine, fakes, metrics):
        for fake in fakes:
            fake.chokes_from = POISON
        firsts = [*range(16 - culprits), *range(POISON, POISON + culprits)]
        check(await answers(engine, firsts), firsts, StepFailed)
        failed = sum(
            metrics.registry.get_sample_value("tgi_batch_inference_failure_total", {"method": method}) or 0
            for method in ("prefill", "decode")
        )
        assert culprits <= failed <= culprits * (ceil(log2(16)) + 1)
        assert await run(engine, request()) == expected(request())


async def test_for_want_of_memory_steps_are_smaller_and_nobody_fails(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), _):
        fake.most_rows = 5
        firsts = list(range(16))
        check(await answers(engine, firsts), firsts, ResourceExhausted)
        assert max(len(step) for step in fake.steps[-20:]) <= 5


async def test_one_that_memory_does_not_suffice_for_is_told_so(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), _):
        fake.most_rows = 0
        with pytest.raises(ResourceExhausted, match="too many"):
            await asyncio.wait_for(run(engine, request(20)), 5)
        fake.most_rows = 8
        assert await run(engine, request(20)) == expected(request(20))


async def test_poison_sent_again_and_again_puts_out_no_replica(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        for (fake,) in fleet.replicas:
            fake.chokes_from = POISON
        for _ in range(8):
            with pytest.raises(StepFailed, match="choked"):
                async with fleet.fleet.submit(request(first=POISON)) as stream:
                    await stream.last()
        assert fleet.value("funitel_replicas", state="serving") == 2


async def test_who_comes_or_leaves_meanwhile_is_served_or_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), _):
        fake.chokes_from = POISON
        fake.delay = lambda: 0.002
        firsts = [*range(7), POISON]
        first = asyncio.create_task(answers(engine, firsts))
        leaving = [asyncio.create_task(run(engine, request(5, LONG, first=20 + i))) for i in range(4)]

        async def is_trying() -> bool:
            return bool(engine._scheduler.bisector.on_trial)

        await eventually(is_trying, "bisector are tried")
        late = asyncio.create_task(answers(engine, [40, POISON + 1]))
        for task in leaving:
            task.cancel()
        check(await first, firsts, StepFailed)
        check(await late, [40, POISON + 1], StepFailed)
        assert not engine._scheduler.running
        assert engine._scheduler.blocks.num_used == 0


async def test_what_a_broken_sequence_has_computed_is_nobodys_beginning(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), _):
        fake.has_no_scores_from = POISON
        with pytest.raises(BrokenScores):
            await run(engine, request(30, 5, first=POISON))
        fake.has_no_scores_from = 1 << 32
        before = fake.num_computed
        assert await run(engine, request(30, 5, first=POISON)) == expected(request(30, 5, first=POISON))
        assert fake.num_computed - before >= 34, "all of the prompt was computed again"
        before = fake.num_computed
        assert await run(engine, request(30, 5, first=POISON)) == expected(request(30, 5, first=POISON))
        assert fake.num_computed - before < 34, "what is sound is found again"
