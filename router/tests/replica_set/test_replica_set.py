"""Several replicas over fake shards: where requests go, and what becomes of them when a replica is lost."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fake_shards import fake_shards
from fleets import expected, holds, request, run, running

from funitel.proto.errors import (
    InvalidRequest,
    NotReady,
    Overloaded,
    SettingsError,
    ShardFailed,
    StartupError,
)
from funitel.proto.step import GrammarType, ShardInfo
from funitel.router.connect import connect
from funitel.router.replica_set import replica_set as module
from funitel.router.replica_set.slot import check_alike, smallest_limits
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics

LOST = "replica 0 is lost"


# Where requests go


async def test_many_requests_get_their_own_tokens_from_every_replica(tmp_path: Path) -> None:
    async with running(tmp_path, 3, 2) as run_:
        asked = [request(1 + 3 * i % 30, 1 + i % 9, first=50 * i) for i in range(40)]
        assert await asyncio.gather(*(run(run_.fleet, one) for one in asked)) == [expected(one) for one in asked]
        assert all(replica[0].steps for replica in run_.replicas)
        assert run_.fleet.compute_type == "6-fake"


async def test_a_prompt_goes_where_its_beginning_is_computed(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        first, second = request(25), request(25, first=200)
        await asyncio.gather(run(run_.fleet, first), run(run_.fleet, second))
        seen = [len(replica[0].steps) for replica in run_.replicas]
        assert all(seen)
        for asked, home in ((first, 0), (second, 1), (first, 0), (second, 1)):
            longer = replace(asked, input_ids=(*asked.input_ids, 7, 8))
            before = len(run_.replicas[1 - home][0].steps)
            async with run_.fleet.submit(longer) as stream:
                await stream.last()
            assert stream.num_cached_tokens == 24
            assert len(run_.replicas[1 - home][0].steps) == before


async def test_a2_another_owners_prefix_attracts_no_prompt(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        asked = replace(request(25), cache_owner=b"a" * 32)
        await asyncio.gather(run(run_.fleet, request(25, first=200)), run(run_.fleet, asked))
        homes = []
        for owner in (b"a" * 32, b"b" * 32):
            before = [len(replica[0].steps) for replica in run_.replicas]
            async with run_.fleet.submit(replace(request(25), cache_owner=owner)) as stream:
                await stream.last()
            after = [len(replica[0].steps) for replica in run_.replicas]
            homes.append((stream.num_cached_tokens, [new > old for new, old in zip(after, before, strict=True)]))
        assert homes == [(24, [False, True]), (0, [True, False])]


async def test_an_overloaded_replica_is_spared(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        await run(run_.fleet, request(9))  # the first replica has computed two blocks: they make up for 32 tokens
        first, second = (member.engine for member in run_.fleet._serving)
        run_.replicas[0][0].pause.clear()
        async with run_.fleet.submit(request(30, first=100)):
            async with run_.fleet.submit(request(9)):
                assert (len(first.requests), len(second.requests)) == (2, 0)  # it had 30 tokens
                assert await run(run_.fleet, request(9)) == expected(request(9))  # it has 39: the other is asked
            run_.replicas[0][0].pause.set()


async def test_siblings_stay_together(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        run_.replicas[0][0].pause.clear()
        run_.replicas[1][0].pause.clear()
        asked = request(20)
        siblings = [replace(asked, sampling=replace(asked.sampling, seed=i)) for i in range(4)]
        streams = [run_.fleet.submit(one) for one in siblings]
        other = run_.fleet.submit(request(20, first=300))
        await asyncio.sleep(0.05)
        for replica in run_.replicas:
            replica[0].pause.set()
        for stream in (*streams, other):
            await stream.last()
        assert {i for step in run_.replicas[0][0].steps for i in step} == {0, 1, 2, 3}
        assert {i for step in run_.replicas[1][0].steps for i in step} == {4}


async def test_the_bound_on_requests_is_one_for_all(tmp_path: Path) -> None:
    async with running(tmp_path, max_concurrent_requests=3) as run_:
        async with AsyncExitStack() as stack:
            for i in range(3):
                await stack.enter_async_context(run_.fleet.submit(request(first=100 * i)))
            with pytest.raises(Overloaded, match="3 requests in flight, at most 3"):
                run_.fleet.submit(request())
        assert await run(run_.fleet, request()) == expected(request())


# Losing a replica


@pytest.mark.parametrize("num_shards", [1, 2])
async def test_whatever_a_lost_replica_had_goes_on_elsewhere(
    tmp_path: Path, num_shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams that have begun, prompts half computed and requests that wait: none fails, none repeats a token."""
    async with running(tmp_path, 2, num_shards, max_batch_size=3) as run_:
        began = [asyncio.Event() for _ in range(4)]
        begun = [request(5, 60, first=10 * i) for i in range(4)]
        tasks = [asyncio.create_task(run(run_.fleet, each, event)) for each, event in zip(begun, began, strict=True)]
        await asyncio.gather(*(event.wait() for event in began))
        for fake in run_.replicas[0]:
            fake.pause.clear()  # its next step does not end
        long = [request(90, 5, first=200 * i) for i in range(1, 3)]
        late = [request(5, 5, first=1000 + 10 * i) for i in range(6)]
        tasks += [asyncio.create_task(run(run_.fleet, each)) for each in (*long, *late)]
        await asyncio.sleep(0.05)
        moved = len(run_.fleet._serving[0].engine.requests)
        assert moved >= 4, "there is something to move"
        await run_.lose(0)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert answers == [expected(one) for one in (*begun, *long, *late)]
        assert run_.value("funitel_moved_total") == moved
        assert run_.value("funitel_replicas", state="serving") == 1
        assert run_.value("funitel_replicas", state="lost") == 1
        assert run_.value("funitel_sequences", state="running") == 0
        await run_.fleet.health()
    (line,) = [each.message for each in caplog.records if LOST in each.message]
    assert f"requests moved={moved} waiting=0 failed=0, 1 of 2 replicas serve" in line


