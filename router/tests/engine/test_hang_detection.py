"""Shards that hang: noticed within the bound, told to end, and lost; those that only pause are waited for."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from engines import expected, request
from fake_shards import fake_shards
from fakes import eventually
from fleets import running
from prompts import LONG

from funitel.proto.errors import ShardUnsound
from funitel.router.engine.step_pipeline import FIRST_FACTOR, LATE_FACTOR, Pipeline, StepCall, step_timeout_seconds
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.plan import StepPlan
from funitel.router.shard_client import shards as shards_module
from funitel.router.shard_client.shards import Shards


def plan(predicted_seconds: float) -> StepPlan:
    return StepPlan((), (), {1: 1}, StepLoad(), predicted_seconds=predicted_seconds)


def test_a_step_is_given_what_it_may_take() -> None:
    assert step_timeout_seconds(None, 60.0) == 60.0
    assert step_timeout_seconds(plan(0.0), 60.0) == 60.0 * FIRST_FACTOR
    assert step_timeout_seconds(plan(0.01), 60.0) == 60.0
    assert step_timeout_seconds(plan(20.0), 60.0) == 20.0 * LATE_FACTOR


async def answer_of(fleet: object, asked: object) -> list[int]:
    async with fleet.submit(asked) as stream:  # type: ignore[attr-defined]
        return [token_id async for generation in stream for token_id in generation.tokens.ids]


@pytest.mark.parametrize("has_step_sockets", [True, False], ids=["step socket", "gRPC"])
@pytest.mark.parametrize("num_shards", [1, 2])
async def test_what_a_hanging_replica_had_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int, has_step_sockets: bool
) -> None:
    fenced: list[str] = []
    monkeypatch.setattr("funitel.router.shard_client.shards.fence", fenced.append)
    shard = {"has_step_sockets": has_step_sockets}
    async with running(tmp_path, 2, num_shards, shard, step_timeout_s=0.3) as run_:
        assert await answer_of(run_.fleet, request()) == expected(request())
        asked = [request(5, LONG, first=first) for first in range(6)]
        for replica in run_.replicas:
            for fake in replica:
                fake.delay = lambda: 0.01
        tasks = [asyncio.create_task(answer_of(run_.fleet, one)) for one in asked]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        run_.replicas[0][-1].pause.clear()
        assert await asyncio.wait_for(asyncio.gather(*tasks), 20) == [expected(one) for one in asked]
        assert run_.value("funitel_replicas", state="lost") == 1
        assert time.monotonic() - began < 10
        assert fenced == [f"unix://{tmp_path}/0/shard-{rank}" for rank in range(num_shards)]


async def test_a_pause_shorter_than_the_bound_costs_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path, 1, step_timeout_s=5.0) as run_:
        ((fake,),) = run_.replicas
        task = asyncio.create_task(answer_of(run_.fleet, request(5, LONG)))

        async def has_begun() -> bool:
            return len(fake.steps) > 3

        await eventually(has_begun, "some steps")
        fake.pause.clear()
        await asyncio.sleep(0.8)
        fake.pause.set()
        assert await task == expected(request(5, LONG))
        assert run_.value("funitel_replicas", state="lost") in (None, 0)


async def test_a_call_is_given_up_once_it_was_the_oldest_for_too_long() -> None:
    woken: list[int] = []
    pipeline = Pipeline(None, 2, lambda: woken.append(1))  # type: ignore[arg-type]
    never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    pipeline._add(StepCall(never, plan(0.01)))
    for _ in range(10):
        pipeline.tick(0.5, lambda _: 5.0)
    assert not woken
    pipeline.tick(0.5, lambda _: 5.0)
    assert woken
    with pytest.raises(ShardUnsound, match="have not answered a call for 5.5 s, 5 s it may take"):
        pipeline.settle()
    await asyncio.wait_for(pipeline.drain(), 1)
    assert never.cancelled()


async def test_a_shard_is_reached_as_soon_as_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the next attempt would be due."""
    monkeypatch.setattr(shards_module, "MIN_POLL_SECONDS", 600.0)
    monkeypatch.setattr(shards_module, "MAX_POLL_SECONDS", 600.0)
    (tmp_path / "shard-0").touch()  # what a killed shard has left
    connecting = asyncio.create_task(Shards.connect(f"unix://{tmp_path}/shard-0", timeout_seconds=1200.0))
    await asyncio.sleep(0.2)
    (tmp_path / "shard-0").unlink()
    async with fake_shards(tmp_path, 1):
        shards = await asyncio.wait_for(connecting, 30)
        await shards.close()


async def test_shards_of_other_machines_are_told_to_end(tmp_path: Path) -> None:
    async with fake_shards(tmp_path, 2) as fakes:
        shards = await Shards.connect(f"unix://{tmp_path}/shard-0")
        shards.clients[1].url = "tcp://elsewhere:1"
        await shards.dismiss("it lies")
        assert [fake.dismissals for fake in fakes] == [[], ["it lies"]]
        await fakes[1].die()
        await asyncio.wait_for(shards.dismiss("it is gone"), 5)
        await shards.close()
