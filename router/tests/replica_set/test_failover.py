"""Replicas that come back: who waits meanwhile, how it goes on, and when nobody waits any longer."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fake_shards import Encoded, FakeShard
from fleets import Running, expected, holds, request, run, running

from funitel.proto import generate_pb2_grpc
from funitel.proto.errors import DeadlineExceeded, NotReady, Overloaded, ShardFailed
from funitel.proto.security.tls import MutualTls, Pair
from funitel.proto.step import GrammarType
from funitel.router.connect import connect
from funitel.router.replica_set.failover import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, next_pause
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.certificates import Authority
from funitel_testing.servers import free_port

PATIENT = {"shard_return_timeout": 60}


async def is_seen_lost(run_: Running, count: int = 1) -> None:
    await holds(lambda: run_.value("funitel_replicas", state="lost") == count, "the loss is seen")


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("shard", [{}, {"has_step_sockets": True}], ids=["grpc", "step sockets"])
async def test_streams_of_the_only_replica_go_on_when_it_is_back(
    tmp_path: Path, num_shards: int, shard: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Begun, in the middle of a prompt, waiting, and come since: none fails, none repeats or misses a token."""
    async with running(tmp_path, 1, num_shards, shard=shard, max_batch_size=3, **PATIENT) as run_:
        began = [asyncio.Event() for _ in range(3)]
        begun = [request(5, 60, first=10 * i) for i in range(3)]
        tasks = [asyncio.create_task(run(run_.fleet, each, event)) for each, event in zip(begun, began, strict=True)]
        await asyncio.gather(*(event.wait() for event in began))
        for fake in run_.replicas[0]:
            fake.pause.clear()
        late = [request(90, 5, first=200), *(request(5, 5, first=1000 + 10 * i) for i in range(4))]
        tasks += [asyncio.create_task(run(run_.fleet, each)) for each in late]
        await asyncio.sleep(0.05)
        await run_.lose(0)
        await is_seen_lost(run_)
        since = request(7, 4, first=3000)
        tasks.append(asyncio.create_task(run(run_.fleet, since)))
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
        assert run_.value("funitel_sequences", state="waiting") == 9
        assert run_.value("funitel_blocks", state="used") == 0
        with pytest.raises(ShardFailed, match="every replica is lost"):
            await run_.fleet.health()
        await run_.restart(0)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert answers == [expected(one) for one in (*begun, *late, since)]
        await run_.fleet.health()
        assert run_.value("funitel_replicas", state="serving") == 1
        assert run_.value("funitel_replica_returns_total") == 1
        assert run_.value("funitel_moved_total") == 0
        assert run_.value("funitel_sequences", state="waiting") == 0
        assert run_.value("funitel_blocks", state="free") == 100
    (lost, back) = [each.message for each in caplog.records if "replica 0" in each.message]
    assert "requests moved=0 waiting=8 failed=0, 0 of 1 replicas serve" in lost
    assert "requests resumed=9 failed=0, 1 of 1 replicas serve" in back


async def test_it_may_be_lost_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.replica_set.failover.MIN_PAUSE_SECONDS", 0.01)
    async with running(tmp_path, 1, **PATIENT) as run_:
        asked = [request(5, 190, first=10 * i) for i in range(2)]
        run_.replicas[0][0].delay = lambda: 0.005
        tasks = [asyncio.create_task(run(run_.fleet, each)) for each in asked]
        for count in range(1, 6):  # more often than a sequence may be lost without a token in between
            fake = run_.replicas[0][0]
            await holds(lambda fake=fake: len(fake.steps) > 8, "it serves")  # type: ignore[misc]
            await run_.lose(0)
            await is_seen_lost(run_)
            (fresh,) = await run_.restart(0)
            fresh.delay = lambda: 0.005
            await holds(lambda count=count: run_.value("funitel_replica_returns_total") == count, "it is back")  # type: ignore[misc]
        assert await asyncio.wait_for(asyncio.gather(*tasks), 10) == [expected(one) for one in asked]


async def test_a_lost_replica_of_several_takes_its_part_again(tmp_path: Path) -> None:
    async with running(tmp_path, 2, 2, **PATIENT) as run_:
        await run_.lose(0)
        await is_seen_lost(run_)
        fresh = await run_.restart(0)
        await holds(lambda: run_.value("funitel_replicas", state="serving") == 2, "it is back")
        asked = [request(20, 9, first=50 * i) for i in range(8)]
        assert await asyncio.gather(*(run(run_.fleet, each) for each in asked)) == [expected(each) for each in asked]
        assert all(fake.steps for fake in fresh)
        assert run_.value("tgi_batch_max_total_tokens") == 800
        assert [member.slot.replica_id for member in run_.fleet._serving] == [0, 1]


