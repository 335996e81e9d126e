"""Steps sent ahead of results over fake shards: two at most, the same tokens, and failures that touch who they must."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_shards import FakeShard, engine_over, fake_shards, next_token
from fakes import eventually

from funitel.proto.errors import FunitelError, InvalidRequest, SettingsError, StepFailed
from funitel.proto.step import GrammarType, SamplingParams, StoppingParams
from funitel.router.core.request import Request
from funitel.router.engine.engine import Engine
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics


@asynccontextmanager
async def running(
    folder: Path, count: int = 1, shard: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Engine, list[FakeShard]]]:
    """An engine connected to fake shards."""
    async with fake_shards(folder, count, **(shard or {})) as shards:
        chosen = {"master_shard_uds_path": f"{folder}/shard-0", "max_batch_prefill_tokens": 32} | settings
        engine = await engine_over(RouterSettings(**chosen), Metrics())
        yield engine, shards
        for fake in shards:
            fake.pause.set()
        await asyncio.wait_for(engine.close(), 10)


def request(prompt_len: int = 5, max_new_tokens: int = 6, first: int = 0) -> Request:
    ids = tuple(range(first, first + prompt_len))
    stopping = StoppingParams(max_new_tokens=max_new_tokens)
    return Request(input_ids=ids, sampling=SamplingParams(), stopping=stopping, inputs="".join(map(chr, ids)))


def expected(asked: Request) -> list[int]:
    tokens = list(asked.input_ids)
    for _ in range(asked.stopping.max_new_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(asked.input_ids) :]


async def run(engine: Engine, asked: Request, leave_after: int | None = None) -> list[int]:
    ids: list[int] = []
    async with engine.submit(asked) as stream:
        async for generation in stream:
            ids += generation.tokens.ids
            if leave_after is not None and len(ids) >= leave_after:
                break
    return ids


@pytest.mark.parametrize(
    ("shard", "steps", "most"),
    [
        ({}, None, 2),
        ({"device_type": "cuda"}, None, 3),
        ({"device_type": "cuda"}, 2, 2),
        ({}, 3, 3),
        ({}, 1, 1),
        ({"is_plain": True}, 2, 1),
        ({"is_chunked": False}, 2, 2),
    ],
    ids=["two", "three on a GPU", "two on a GPU", "three", "one", "plain TGI", "unchunked"],
)
async def test_so_many_steps_are_under_way(tmp_path: Path, shard: dict[str, Any], steps: int | None, most: int) -> None:
    async with running(tmp_path, 2, shard, pipeline_steps=steps) as (engine, shards):
        for fake in shards:
            fake.pause.clear()
        task = asyncio.create_task(run(engine, request()))

        async def are_full() -> bool:
            return [fake.num_here for fake in shards] == [most, most]

        await eventually(are_full, "so many steps are under way")
        for fake in shards:
            fake.pause.set()
        assert await task == expected(request())
        assert [fake.most_here for fake in shards] == [most, most]


async def test_who_comes_early_in_a_long_step_is_in_the_next(tmp_path: Path) -> None:
    """The plan of a step waits while the one before it has long to go; the ranks do not wait for it."""
    async with running(tmp_path) as (engine, (fake,)):
        fake.delay = lambda: 0.1
        async with engine.submit(request(5, 12)) as stream:
            answers = aiter(stream)
            for _ in range(6):
                await anext(answers)
            await asyncio.sleep(0.02)
            assert fake.num_here == 1
            next_step = len(fake.steps)
            assert await run(engine, request(3, 1, first=50)) == expected(request(3, 1, first=50))
            assert fake.steps[next_step] == [0, 1]
            assert fake.most_here == 2


async def test_no_step_is_sent_for_a_sequence_whose_last_token_is_under_way(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,)):
        assert await run(engine, request(5, 3)) == expected(request(5, 3))
        assert fake.steps == [[0], [0], [0]]
        assert fake.batches == {}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stride", [1, 3], ids=["single tokens", "forced spans"])
@pytest.mark.parametrize("shard", [{}, {"is_chunked": False}], ids=["chunked", "unchunked"])
@pytest.mark.parametrize("steps", [2, 3])
async def test_tokens_are_the_same_however_late_the_answers(
    tmp_path: Path, count: int, stride: int, shard: dict[str, Any], steps: int
) -> None:
    """Requests join and leave while steps are under way, in a pool for few of them."""
    chance = random.Random(count * 10 + stride)
    async with running(tmp_path, count, shard | {"pool_tokens": 220}, pipeline_steps=steps) as (engine, shards):
        for fake in shards:
            fake.stride = stride
            fake.delay = lambda: chance.choice((0.0, 0.0, 0.002))

        async def client(number: int) -> None:
            await asyncio.sleep(chance.random() * 0.01)
            asked = request(chance.randrange(1, 20), chance.randrange(1, 120), first=number)
            leave_after = chance.choice((None, None, chance.randrange(1, 9)))
            found = await run(engine, asked, leave_after)
            assert found == expected(asked)[: len(found)]
            assert leave_after is not None or len(found) == asked.stopping.max_new_tokens

        await asyncio.gather(*(client(number) for number in range(40)))
        assert engine._scheduler.blocks.num_used == 0
        assert shards[0].most_here == steps
        assert engine._scheduler.num_preempted > 0 or "is_chunked" in shard or stride > 1

        async def are_empty() -> bool:
            return all(fake.batches == {} for fake in shards)

        await eventually(are_empty, "every row was dropped")


async def test_who_leaves_does_not_stop_the_others(tmp_path: Path) -> None:
    """Rows are dropped between two steps: the one under way is not waited for."""
    async with running(tmp_path) as (engine, (fake,)):
        others = [asyncio.create_task(run(engine, request(5, 40, first=i))) for i in range(3)]
        leavers = [asyncio.create_task(run(engine, request(5, 99, first=9 + i), leave_after=4 + i)) for i in range(4)]
        await asyncio.gather(*leavers)
        found = await asyncio.gather(*others)
        assert found == [expected(request(5, 40, first=i)) for i in range(3)]
        assert "FilterBatch" in fake.calls
        assert len(fake.steps) <= 40 + 2  # the steps of the longest, and at most one more at either end


async def test_of_many_newcomers_only_the_one_refused_gets_the_error(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (engine, shards):
        old = asyncio.create_task(run(engine, request(5, 60)))
        await asyncio.sleep(0.05)
        for fake in shards:
            fake.refuses_prompts_from = 90
        good = [request(3, 5, first=10 * i) for i in range(5)]
        bad = [request(3, 5, first=90), request(3, 5, first=95)]
        asked = [*good[:2], bad[0], *good[2:], bad[1]]
        found = await asyncio.gather(*(run(engine, one) for one in asked), return_exceptions=True)
        for one, answer in zip(asked, found, strict=True):
            if one in bad:
                assert isinstance(answer, InvalidRequest)
            else:
                assert answer == expected(one)
        assert await old == expected(request(5, 60))
    assert all(fake.batches == {} for fake in shards)


async def test_a_failed_step_costs_nobody_who_was_not_in_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,)):
        fake.pause.clear()
        first = asyncio.create_task(run(engine, request()))
        await asyncio.sleep(0.05)
        fake.failures.append(grpc.StatusCode.ABORTED)
        later = asyncio.create_task(run(engine, request(first=50)))
        await asyncio.sleep(0.05)
        fake.pause.set()
        with pytest.raises(StepFailed, match="told to fail"):
            await first
        assert await later == expected(request(first=50))


async def test_a_second_step_that_fails_leaves_the_first_ones_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,)):
        fake.pause.clear()
        stream = engine.submit(request())
        await asyncio.sleep(0.05)
        assert fake.num_here == 2
        fake.fails_after = 1
        fake.failures.append(grpc.StatusCode.ABORTED)
        fake.pause.set()
        answers = aiter(stream)
        ids = [*(await anext(answers)).tokens.ids]
        with pytest.raises(StepFailed, match="told to fail"):
            await anext(answers)
        assert ids == expected(request())[:1]
        assert await run(engine, request()) == expected(request())


async def test_an_unforeseen_failure_to_compile_a_grammar_ends_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def explode(*_: Any) -> None:
        raise RuntimeError("a bug")

    async with running(tmp_path) as (engine, _):
        monkeypatch.setattr(engine._replica, "compile_grammar", explode)
        sampling = SamplingParams(grammar="a+", grammar_type=GrammarType.REGEX)
        asked = Request(input_ids=(1,), sampling=sampling, stopping=StoppingParams(max_new_tokens=1))
        with pytest.raises(FunitelError, match="a bug"):
            await asyncio.wait_for(run(engine, asked), 5)
        assert await run(engine, request()) == expected(request())


@pytest.mark.parametrize("steps", [0, 4])
def test_a_length_that_shards_do_not_tolerate_is_refused(steps: int) -> None:
    with pytest.raises(SettingsError, match=f"--pipeline-steps must be within 1..3, given {steps}"):
        RouterSettings(pipeline_steps=steps)
