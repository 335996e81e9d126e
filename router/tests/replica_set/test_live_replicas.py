"""Replicas that join and leave a set that serves: where requests go, and that none fails."""

import asyncio
from pathlib import Path

import pytest
from adapter_folders import adapters
from fleets import Running, expected, holds, request, run, running

from funitel.proto.errors import InvalidRequest, NotFound, NotReady, StartupError
from funitel.proto.step import Capability
from funitel.router.replica_set.replica_set import ReplicaSet

PATIENT = {"shard_return_timeout": 30}


def series(run_: Running, replica: int) -> set[str]:
    """Every sample with the label of a replica."""
    wanted = f'replica="{replica}"'
    return {line for line in run_.metrics.exposition().decode().splitlines() if wanted in line}


def given(run_: Running, replica: int) -> float | None:
    return run_.value("funitel_replica_requests_total", replica=str(replica))


def states(fleet: ReplicaSet) -> dict[int, str]:
    return {each.replica_id: each.state for each in fleet.replicas}


async def begin(run_: Running, *asked: object) -> "list[asyncio.Task[list[int]]]":
    """Begin requests one after the other, each once the one before has a token."""
    tasks = []
    for each in asked:
        began = asyncio.Event()
        tasks.append(asyncio.create_task(run(run_.fleet, each, began)))  # type: ignore[arg-type]
        await asyncio.wait_for(began.wait(), 10)
    return tasks


# Load and share


async def test_x5_short_requests_go_to_the_replica_that_is_not_busy(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        run_.replicas[0][0].delay = lambda: 0.01
        (long,) = await begin(run_, request(90, 100))
        assert [given(run_, 0), given(run_, 1)] == [1, 0]
        short = [request(5, 4, first=200 + 10 * i) for i in range(10)]
        for asked in short[:5]:
            assert await run(run_.fleet, asked) == expected(asked)
        await asyncio.gather(*(run(run_.fleet, asked) for asked in short[5:]))
        assert not long.done()
        assert [given(run_, 0), given(run_, 1)] == [1, 10]
        assert run_.value("funitel_replica_generated_tokens_total", replica="1") == 40
        assert run_.value("funitel_replica_prompt_tokens_total", replica="1") == 50
        assert run_.value("funitel_replica_sequences", replica="0", state="running") == 1
        used = run_.value("funitel_replica_kv_cache_utilisation", replica="0")
        assert used is not None
        assert 0 < used <= 1
        total = run_.value("funitel_kv_cache_utilisation")
        assert total == pytest.approx(used / 2), "both pools are equally large, and the other one is idle"
        await long
        assert run_.value("funitel_kv_cache_utilisation") == 0


async def test_shares_follow_weights_and_a_weight_of_0_gets_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, 3) as run_:
        run_.fleet.set_weights({0: 3, 1: 1, 2: 0})
        asked = [request(5, 2, first=10 * i) for i in range(40)]
        for each in asked:
            assert await run(run_.fleet, each) == expected(each)
        assert [given(run_, replica) for replica in range(3)] == [30, 10, 0]
        assert run_.value("funitel_replica_weight", replica="0") == 3
        assert run_.value("funitel_replica_up", replica="2") == 1
        run_.fleet.set_weights({0: 0, 1: 0, 2: 0.5})
        await run(run_.fleet, request(first=2000))
        assert given(run_, 2) == 1