async def test_all_of_several_are_lost_and_the_first_to_come_back_serves_all(tmp_path: Path) -> None:
    async with running(tmp_path, 2, **PATIENT) as run_:
        for replica in run_.replicas:
            replica[0].pause.clear()
        asked = [request(5, 9, first=20 * i) for i in range(8)]
        tasks = [asyncio.create_task(run(run_.fleet, each)) for each in asked]
        await asyncio.sleep(0.05)
        await run_.lose(1)
        await is_seen_lost(run_, 1)
        await run_.lose(0)
        await is_seen_lost(run_, 2)
        await run_.restart(1)
        assert await asyncio.wait_for(asyncio.gather(*tasks), 10) == [expected(each) for each in asked]
        assert run_.value("funitel_replicas", state="lost") == 1


async def test_who_waits_keeps_the_order(tmp_path: Path) -> None:
    async with running(tmp_path, 1, max_batch_size=1, **PATIENT) as run_:
        run_.replicas[0][0].pause.clear()
        ended: list[int] = []

        async def note(index: int) -> None:
            await run(run_.fleet, request(5, 2, first=20 * index))
            ended.append(index)

        tasks = [asyncio.create_task(note(index)) for index in range(4)]
        await asyncio.sleep(0.05)
        await run_.lose(0)
        await is_seen_lost(run_)
        tasks += [asyncio.create_task(note(index)) for index in range(4, 8)]
        await asyncio.sleep(0.02)
        await run_.restart(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert ended == list(range(8))


# Who waits may leave, and not everybody may wait


async def test_a_client_that_leaves_while_it_waits_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path, 1, **PATIENT) as run_:
        run_.replicas[0][0].pause.clear()
        async with run_.fleet.submit(request()), AsyncExitStack() as stack:
            await asyncio.sleep(0.02)
            await run_.lose(0)
            await is_seen_lost(run_)
            await stack.enter_async_context(run_.fleet.submit(request(first=100)))
            assert run_.value("funitel_sequences", state="waiting") == 2
        assert run_.value("funitel_sequences", state="waiting") == 0
        assert run_.value("funitel_cancelled_total") == 2
        (fresh,) = await run_.restart(0)
        await holds(lambda: run_.value("funitel_replicas", state="serving") == 1, "it is back")
        assert await run(run_.fleet, request(first=200)) == expected(request(first=200))
        assert {row for step in fresh.steps for row in step} == {2}


async def test_deadlines_hold_while_it_waits(tmp_path: Path) -> None:
    async with running(tmp_path, 1, **PATIENT) as run_:
        run_.replicas[0][0].pause.clear()
        soon = time.monotonic() + 0.3
        before = asyncio.create_task(run(run_.fleet, replace(request(), deadline=soon)))
        await asyncio.sleep(0.02)
        await run_.lose(0)
        await is_seen_lost(run_)
        with pytest.raises(DeadlineExceeded, match="before its first token"):
            await asyncio.wait_for(before, 5)
        with pytest.raises(DeadlineExceeded):
            run_.fleet.submit(replace(request(), deadline=time.monotonic() - 1))
        assert run_.value("funitel_sequences", state="waiting") == 0


async def test_the_bounds_hold_while_it_waits(tmp_path: Path) -> None:
    async with running(tmp_path, 1, max_concurrent_requests=3, max_queued_tokens=30, **PATIENT) as run_:
        await run_.lose(0)
        await is_seen_lost(run_)
        tasks = [asyncio.create_task(run(run_.fleet, request(9, first=50 * i))) for i in range(3)]
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded, match="3 requests in flight, at most 3"):
            run_.fleet.submit(request())
        tasks.pop().cancel()
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="38 prompt tokens would wait, at most 30"):
            run_.fleet.submit(request(20))
        await run_.restart(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)


async def test_patience_ends_and_begins_again(tmp_path: Path) -> None:
    async with running(tmp_path, 1, shard_return_timeout=1) as run_:
        await run_.lose(0)
        await is_seen_lost(run_)
        with pytest.raises(ShardFailed, match="every replica is lost, for 1 s"):
            await asyncio.wait_for(run(run_.fleet, request()), 5)
        with pytest.raises(ShardFailed, match="every replica is lost"):
            run_.fleet.submit(request())
        await run_.restart(0)
        await holds(lambda: run_.value("funitel_replicas", state="serving") == 1, "it is back")
        assert await run(run_.fleet, request()) == expected(request())


# How it goes on


async def test_a_grammar_is_compiled_again(tmp_path: Path) -> None:
    async with running(tmp_path, 1, **PATIENT) as run_:
        run_.replicas[0][0].pause.clear()
        asked = request(grammar="a+", grammar_type=GrammarType.REGEX)
        task = asyncio.create_task(run(run_.fleet, asked))
        await asyncio.sleep(0.02)
        await run_.lose(0)
        await is_seen_lost(run_)
        (fresh,) = await run_.restart(0)
        assert await asyncio.wait_for(task, 10) == expected(asked)
        assert fresh.grammars == ["a+"]


