"""Adapters over several replicas: a request that moves finds its adapter, and a replica that comes back loads anew."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from adapter_folders import adapters
from fleets import expected, holds, request, run, running

from funitel.proto.errors import InvalidRequest, ShardFailed
from funitel.router.core.request import Adapter, Request, background_key


def asking(adapter: Adapter | None, max_new_tokens: int = 6, first: int = 0) -> Request:
    return replace(request(9, max_new_tokens, first), adapter=adapter)


async def test_an_adapter_is_loaded_on_every_replica(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path) as deployment:
        await deployment.fleet.load_adapter(first)
        assert [set(shard.adapters) for [shard] in deployment.replicas] == [{first.id}] * 2
        deployment.replicas[1][0].refused_adapters.add("a1")
        with pytest.raises(InvalidRequest, match="adapter 'a1' cannot be loaded"):
            await deployment.fleet.load_adapter(second)
        await holds(lambda: all(set(shard.adapters) == {first.id} for [shard] in deployment.replicas), "on none")
        deployment.fleet.retire_adapter(first)
        await holds(lambda: not any(shard.adapters for [shard] in deployment.replicas), "unloaded")


async def test_a_reload_that_fails_on_one_replica_leaves_the_adapter_as_it_was(tmp_path: Path) -> None:
    first, second, third = adapters(tmp_path, 3)
    async with running(tmp_path, max_loras=2) as deployment:
        fleet = deployment.fleet
        await fleet.load_adapter(first)
        failing = fleet._serving[1].engine
        load, failure = failing.load_adapter, ShardFailed("gone")

        async def fail(adapter: Adapter, *, is_pinned: bool = False) -> None:
            raise failure

        failing.load_adapter = fail  # type: ignore[method-assign]
        with pytest.raises(ShardFailed, match="gone"):
            await fleet.load_adapter(first, is_pinned=True)
        failing.load_adapter = load  # type: ignore[method-assign]
        await asyncio.sleep(0.02)
        assert [set(shard.adapters) for [shard] in deployment.replicas] == [{first.id}] * 2
        assert not fleet._pinned
        for adapter in (second, third):  # it is not pinned, and gives way
            await fleet.load_adapter(adapter)
        assert [set(shard.adapters) for [shard] in deployment.replicas] == [{second.id, third.id}] * 2


async def test_requests_with_an_adapter_stay_where_it_is_loaded(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as deployment:
        for first in range(0, 60, 10):
            asked = asking(adapter, first=first)
            assert await run(deployment.fleet, asked) == expected(asked)
        assert sorted(len(shard.adapter_loads) for [shard] in deployment.replicas) == [0, 1]


async def test_a_request_that_moves_finds_its_adapter_on_the_other_replica(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as deployment:
        for [shard] in deployment.replicas:
            shard.delay = lambda: 0.01
        asked = asking(adapter, max_new_tokens=30)
        began = asyncio.Event()
        going_on = asyncio.create_task(run(deployment.fleet, asked, began))
        await began.wait()
        [place] = [i for i, [shard] in enumerate(deployment.replicas) if shard.adapters]
        await deployment.lose(place)
        assert await asyncio.wait_for(going_on, 10) == expected(asked)
        assert deployment.replicas[1 - place][0].adapters == {adapter.id: adapter.path}


async def test_a_batch_that_gave_way_goes_on_and_moves(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path, num_replicas=1, max_loras=1, shard_return_timeout=30) as deployment:
        [[shard]] = deployment.replicas
        shard.delay = lambda: 0.002
        batch = replace(asking(first, 150), key=background_key(b"a"))
        behind = asyncio.create_task(run(deployment.fleet, batch))
        await holds(lambda: bool(shard.steps), "the batch runs")
        asked = [asking(second, first=i) for i in range(3)]
        found = await asyncio.gather(*(run(deployment.fleet, each) for each in asked))
        assert found == [expected(each) for each in asked]
        assert not behind.done()
        await deployment.lose(0)
        await holds(lambda: not deployment.fleet.views, "lost")
        await deployment.restart(0)
        assert await asyncio.wait_for(behind, 20) == expected(batch)


async def test_a_request_that_waits_for_an_adapter_moves_too(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as deployment:
        for [shard] in deployment.replicas:
            shard.loading.clear()
        waiting = asyncio.create_task(run(deployment.fleet, asking(adapter)))
        places = [view.adapters for view in deployment.fleet.views.values()]
        await holds(lambda: any(use().waiting for use in places), "it waits")
        [place] = [i for i, use in enumerate(places) if use().waiting]
        await deployment.lose(place)
        deployment.replicas[1 - place][0].loading.set()
        assert await asyncio.wait_for(waiting, 10) == expected(asking(adapter))
        deployment.replicas[place][0].loading.set()


async def test_shards_that_come_back_know_no_adapter_and_get_it_again(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path, num_replicas=1, shard_return_timeout=30) as deployment:
        [shard] = deployment.replicas[0]
        shard.delay = lambda: 0.01
        asked = asking(adapter, max_new_tokens=30)
        began = asyncio.Event()
        going_on = asyncio.create_task(run(deployment.fleet, asked, began))
        await began.wait()
        await deployment.lose(0)
        [fresh] = await deployment.restart(0)
        assert await asyncio.wait_for(going_on, 20) == expected(asked)
        assert fresh.adapters == {adapter.id: adapter.path}


async def test_a_pinned_adapter_is_loaded_on_a_replica_that_comes_back(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path, shard_return_timeout=30) as deployment:
        await deployment.fleet.load_adapter(adapter, is_pinned=True)
        await deployment.lose(1)
        await holds(lambda: len(deployment.fleet.views) == 1, "lost")
        [fresh] = await deployment.restart(1)
        await holds(lambda: fresh.adapters == {adapter.id: adapter.path}, "loaded again")


async def test_nothing_is_loaded_where_no_replica_serves(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path, num_replicas=1, shard_return_timeout=30) as deployment:
        await deployment.lose(0)
        await holds(lambda: not deployment.fleet.views, "lost")
        with pytest.raises(ShardFailed):
            await deployment.fleet.load_adapter(adapter)
        await deployment.restart(0)
        await holds(lambda: bool(deployment.fleet.views), "back")