async def test_weights_of_0_serve_when_the_others_are_lost(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        run_.fleet.set_weights({1: 0})
        await run_.lose(0)
        await holds(lambda: states(run_.fleet)[0] == "lost", "the loss is seen")
        assert await run(run_.fleet, request()) == expected(request())
        assert given(run_, 1) == 1


async def test_weights_that_cannot_be_are_refused_and_change_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        for weights in ({0: -1.0}, {0: float("nan")}, {1: 5.0, 0: float("inf")}, {0: 0.0, 1: 0.0}):
            with pytest.raises(InvalidRequest, match="weight"):
                run_.fleet.set_weights(weights)
        with pytest.raises(NotFound, match="no replica 7"):
            run_.fleet.set_weights({1: 5.0, 7: 1.0})
        assert [each.weight for each in run_.fleet.replicas] == [1.0, 1.0]


async def test_a_chat_returns_to_its_replica_whatever_the_weights(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        await asyncio.gather(run(run_.fleet, request(25)), run(run_.fleet, request(25, first=200)))
        run_.fleet.set_weights({0: 99, 1: 1})
        for _ in range(3):
            async with run_.fleet.submit(request(25, first=200)) as stream:
                await stream.last()
            assert stream.num_cached_tokens == 24


# Joining


async def test_a_replica_joins_and_takes_its_part(tmp_path: Path) -> None:
    async with running(tmp_path, 1, 2, **PATIENT) as run_:
        run_.replicas[0][0].delay = lambda: 0.01
        (long,) = await begin(run_, request(50, 100))
        await run_.fleet.add(7, await run_.start(), 1.0)
        assert states(run_.fleet) == {0: "serving", 7: "serving"}
        assert run_.fleet.compute_type == "4-fake"
        asked = request(9, 5, first=300)
        assert await run(run_.fleet, asked) == expected(asked)
        assert given(run_, 7) == 1
        assert run_.value("funitel_replicas", state="serving") == 2
        assert run_.value("funitel_kv_bytes", rank="3") is not None, "ranks are numbered across replicas"
        assert run_.value("funitel_replica_attach_seconds_count") == 2
        await run_.lose(1)
        await holds(lambda: states(run_.fleet)[7] == "lost", "the loss is seen")
        assert run_.value("funitel_replica_up", replica="7") == 0
        assert run_.value("funitel_replica_losses_total", replica="7") == 1
        await run_.restart(1)
        await holds(lambda: states(run_.fleet)[7] == "serving", "it came back with its id")
        assert run_.value("funitel_replica_up", replica="7") == 1
        assert await long == expected(request(50, 100))


async def test_a_replica_that_differs_is_refused_and_nothing_stays_of_it(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        for changes, words in (({"is_plain": True}, "must be alike"), ({"pool_tokens": 100}, "100 tokens there")):
            with pytest.raises(StartupError, match=words):
                await run_.fleet.add(2, await run_.start(**changes))  # type: ignore[arg-type]
        assert states(run_.fleet) == {0: "serving", 1: "serving"}
        assert not series(run_, 2)
        assert run_.value("tgi_batch_max_total_tokens") == 800
        assert run_.value("funitel_kv_bytes", rank="2") is None
        await run_.fleet.add(2, await run_.start())
        assert run_.value("tgi_batch_max_total_tokens") == 1200


async def test_ids_and_addresses_are_those_of_one_replica(tmp_path: Path) -> None:
    async with running(tmp_path, shard_connect_timeout=1) as run_:
        with pytest.raises(InvalidRequest, match="replica` 1 is there already"):
            await run_.fleet.add(1, await run_.start())
        with pytest.raises(InvalidRequest, match="that of another replica"):
            await run_.fleet.add(2, f"unix://{run_.folders[1]}/shard-0")
        with pytest.raises(InvalidRequest, match="weight"):
            await run_.fleet.add(2, await run_.start(), -1.0)
        with pytest.raises(StartupError, match="no shard answers"):
            await run_.fleet.add(2, f"unix://{tmp_path}/nowhere")
        for call in (run_.fleet.drain(9), asyncio.to_thread(run_.fleet.remove, 9)):
            with pytest.raises(NotFound, match="no replica 9"):
                await call


async def test_a_replica_that_is_removed_while_it_joins_never_serves(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        joining = asyncio.create_task(run_.fleet.add(2, f"unix://{tmp_path}/2/shard-0"))
        await asyncio.sleep(0.05)
        await run_.fleet.drain(2)
        await run_.start()
        with pytest.raises(NotReady, match="removed while it joined"):
            await asyncio.wait_for(joining, 10)
        assert states(run_.fleet) == {0: "serving", 1: "serving"}


async def test_a_replica_that_joins_has_the_pinned_adapters(tmp_path: Path) -> None:
    [adapter] = adapters(tmp_path / "adapters", 1)
    async with running(tmp_path) as run_:
        await run_.fleet.load_adapter(adapter, is_pinned=True)
        await run_.fleet.add(2, await run_.start())
        await holds(lambda: bool(run_.replicas[2][0].adapters), "it was loaded")


# Leaving


async def test_a_drained_replica_ends_what_runs_and_gives_away_what_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running(tmp_path, max_batch_size=2) as run_:
        for replica in run_.replicas:
            replica[0].delay = lambda: 0.005
        asked = [request(9, 40, first=20 * i) for i in range(12)]
        tasks = await begin(run_, *asked[:4])
        tasks += [asyncio.create_task(run(run_.fleet, each)) for each in asked[4:]]
        await asyncio.sleep(0.01)
        (before,) = [each for each in run_.fleet.replicas if each.replica_id == 0]
        assert (before.num_running, before.num_waiting) == (2, 4)
        running_here = set(run_.fleet.views[0].scheduler.running)
        draining = asyncio.create_task(run_.fleet.drain(0))
        await asyncio.sleep(0)
        assert states(run_.fleet) == {0: "draining", 1: "serving"}
        assert run_.value("funitel_replicas", state="draining") == 1
        assert run_.value("funitel_moved_total") == 4
        late = request(9, 5, first=1000)
        assert await run(run_.fleet, late) == expected(late)
        await asyncio.wait_for(draining, 10)
        assert states(run_.fleet) == {1: "serving"}
        ran = {i for step in run_.replicas[0][0].steps for i in step}
        assert ran == running_here, "those that ran when the drain began"
        assert await asyncio.gather(*tasks) == [expected(each) for each in asked]
        assert not series(run_, 0)
        assert run_.value("funitel_replicas", state="draining") == 0
        assert run_.value("tgi_batch_max_total_tokens") == 400
        assert not [name for name in run_.metrics.exposition().decode().splitlines() if 'rank="0"' in name]
    assert "replica 0 drains; requests moved=4 waiting=0 running=2, 1 of 2 replicas serve" in caplog.text
    assert "replica 0 has drained" in caplog.text


async def test_x6_a_load_of_sixty_loses_none_while_one_joins_and_one_leaves(tmp_path: Path) -> None:
    async with running(tmp_path, max_batch_size=4) as run_:
        for replica in run_.replicas:
            replica[0].delay = lambda: 0.002
        asked = [request(1 + i % 20, 5 + i % 30, first=100 * i) for i in range(60)]
        tasks = [asyncio.create_task(run(run_.fleet, each)) for each in asked]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await run_.fleet.add(2, await run_.start())
        again = asked[:10]
        late = [asyncio.create_task(run(run_.fleet, each)) for each in again]
        await asyncio.wait_for(run_.fleet.drain(0), 20)
        assert not all(task.done() for task in tasks), "the load was too small to tell"
        answers = await asyncio.wait_for(asyncio.gather(*tasks, *late), 30)
        assert answers == [expected(each) for each in (*asked, *again)]
        assert given(run_, 2) != 0
        assert states(run_.fleet) == {1: "serving", 2: "serving"}
        assert run_.value("funitel_sequences", state="running") == 0
        assert run_.value("funitel_sequences", state="waiting") == 0


async def test_the_last_one_that_drains_leaves_requests_waiting_for_the_next(tmp_path: Path) -> None:
    async with running(tmp_path, 1, max_batch_size=1) as run_:
        run_.replicas[0][0].delay = lambda: 0.005
        tasks = await begin(run_, request(9, 20))
        tasks += [asyncio.create_task(run(run_.fleet, request(9, 5, first=100)))]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(run_.fleet.drain(0), 10)
        assert tasks[0].done()
        late = asyncio.create_task(run(run_.fleet, request(9, 5, first=200)))
        await asyncio.sleep(0.05)
        assert run_.fleet.replicas == []
        assert not tasks[1].done()
        assert not late.done()
        assert run_.value("funitel_sequences", state="waiting") == 2
        with pytest.raises(Exception, match="no replica left"):
            await run_.fleet.health()
        await run_.fleet.add(1, await run_.start())
        assert await asyncio.wait_for(tasks[1], 10) == expected(request(9, 5, first=100))
        assert await asyncio.wait_for(late, 10) == expected(request(9, 5, first=200))
        assert run_.value("funitel_sequences", state="waiting") == 0


async def test_the_last_one_that_drains_ends_everything_where_new_requests_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, 1, max_batch_size=1) as run_:
        run_.replicas[0][0].delay = lambda: 0.005
        asked = [request(9, 20), request(9, 5, first=100)]
        tasks = await begin(run_, asked[0])
        tasks += [asyncio.create_task(run(run_.fleet, asked[1]))]
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(run_.fleet.drain(0, holds=False))
        await asyncio.sleep(0)
        for refused in (run_.fleet.submit, run_.fleet.check_room, run_.fleet.reserve):
            with pytest.raises(NotReady, match="no replica left"):
                refused(request(first=300))
        await asyncio.wait_for(draining, 10)
        assert await asyncio.gather(*tasks) == [expected(each) for each in asked]
        with pytest.raises(NotReady, match="no replica left"):
            run_.fleet.submit(request())
        await run_.fleet.add(0, await run_.start())
        assert await run(run_.fleet, request()) == expected(request())


async def test_what_a_removed_replica_had_goes_on_elsewhere_and_it_does_not_return(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as run_:
        run_.replicas[0][0].delay = lambda: 0.005
        tasks = await begin(run_, request(9, 60))
        run_.fleet.remove(0)
        assert states(run_.fleet) == {1: "serving"}
        assert not series(run_, 0)
        assert await asyncio.wait_for(tasks[0], 10) == expected(request(9, 60))
        assert run_.value("funitel_moved_total") == 1
        await asyncio.sleep(0.1)
        assert states(run_.fleet) == {1: "serving"}


async def test_a_lost_replica_that_is_removed_is_not_connected_to_again(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as run_:
        await run_.lose(0)
        await holds(lambda: states(run_.fleet)[0] == "lost", "the loss is seen")
        await run_.fleet.drain(0)
        await run_.restart(0)
        await asyncio.sleep(0.2)
        assert states(run_.fleet) == {1: "serving"}
        assert run_.value("funitel_replicas", state="lost") == 0
        await run_.fleet.add(0, f"unix://{run_.folders[0]}/shard-0")
        assert states(run_.fleet) == {0: "serving", 1: "serving"}


async def test_removing_the_last_one_fails_requests_or_holds_them(tmp_path: Path) -> None:
    async with running(tmp_path, 1) as run_:
        run_.replicas[0][0].pause.clear()
        task = asyncio.create_task(run(run_.fleet, request()))
        await asyncio.sleep(0.02)
        run_.fleet.remove(0, holds=True)
        await asyncio.sleep(0.02)
        assert not task.done()
        await run_.fleet.add(1, await run_.start())
        assert await asyncio.wait_for(task, 10) == expected(request())
        run_.replicas[1][0].pause.clear()
        task = asyncio.create_task(run(run_.fleet, request(first=100)))
        await asyncio.sleep(0.02)
        run_.fleet.remove(1, holds=False)
        with pytest.raises(NotReady, match="no replica left"):
            await asyncio.wait_for(task, 10)


async def test_shards_that_die_while_they_drain_end_the_drain(tmp_path: Path) -> None:
    async with running(tmp_path, **PATIENT) as run_:
        run_.replicas[0][0].delay = lambda: 0.005
        tasks = await begin(run_, request(9, 150))
        draining = asyncio.create_task(run_.fleet.drain(0))
        await asyncio.sleep(0.02)
        await run_.lose(0)
        await asyncio.wait_for(draining, 10)
        assert await asyncio.wait_for(tasks[0], 10) == expected(request(9, 150))
        assert states(run_.fleet) == {1: "serving"}


async def test_a_drain_goes_on_without_its_caller_and_closing_waits_for_it(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        run_.replicas[0][0].delay = lambda: 0.005
        tasks = await begin(run_, request(9, 60))
        draining = asyncio.create_task(run_.fleet.drain(0))
        await asyncio.sleep(0.02)
        draining.cancel()
        await asyncio.wait({draining})
        assert states(run_.fleet)[0] == "draining"
        again = asyncio.create_task(run_.fleet.drain(0))  # it drains already, and is waited for
        await asyncio.sleep(0.02)
        assert not again.done()
        await asyncio.wait_for(run_.fleet.close(), 10)
        assert await tasks[0] == expected(request(9, 60))
        await asyncio.wait_for(again, 10)


async def test_a_replica_joins_a_set_that_closes_no_more(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        joining = asyncio.create_task(run_.fleet.add(2, f"unix://{tmp_path}/2/shard-0"))
        await asyncio.sleep(0.02)
        await run_.fleet.close()
        await run_.start()
        with pytest.raises(NotReady, match="shutting down"):
            await asyncio.wait_for(joining, 10)


async def test_a_hundred_replicas_that_came_and_went_leave_no_series(tmp_path: Path) -> None:
    async with running(tmp_path) as run_:
        await run(run_.fleet, request())
        address = await run_.start()
        await run_.fleet.add(2, address)
        await run_.fleet.drain(2)
        before = len(run_.metrics.exposition().splitlines())
        for replica_id in range(3, 20):
            await run_.fleet.add(replica_id, address)
            await run_.fleet.drain(replica_id)
        assert len(run_.metrics.exposition().splitlines()) == before


async def test_what_plain_shards_have_begun_ends_there(tmp_path: Path) -> None:
    """Without row updates a preempted sequence cannot go on elsewhere; one without a token can."""
    async with running(tmp_path, 2, shard={"is_plain": True}, max_batch_size=1) as run_:
        assert Capability.ROW_UPDATES not in run_.fleet._info.capabilities
        for replica in run_.replicas:
            replica[0].delay = lambda: 0.005
        asked = [request(9, 20, first=20 * i) for i in range(4)]
        tasks = [asyncio.create_task(run(run_.fleet, each)) for each in asked]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(run_.fleet.drain(0), 10)
        assert await asyncio.gather(*tasks) == [expected(each) for each in asked]