async def test_siblings_that_come_while_it_waits_go_on_together(tmp_path: Path) -> None:
    async with running(tmp_path, 1, **PATIENT) as run_:
        await run_.lose(0)
        await is_seen_lost(run_)
        asked = request(20)
        streams = [run_.fleet.submit(replace(asked, sampling=replace(asked.sampling, seed=i))) for i in range(3)]
        await run_.restart(0)
        for stream in streams:
            assert (await asyncio.wait_for(stream.last(), 10)).finished is not None


async def test_nothing_is_found_computed_that_was_lost(tmp_path: Path) -> None:
    async with running(tmp_path, 1, **PATIENT) as run_:
        await run(run_.fleet, request(25))
        await run_.lose(0)
        await is_seen_lost(run_)
        (fresh,) = await run_.restart(0)
        assert await asyncio.wait_for(run(run_.fleet, request(25)), 10) == expected(request(25))
        assert fresh.num_computed >= 25


async def test_what_never_gets_a_token_before_its_replica_is_lost_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.replica_set.failover.MIN_PAUSE_SECONDS", 0.01)
    async with running(tmp_path, 1, **PATIENT) as run_:
        run_.replicas[0][0].pause.clear()
        task = asyncio.create_task(run(run_.fleet, request()))
        for count in range(1, 4):
            assert not task.done()
            await holds(lambda: bool(run_.replicas[0][0].steps), "it has entered")
            await run_.lose(0)
            await is_seen_lost(run_)
            (fresh,) = await run_.restart(0)
            fresh.pause.clear()
            await holds(lambda count=count: run_.value("funitel_replica_returns_total") == count, "it is back")  # type: ignore[misc]
        with pytest.raises(ShardFailed, match="does not answer"):
            await asyncio.wait_for(task, 5)
        fresh.pause.set()
        assert await run(run_.fleet, request(first=100)) == expected(request(first=100))


async def test_a_step_without_an_answer_is_a_loss_whoever_answers_by_then(tmp_path: Path) -> None:
    """What a supervisor has started again at once, or a network has cut off for a moment, knows nothing of what ran."""
    async with running(tmp_path, 1, **PATIENT) as run_:
        run_.replicas[0][0].failures.append(grpc.StatusCode.UNAVAILABLE)
        assert await asyncio.wait_for(run(run_.fleet, request()), 10) == expected(request())
        assert run_.value("funitel_replica_returns_total") == 1


async def test_a_replica_that_is_another_is_not_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("funitel.router.replica_set.failover.MIN_PAUSE_SECONDS", 0.01)
    async with running(tmp_path, 1, **PATIENT) as run_:
        await run_.lose(0)
        await is_seen_lost(run_)
        task = asyncio.create_task(run(run_.fleet, request()))
        await run_.restart(0, has_prefix_cache=False)
        await holds(lambda: "use_prefix_caching is True" in caplog.text, "it is refused")
        assert not task.done()
        await run_.lose(0)
        await run_.restart(0)
        assert await asyncio.wait_for(task, 10) == expected(request())


async def test_a_smaller_replica_is_better_than_none_but_not_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("funitel.router.replica_set.failover.MIN_PAUSE_SECONDS", 0.01)
    async with running(tmp_path, 2, **PATIENT) as run_:
        await run_.lose(0)
        await is_seen_lost(run_, 1)
        await run_.restart(0, pool_tokens=100)
        await holds(lambda: "a request may have 100 tokens there, elsewhere 200" in caplog.text, "it is refused")
        assert run_.fleet.limits.max_total_tokens == 200
        assert run_.value("tgi_batch_max_total_tokens") == 400, "what it would have had counts nowhere"
        run_.replicas[1][0].pause.clear()
        large = asyncio.create_task(run(run_.fleet, request(80, 40)))
        small = asyncio.create_task(run(run_.fleet, request(9, 6)))
        await asyncio.sleep(0.02)
        await run_.lose(1)
        assert await asyncio.wait_for(small, 10) == expected(request(9, 6))
        with pytest.raises(ShardFailed, match="came back smaller: it may have 100 tokens, it wants 120"):
            await large
        assert run_.fleet.limits.max_total_tokens == 100


# The end


async def test_a_drain_waits_for_a_replica_to_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, 1, **PATIENT) as run_:
        run_.replicas[0][0].pause.clear()
        task = asyncio.create_task(run(run_.fleet, request()))
        await asyncio.sleep(0.02)
        await run_.lose(0)
        await is_seen_lost(run_)
        closing = asyncio.create_task(run_.fleet.close())
        await asyncio.sleep(0.02)
        with pytest.raises(NotReady):
            run_.fleet.submit(request())
        assert not closing.done()
        await run_.restart(0)
        assert await asyncio.wait_for(task, 10) == expected(request())
        await asyncio.wait_for(closing, 10)


