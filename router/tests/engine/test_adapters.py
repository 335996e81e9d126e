"""Adapters under an engine over fake shards: loaded on demand, evicted, waited for in turn, retired."""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from adapter_folders import adapters, write_adapter
from engines import expected, request, run, running
from fleets import holds

from funitel.proto.errors import DeadlineExceeded, InvalidRequest
from funitel.router.adapters.folder import inspect
from funitel.router.core.request import Adapter, Request, background_key
from funitel.router.engine.engine import Engine


def asking(adapter: Adapter | None, *, first: int = 0, prompt_len: int = 5, max_new_tokens: int = 6) -> Request:
    return replace(request(prompt_len, max_new_tokens, first), adapter=adapter)


@pytest.mark.parametrize("count", [1, 2])
async def test_an_adapter_is_loaded_on_every_rank_before_a_sequence_names_it(tmp_path: Path, count: int) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path, count) as (engine, shards, _):
        asked = asking(adapter)
        assert await run(engine, asked) == expected(asked)
        assert [shard.adapters for shard in shards] == [{adapter.id: adapter.path}] * count


async def test_requests_without_the_adapter_go_on_while_it_loads(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as (engine, [shard], _):
        shard.loading.clear()
        waiting = asyncio.create_task(run(engine, asking(adapter)))
        assert await run(engine, asking(None)) == expected(asking(None))
        assert not waiting.done()
        shard.loading.set()
        assert await waiting == expected(asking(adapter))


async def test_a_row_names_the_adapter_and_others_none(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as (engine, _, _):
        both = [asking(adapter), asking(None)]
        found = await asyncio.gather(*(run(engine, each) for each in both))
        assert found == [expected(each) for each in both]
        assert found[0] != found[1]


async def test_prefixes_are_not_shared_between_adapters_or_versions_of_one(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    later = replace(first, id="a0@later")
    async with running(tmp_path, max_loras=4) as (engine, [shard], _):

        async def computed(adapter: Adapter | None) -> int:
            before = shard.num_computed
            asked = asking(adapter, prompt_len=16, max_new_tokens=1)
            assert await run(engine, asked) == expected(asked)
            return shard.num_computed - before

        engine._adapters._check = lambda adapter: None  # `later` is of no folder
        assert [await computed(each) for each in (None, first, second, later)] == [16] * 4
        assert [await computed(each) for each in (None, first, second, later)] == [4] * 4


async def test_the_least_recently_used_adapter_gives_way(tmp_path: Path) -> None:
    first, second, third = adapters(tmp_path, 3)
    async with running(tmp_path, max_loras=2) as (engine, [shard], metrics):
        for adapter in (first, second, first, third):
            await run(engine, asking(adapter))
        assert set(shard.adapters) == {first.id, third.id}
        assert shard.most_adapters == 2
        assert metrics.registry.get_sample_value("funitel_adapter_evictions_total") == 1
        assert metrics.registry.get_sample_value("funitel_adapter_loads_total", {"outcome": "loaded"}) == 3


async def test_two_hundred_adapters_take_the_memory_of_four(tmp_path: Path) -> None:
    async with running(tmp_path, max_loras=4) as (engine, [shard], _):
        for adapter in adapters(tmp_path, 200):
            await run(engine, asking(adapter, max_new_tokens=1))
        assert shard.most_adapters == 4
        assert len(shard.adapter_loads) == 200


async def test_an_adapter_in_constant_use_drains_for_one_that_waits(tmp_path: Path) -> None:
    busy, other = adapters(tmp_path, 2)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        is_served = asyncio.Event()

        async def ask_always() -> None:
            while not is_served.is_set():
                asked = asking(busy, max_new_tokens=4)
                assert await run(engine, asked) == expected(asked)

        always = [asyncio.create_task(ask_always()) for _ in range(4)]
        await asyncio.sleep(0.02)
        asked = asking(other)
        assert await asyncio.wait_for(run(engine, asked), 5) == expected(asked)
        is_served.set()
        await asyncio.gather(*always)
        assert shard.most_adapters == 1


def of_a_batch(adapter: Adapter | None, **lengths: int) -> Request:
    return replace(asking(adapter, **lengths), key=background_key(b"a"))


async def test_a_batch_gives_the_place_of_its_adapter_to_another_request(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.delay = lambda: 0.002
        batch = [of_a_batch(first, max_new_tokens=200, first=i) for i in range(3)]
        behind = [asyncio.create_task(run(engine, asked)) for asked in batch]
        await holds(lambda: any(len(step) == 3 for step in shard.steps), "the batch runs")
        assert await run(engine, asking(second)) == expected(asking(second))
        assert not any(each.done() for each in behind)
        assert shard.adapter_loads[:2] == [first.id, second.id]
        assert await asyncio.gather(*behind) == [expected(asked) for asked in batch]
        assert shard.adapter_loads == [first.id, second.id, first.id]
        assert not engine._adapters._slot_of
        assert not engine._adapters._background


async def test_a_batch_gives_way_once_others_beside_it_have_ended(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.delay = lambda: 0.002
        batch, beside = of_a_batch(first, max_new_tokens=200), asking(first, max_new_tokens=20)
        behind = asyncio.create_task(run(engine, batch))
        going_on = asyncio.create_task(run(engine, beside))
        await holds(lambda: any(len(step) == 2 for step in shard.steps), "both run")
        other = asyncio.create_task(run(engine, asking(second)))
        assert await going_on == expected(beside)  # it is not preempted
        assert await other == expected(asking(second))
        assert not behind.done()
        assert await behind == expected(batch)


async def test_a_batch_drains_no_adapter_that_others_use(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.delay = lambda: 0.002
        going_on = asyncio.create_task(run(engine, asking(first, max_new_tokens=60)))
        await holds(lambda: bool(shard.steps), "it runs")
        behind = asyncio.create_task(run(engine, of_a_batch(second)))
        await holds(lambda: bool(engine._adapters._waiting), "the batch waits")
        assert await run(engine, asking(first)) == expected(asking(first))  # which waits for no batch
        assert not going_on.done()
        assert await behind == expected(asking(second))
        assert going_on.done()


async def test_others_go_before_batches_that_wait_for_adapters(tmp_path: Path) -> None:
    found = adapters(tmp_path, 4)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.loading.clear()
        asks = [of_a_batch(found[0]), of_a_batch(found[1]), asking(found[2]), asking(found[3])]
        runs = []
        for asked in asks:
            runs.append(asyncio.create_task(run(engine, asked)))
            await asyncio.sleep(0.002)
        shard.loading.set()
        await asyncio.gather(*runs)
        others = [each.id for each in found[2:]]
        assert [each for each in shard.adapter_loads if each in others] == others
        assert shard.adapter_loads.index(found[1].id) == len(shard.adapter_loads) - 2
        assert shard.adapter_loads[-1] == found[0].id


async def test_batches_take_turns_as_others_do(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.delay = lambda: 0.001
        asks = [of_a_batch(each, max_new_tokens=30) for each in (first, second)]
        assert await asyncio.gather(*(run(engine, asked) for asked in asks)) == [expected(asked) for asked in asks]
        assert shard.adapter_loads == [first.id, second.id]  # the second waits for the end of the first


async def test_waiting_adapters_are_loaded_in_the_order_they_were_asked_for(tmp_path: Path) -> None:
    found = adapters(tmp_path, 6)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.loading.clear()
        runs = [asyncio.create_task(run(engine, asking(each))) for each in found]
        await asyncio.sleep(0.01)
        shard.loading.set()
        await asyncio.gather(*runs)
        assert shard.adapter_loads == [each.id for each in found]


async def test_a_client_that_leaves_ends_the_wait_for_its_adapter(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.loading.clear()
        gone = asyncio.create_task(run(engine, asking(first)))
        left = asyncio.create_task(run(engine, asking(second)))
        await asyncio.sleep(0.01)
        gone.cancel()
        left.cancel()
        await asyncio.wait([gone, left])
        shard.loading.set()
        assert await run(engine, asking(second)) == expected(asking(second))
        assert engine._adapters.use().waiting == ()


async def test_a_deadline_passes_while_an_adapter_loads(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as (engine, [shard], _):
        shard.loading.clear()
        asked = replace(asking(adapter), deadline=asyncio.get_running_loop().time() + 0.05)
        with pytest.raises(DeadlineExceeded):
            await run(engine, asked)
        shard.loading.set()


@pytest.mark.parametrize("count", [1, 2])
async def test_an_adapter_that_a_rank_refuses_is_on_no_rank(tmp_path: Path, count: int) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path, count) as (engine, shards, _):
        shards[-1].refused_adapters.add("a0")
        with pytest.raises(InvalidRequest, match="adapter 'a0' cannot be loaded: of another base"):
            await run(engine, asking(adapter))
        assert [shard.adapters for shard in shards] == [{}] * count
        shards[-1].refused_adapters.clear()
        assert await run(engine, asking(adapter)) == expected(asking(adapter))


async def test_an_adapter_whose_files_have_changed_is_not_loaded_as_the_old_one(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as (engine, [shard], _):
        write_adapter(tmp_path / "a0", r=16)
        with pytest.raises(InvalidRequest, match="have changed since it was loaded"):
            await run(engine, asking(adapter))
        assert shard.adapter_loads == []
        again = inspect("a0", tmp_path / "a0").adapter
        assert again.id != adapter.id
        assert await run(engine, asking(again)) == expected(asking(again))


async def test_a_retired_adapter_is_unloaded_once_its_last_request_has_ended(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as (engine, [shard], _):
        shard.delay = lambda: 0.01
        asked = asking(adapter, max_new_tokens=10)
        going_on = asyncio.create_task(run(engine, asked))
        await holds(lambda: bool(shard.steps), "a step is sent")
        engine.retire_adapter(adapter)
        assert shard.adapters
        assert await going_on == expected(asked)
        await holds(lambda: not shard.adapters, "it is unloaded")


async def test_an_adapter_that_is_loaded_again_while_it_retires_stays(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path) as (engine, [shard], _):
        shard.delay = lambda: 0.01
        going_on = asyncio.create_task(run(engine, asking(adapter, max_new_tokens=10)))
        await holds(lambda: bool(shard.steps), "a step is sent")
        engine.retire_adapter(adapter)
        await engine.load_adapter(adapter, is_pinned=True)
        await going_on
        await asyncio.sleep(0.02)
        assert set(shard.adapters) == {adapter.id}
        assert shard.adapter_loads == [adapter.id]
        engine.retire_adapter(adapter)
        await holds(lambda: not shard.adapters, "it is unloaded")


async def test_an_adapter_of_a_cancelled_row_is_unloaded_after_the_row_was_dropped(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)  # the shard asserts that no row uses what it unloads
    async with running(tmp_path, max_loras=1) as (engine, [shard], _):
        shard.delay = lambda: 0.01
        beside = asyncio.create_task(run(engine, asking(None, max_new_tokens=60)))
        cancelled = asyncio.create_task(run(engine, asking(first, max_new_tokens=60)))
        await holds(lambda: any(len(step) == 2 for step in shard.steps), "both run")
        cancelled.cancel()
        assert await run(engine, asking(second)) == expected(asking(second))
        assert await beside == expected(asking(None, max_new_tokens=60))


async def test_a_pinned_adapter_is_never_evicted(tmp_path: Path) -> None:
    pinned, second, third = adapters(tmp_path, 3)
    async with running(tmp_path, max_loras=2) as (engine, [shard], _):
        await engine.load_adapter(pinned, is_pinned=True)
        for adapter in (second, third, second):
            await run(engine, asking(adapter))
        assert pinned.id in shard.adapters
        assert shard.adapter_loads.count(pinned.id) == 1
        await engine.load_adapter(pinned)  # and is not pinned any more
        for adapter in (second, third):
            await run(engine, asking(adapter))
        assert pinned.id not in shard.adapters


async def test_shards_without_adapters_refuse_them(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path, 1)
    async with running(tmp_path, shard={"max_lora_rank": 0}) as (engine, _, metrics):
        assert not engine.takes_adapters
        with pytest.raises(InvalidRequest, match="`adapter_id` is not supported by the shards"):
            engine.submit(asking(adapter))
        assert b"vllm:lora_requests_info{" not in metrics.exposition()


async def _leave_or_stay(engine: Engine, asked: Request, patience: float | None) -> list[int] | None:
    work = asyncio.create_task(run(engine, asked))
    await asyncio.wait([work], timeout=patience)
    if not work.done():
        work.cancel()
    with suppress(asyncio.CancelledError):
        return await work
    return None


@pytest.mark.parametrize("settings", [{}, {"pipeline_steps": 1}, {"max_batch_size": 3}])
async def test_many_requests_over_many_adapters_with_random_leavers(tmp_path: Path, settings: dict[str, int]) -> None:
    chance = random.Random(7)
    found = adapters(tmp_path, 30)
    async with running(tmp_path, shard={"pool_tokens": 200}, max_loras=4, **settings) as (engine, [shard], _):
        shard.delay = lambda: chance.choice((0.0, 0.0, 0.001))

        async def ask() -> None:
            await asyncio.sleep(chance.random() / 4)
            asked = chance.choice((asking, of_a_batch))(
                chance.choice([*found, None]),
                first=chance.randrange(4),
                prompt_len=chance.randrange(1, 30),
                max_new_tokens=chance.randrange(1, 12),
            )
            patience = chance.random() / 8 if chance.random() < 0.3 else None
            answer = await _leave_or_stay(engine, asked, patience)
            assert answer == expected(asked) if patience is None else answer in (None, expected(asked))

        await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(120))), 30)
        use = engine._adapters.use()
        assert (use.running, use.waiting) == ((), ())
        assert shard.most_adapters <= 4
        assert not engine._adapters._slot_of
        assert not engine._adapters._background
        assert not engine._preparing


async def test_the_gauge_of_gateways_names_adapters_that_run_and_wait(tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    async with running(tmp_path, max_loras=1) as (engine, [shard], metrics):
        shard.pause.clear()
        runs = [asyncio.create_task(run(engine, asking(each))) for each in (first, second)]
        await holds(lambda: bool(shard.steps), "a step is sent")
        labels = {"max_lora": "1", "running_lora_adapters": "a0", "waiting_lora_adapters": "a1"}
        assert metrics.registry.get_sample_value("vllm:lora_requests_info", labels)
        assert metrics.registry.get_sample_value("funitel_adapters") == 1
        shard.pause.set()
        await asyncio.gather(*runs)