async def test_those_that_wait_keep_their_order(tmp_path: Path) -> None:
    async with running(tmp_path, max_batch_size=1) as run_:
        for replica in run_.replicas:
            replica[0].pause.clear()
        asked = [request(5, 2, first=20 * i) for i in range(8)]
        ended: list[int] = []

        async def note(index: int) -> None:
            await run(run_.fleet, asked[index])
            ended.append(index)

        tasks = [asyncio.create_task(note(index)) for index in range(8)]
        await asyncio.sleep(0.05)
        own = [sequence.id for sequence in run_.fleet._serving[0].engine._scheduler.waiting]
        assert len(own) >= 2
        await run_.lose(0)
        run_.replicas[1][0].pause.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert [index for index in ended if index in own] == own


async def test_an_idle_replica_that_dies_is_noticed(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        await run_.lose(1)
        await holds(lambda: run_.value("funitel_replicas", state="serving") == 1, "the loss is seen")
        await run_.fleet.health()
        for i in range(4):
            asked = request(first=100 * i)
            assert await run(run_.fleet, asked) == expected(asked)


async def test_health_does_not_wait_for_a_replica_that_hangs(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        run_.replicas[0][0].is_well.clear()
        await asyncio.wait_for(run_.fleet.health(), 2)
        assert run_.value("funitel_replicas", state="serving") == 2
        run_.replicas[0][0].is_well.set()


async def test_one_dead_rank_takes_its_replica_along(tmp_path: Path) -> None:
    async with running(tmp_path, 2, 2) as run_:
        event = asyncio.Event()
        task = asyncio.create_task(run(run_.fleet, request(5, 80), event))
        await event.wait()
        await run_.replicas[0][1].die()
        assert await asyncio.wait_for(task, 10) == expected(request(5, 80))
        steps = len(run_.replicas[0][0].steps)
        await run(run_.fleet, request())
        assert len(run_.replicas[0][0].steps) == steps


async def test_when_the_last_is_lost_everything_fails_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        for replica in run_.replicas:
            replica[0].pause.clear()
        tasks = [asyncio.create_task(run(run_.fleet, request(first=50 * i))) for i in range(4)]
        await asyncio.sleep(0.02)
        await run_.lose(0)
        await run_.lose(1)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(result, ShardFailed) for result in results), results
        with pytest.raises(ShardFailed, match="every replica is lost"):
            run_.fleet.submit(request())
        with pytest.raises(ShardFailed, match="every replica is lost"):
            await run_.fleet.health()
        assert run_.value("funitel_replicas", state="lost") == 2


async def test_what_may_have_ended_its_replicas_is_not_let_loose_on_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOSSES", 2)
    async with running(tmp_path, 4) as run_:
        for replica in run_.replicas:
            replica[0].pause.clear()
        task = asyncio.create_task(run(run_.fleet, request()))
        for _ in range(2):
            await holds(lambda: any(m.engine.requests for m in run_.fleet._serving), "it is somewhere")
            await asyncio.sleep(0.02)
            home = next(m.slot.replica_id for m in run_.fleet._serving if m.engine.requests)
            await run_.lose(home)
        with pytest.raises(ShardFailed):
            await asyncio.wait_for(task, 10)
        assert run_.value("funitel_replicas", state="serving") == 2


async def test_a_client_that_leaves_after_a_move_is_in_no_later_step(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        for (fake,) in run_.replicas:
            fake.delay = lambda: 0.005  # it shall not end before it is left
        async with run_.fleet.submit(request(5, 150)) as stream:
            stream_ = aiter(stream)
            await anext(stream_)
            await run_.lose(0)
            await holds(lambda: bool(run_.replicas[1][0].steps), "it was moved")
            await anext(stream_)
        fake = run_.replicas[1][0]
        await holds(lambda: run_.value("funitel_blocks", state="used") == 0, "its blocks are free")
        await holds(lambda: fake.num_here == 0 and fake.batches == {}, "the other replica let go of it")
        num_steps = len(fake.steps)
        await asyncio.sleep(0.03)
        assert len(fake.steps) == num_steps
        assert run_.value("funitel_cancelled_total") == 1


async def test_a_grammar_is_compiled_again_where_its_request_goes(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        run_.replicas[0][0].pause.clear()  # it waits for its grammar there
        asked = request(grammar="a+", grammar_type=GrammarType.REGEX)
        left = run_.fleet.submit(replace(asked, input_ids=(1, 2, 3)))
        task = asyncio.create_task(run(run_.fleet, asked))
        await asyncio.sleep(0.02)
        async with left:
            pass  # this client leaves while its grammar is compiled
        await run_.lose(0)
        assert await asyncio.wait_for(task, 10) == expected(asked)
        assert "a+" in run_.replicas[1][0].grammars


async def test_plain_shards_cannot_resume_but_begin_again(tmp_path: Path) -> None:
    async with running(tmp_path, shard={"is_plain": True}, max_batch_size=1) as run_:
        event = asyncio.Event()
        begun = asyncio.create_task(run(run_.fleet, request(5, 100), event))
        await event.wait()
        run_.replicas[0][0].pause.clear()
        run_.replicas[1][0].pause.clear()
        asked = [request(5, 2, first=50 * i) for i in range(1, 4)]
        waiting = [asyncio.create_task(run(run_.fleet, one)) for one in asked]
        await asyncio.sleep(0.02)
        await run_.lose(0)
        run_.replicas[1][0].pause.set()
        with pytest.raises(ShardFailed, match="does not answer"):
            await asyncio.wait_for(begun, 10)
        assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [expected(one) for one in asked]


async def test_a_replica_lost_while_the_router_drains_fails_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        event = asyncio.Event()
        task = asyncio.create_task(run(run_.fleet, request(5, 100), event))
        await event.wait()
        closing = asyncio.create_task(run_.fleet.close())
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            run_.fleet.submit(request())
        await run_.lose(0)
        assert await asyncio.wait_for(task, 10) == expected(request(5, 100))
        await asyncio.wait_for(closing, 10)


# Start and facts


async def test_gauges_are_sums_and_ranks_are_numbered_through(tmp_path: Path) -> None:
    async with running(tmp_path, 2, 2) as run_:
        assert run_.value("tgi_batch_max_total_tokens") == 800
        await asyncio.gather(run(run_.fleet, request()), run(run_.fleet, request(first=300)))
        assert run_.value("funitel_blocks", state="free") == 200
        text = run_.metrics.exposition().decode()
        assert [f'funitel_kv_bytes{{rank="{rank}"}}' in text for rank in range(5)] == [True] * 4 + [False]
        assert all(run_.value("funitel_forwards_total", rank=str(rank)) for rank in range(4))
        assert run_.value("funitel_replicas", state="serving") == 2


async def test_the_limits_are_the_least(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        assert run_.fleet.limits.pool_tokens == 400
        small = replace(run_.fleet.limits, pool_tokens=100, max_total_tokens=90)
        assert smallest_limits([run_.fleet.limits, small]) == replace(small, max_input_tokens=199)


async def test_one_replica_is_a_fleet_too(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as run_:
        assert run_.value("funitel_replicas", state="serving") == 1
        assert await run(run_.fleet, request()) == expected(request())


async def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with fake_shards(tmp_path / "a"), fake_shards(tmp_path / "b", has_prefix_cache=False):
        settings = RouterSettings(
            master_shard_uds_path=f"{tmp_path}/a/shard-0", replica_address=(f"unix://{tmp_path}/b/shard-0",)
        )
        with pytest.raises(StartupError, match="use_prefix_caching is True at unix://.*a/shard-0, False at"):
            await connect(settings, Metrics())


@pytest.mark.parametrize("address", ["/tmp/x-0", "unix://relative", "tcp://host", "http://host:80"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="--replica-address must be unix:///path or tcp://host:port"):
        RouterSettings(replica_address=(address,))


def test_an_address_given_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="is the address of two replicas"):
        RouterSettings(master_shard_address="h:1", replica_address=("tcp://h:1",))


async def test_what_the_shards_would_ignore_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, shard={"is_plain": True}) as run_:
        with pytest.raises(InvalidRequest, match="`min_p` is not supported"):
            run_.fleet.submit(request(min_p=0.1))


async def test_a_replica_whose_steps_all_fail_is_lost_though_it_says_it_is_well(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        run_.replicas[0][0].failures = [grpc.StatusCode.INTERNAL] * 1000
        for i in range(12):
            assert await run(run_.fleet, request(first=i)) == expected(request(first=i))
        assert run_.value("funitel_replicas", state="lost") == 1


async def test_the_places_of_a_key_are_counted_over_all_replicas(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    async with running(tmp_path, api_key_file=str(keys), max_concurrent_requests=16) as run_:
        for replica in run_.replicas:
            replica[0].pause.clear()
        tasks = [asyncio.create_task(run(run_.fleet, replace(request(first=i), key=b"a"))) for i in range(14)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="14 requests of this API key in flight, at most 14"):
            run_.fleet.submit(replace(request(first=50), key=b"a"))
        async with run_.fleet.submit(replace(request(first=51), key=b"b")):
            pass
        for replica in run_.replicas:
            replica[0].pause.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("other", [{"vocab_size": 101}, {"num_opening_tokens": 1}])
def test_replicas_of_different_models_are_not_alike(other: dict[str, int]) -> None:
    """Weights that were put into the place of those that are served show when a shard is started again."""
    served = ShardInfo(vocab_size=100)
    check_alike(["a", "b"], [served, served])
    with pytest.raises(StartupError, match=f"{next(iter(other))} is .* at a, .* at b"):
        check_alike(["a", "b"], [served, replace(served, **other)])