async def test_whoever_waits_can_be_told_that_it_is_over(tmp_path: Path) -> None:
    async with running(tmp_path, 1, **PATIENT) as run_:
        await run_.lose(0)
        await is_seen_lost(run_)
        task = asyncio.create_task(run(run_.fleet, request()))
        await asyncio.sleep(0)
        run_.fleet.fail_all(NotReady("the end"))
        with pytest.raises(NotReady, match="the end"):
            await asyncio.wait_for(task, 5)
        await asyncio.wait_for(run_.fleet.close(), 5)


async def test_losses_leave_no_task_behind(tmp_path: Path) -> None:
    async with running(tmp_path, 1, 2, **PATIENT) as run_:
        await run(run_.fleet, request())
        await asyncio.sleep(0.05)
        num_tasks = len(asyncio.all_tasks())
        for count in range(1, 3):
            run_.fleet._serving[0].slot.pause_seconds = 0.0
            run_.fleet._serving[0].since -= 100
            await run_.lose(0)
            await is_seen_lost(run_)
            await run_.restart(0)
            await holds(lambda count=count: run_.value("funitel_replica_returns_total") == count, "it is back")  # type: ignore[misc]
            await run(run_.fleet, request())
        await holds(lambda: len(asyncio.all_tasks()) <= num_tasks, "tasks of the lost have ended")


def test_pauses_double_up_to_a_bound() -> None:
    pauses = [0.0]
    for _ in range(12):
        pauses.append(next_pause(pauses[-1]))
    assert pauses[1:3] == [MIN_PAUSE_SECONDS, 2 * MIN_PAUSE_SECONDS]
    assert pauses[-1] == MAX_PAUSE_SECONDS


async def test_a_replica_that_hangs_is_made_sure_to_be_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process neither answers nor ends: it is killed, so that another takes its place."""
    fenced: list[str] = []
    monkeypatch.setattr("funitel.router.shard_client.shards.fence", fenced.append)
    monkeypatch.setattr("funitel.router.shard_client.rank.STEP_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr("funitel.router.shard_client.shards.HEALTH_TIMEOUT_SECONDS", 0.2)
    async with running(tmp_path, 1, 2, **PATIENT) as run_:
        task = asyncio.create_task(run(run_.fleet, request()))
        for fake in run_.replicas[0]:
            fake.pause.clear()
            fake.is_well.clear()
        await is_seen_lost(run_)
        assert fenced == [f"unix://{tmp_path}/0/shard-{rank}" for rank in (0, 1)]
        for fake in run_.replicas[0]:
            fake.pause.set()
            fake.is_well.set()
        assert await asyncio.wait_for(task, 10) == expected(request())


async def test_a_replica_that_has_ended_is_left_to_whoever_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced: list[str] = []
    monkeypatch.setattr("funitel.router.shard_client.shards.fence", fenced.append)
    async with running(tmp_path, 1, 2, **PATIENT) as run_:
        await run_.replicas[0][1].die()
        await is_seen_lost(run_)
        assert fenced == []


# Over TLS


@asynccontextmanager
async def guarded_shard(port: int, tls: MutualTls) -> AsyncIterator[FakeShard]:
    """A shard on TCP that wants a certificate."""
    fake = FakeShard(0, [f"tcp://localhost:{port}"])
    server = fake.server = grpc.aio.server(interceptors=[Encoded(fake)], options=[("grpc.so_reuseport", 0)])
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]
    server.add_secure_port(f"localhost:{port}", tls.server_credentials())
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)


async def test_a_shard_that_wants_a_certificate_is_shown_one_when_it_is_back(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    shard, router = authority.sign("shard"), authority.sign("router")
    port = free_port()
    settings = RouterSettings(
        master_shard_address=f"localhost:{port}",
        shard_tls_cert=router.cert,
        shard_tls_key=router.key,
        shard_tls_ca=authority.ca,
        max_batch_prefill_tokens=32,
        **PATIENT,
    )
    files = MutualTls(Pair(shard.cert, shard.key), authority.ca)
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(guarded_shard(port, files))
        fleet = await connect(settings, Metrics())
        assert isinstance(fleet, ReplicaSet)
        fake.pause.clear()
        task = asyncio.create_task(run(fleet, request()))
        await holds(lambda: bool(fake.steps), "it has entered")
        await fake.die()
        await holds(lambda: not fleet.views, "the loss is seen")
        await stack.enter_async_context(guarded_shard(port, files))
        assert await asyncio.wait_for(task, 10) == expected(request())
        await fleet.close()
