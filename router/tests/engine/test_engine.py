"""The engine over fake shards: right tokens, cancellation at once, failures contained, a drain that waits."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import expected, request, run, running
from fakes import eventually

from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    NotReady,
    Overloaded,
    SettingsError,
    ShardFailed,
    StartupError,
    StepFailed,
)
from funitel.proto.step import GrammarType, SamplingParams, StoppingParams
from funitel.router.connect import connect
from funitel.router.core.request import Request
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.rank import ShardClient
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics


@pytest.mark.parametrize(
    ("count", "shard"),
    [(1, {}), (3, {}), (1, {"is_chunked": False}), (2, {"is_plain": True})],
    ids=["one", "three ranks", "unchunked", "plain TGI"],
)
async def test_many_requests_get_their_own_tokens(tmp_path: Path, count: int, shard: dict[str, Any]) -> None:
    async with running(tmp_path, count, shard) as (engine, shards, _):
        asked = [request(1 + 3 * i % 30, 1 + i % 9, first=i) for i in range(40)]
        answers = await asyncio.gather(*(run(engine, one) for one in asked))
        assert answers == [expected(one) for one in asked]
        await asyncio.sleep(0.05)
        assert all(fake.batches == {} for fake in shards)
        if not shard.get("is_plain"):
            assert all(fake.step_seqs == list(range(1, len(fake.step_seqs) + 1)) for fake in shards)
        else:
            assert all(fake.step_seqs == [] for fake in shards)


async def test_the_tokens_of_one_step_are_delivered_at_one_instant(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _, _):
        async with engine.submit(request(5, 9)) as one, engine.submit(request(5, 9, first=1)) as other:
            await asyncio.gather(one.last(), other.last())
        assert one.timings.latest == other.timings.latest is not None


async def test_a_cancelled_sequence_is_in_no_step_sent_later(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), metrics):
        other = asyncio.create_task(run(engine, request(5, 60, first=1)))
        await asyncio.sleep(0)  # it is sequence 0
        async with engine.submit(request(5, 60)) as stream:
            async for _ in stream:
                break
            fake.pause.clear()
            await asyncio.sleep(0.02)
            sent = len(fake.steps) + 1  # one more was on its way
        fake.pause.set()
        assert await other == expected(request(5, 60, first=1))
        assert all(1 not in step for step in fake.steps[sent:])
        assert "FilterBatch" in fake.calls
        assert "funitel_cancelled_total 1.0" in metrics.exposition().decode()


async def test_cancellations_are_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _, metrics):
        async with engine.submit(request(max_new_tokens=100)) as stream:
            await anext(aiter(stream))
        await run(engine, request(max_new_tokens=2))
        assert metrics.registry.get_sample_value("funitel_cancelled_total") == 1.0


async def test_the_last_one_to_leave_clears_the_cache(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), metrics):
        async with engine.submit(request(5, 100)) as stream:
            async for _ in stream:
                break
        for _ in range(500):
            if not fake.batches and metrics.registry.get_sample_value("funitel_cached_batches") == 0.0:
                break
            await asyncio.sleep(0.01)
        assert not fake.batches
        text = metrics.exposition().decode()
        assert 'funitel_blocks{state="used"} 0.0' in text
        assert "funitel_cached_batches 0.0" in text
        assert await run(engine, request()) == expected(request())


async def test_a_waiting_sequence_can_leave(tmp_path: Path) -> None:
    async with running(tmp_path, max_batch_size=1) as (engine, (fake,), _):
        fake.pause.clear()
        first = asyncio.create_task(run(engine, request()))
        await asyncio.sleep(0.02)
        async with engine.submit(request(first=50)):
            await asyncio.sleep(0.02)
        fake.pause.set()
        assert await first == expected(request())
        assert all(step == [0] for step in fake.steps)


@pytest.mark.parametrize(("asked", "most"), [(None, 2), (5, 2), (1, 1)])
async def test_no_more_sequences_run_than_a_shard_has_room_for(tmp_path: Path, asked: int | None, most: int) -> None:
    async with running(tmp_path, shard={"state_slots": 2}, max_batch_size=asked) as (engine, (fake,), _):
        requests = [request(first=10 * i) for i in range(5)]
        found = await asyncio.gather(*(run(engine, each) for each in requests))
        assert found == [expected(each) for each in requests]
        assert max(map(len, fake.steps)) == most


async def test_too_many_requests_are_refused_and_room_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, max_concurrent_requests=2) as (engine, (fake,), _):
        fake.pause.clear()
        tasks = [asyncio.create_task(run(engine, request(first=i))) for i in range(2)]
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded, match="2 requests in flight, at most 2"):
            engine.submit(request())
        fake.pause.set()
        await asyncio.gather(*tasks)
        assert await run(engine, request()) == expected(request())


@pytest.mark.parametrize(
    "status",
    [grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT],
    ids=["failed", "out of memory", "refused"],
)
async def test_a_failed_decode_fails_what_ran_and_nothing_later(tmp_path: Path, status: grpc.StatusCode) -> None:
    async with running(tmp_path, 2) as (engine, shards, _):
        async with engine.submit(request()) as stream:
            await anext(aiter(stream))
            for fake in shards:
                fake.failures.append(status)
            with pytest.raises(StepFailed, match="told to fail"):
                await asyncio.wait_for(stream.last(), 5)
        assert await asyncio.wait_for(run(engine, request()), 5) == expected(request())


async def test_a_stopped_engine_answers_those_who_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    async with running(tmp_path) as (engine, _, _):
        monkeypatch.setattr(engine._scheduler, "schedule", broken)
        for _ in range(2):
            with pytest.raises(ShardFailed, match="the engine has stopped"):
                await asyncio.wait_for(run(engine, request()), 5)


async def test_an_engine_that_fails_at_recovering_leaves_no_stream_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(error: FunitelError, *_: object) -> None:
        raise RuntimeError("a bug")

    async with running(tmp_path) as (engine, shards, _):
        monkeypatch.setattr(engine._steps._recovery, "recover", broken)
        shards[0].failures.append(grpc.StatusCode.ABORTED)
        with pytest.raises(ShardFailed, match="the engine has stopped"):
            await asyncio.wait_for(run(engine, request()), 5)
        await asyncio.wait_for(engine.requests.drained(), 5)


async def test_a_failed_step_fails_what_ran_and_nothing_later(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (engine, shards, _):
        for fake in shards:
            fake.failures.append(grpc.StatusCode.ABORTED)
        with pytest.raises(StepFailed, match="told to fail"):
            await run(engine, request())
        assert all(fake.batches == {} for fake in shards)
        assert await run(engine, request()) == expected(request())


async def test_a_rank_that_fails_alone_fails_the_step(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (engine, shards, _):
        shards[1].failures.append(grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(ShardFailed, match="shard rank 1 does not answer"):
            await run(engine, request())
        assert await run(engine, request()) == expected(request())


async def test_health_reflects_every_rank(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (engine, _, _):
        await engine.health()
        (tmp_path / "shard-1").unlink()
        shards = engine._replica.ranks
        assert isinstance(shards, Shards)
        await shards.clients[1].close()
        shards.clients = (shards.clients[0], ShardClient(1, f"unix://{tmp_path}/gone"))
        with pytest.raises(ShardFailed, match="shard rank 1 does not answer"):
            await engine.health()


async def test_closing_waits_for_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), _):
        fake.pause.clear()
        task = asyncio.create_task(run(engine, request()))
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.02)
        with pytest.raises(NotReady):
            engine.submit(request())
        assert not closing.done()
        fake.pause.set()
        await closing
        assert await task == expected(request())


async def test_more_than_the_pool_is_preempted_not_failed(tmp_path: Path) -> None:
    async with running(tmp_path, max_batch_total_tokens=None) as (engine, _, metrics):
        asked = [request(20, 100, first=i) for i in range(6)]  # 720 tokens in a pool of 400
        assert await asyncio.gather(*(run(engine, one) for one in asked)) == [expected(one) for one in asked]
        text = metrics.exposition().decode()
        preempted = next(line for line in text.splitlines() if line.startswith("funitel_preempted_total"))
        assert float(preempted.split()[1]) > 0
        assert (metrics.registry.get_sample_value("funitel_recomputed_tokens_total") or 0) > 0


async def test_nobody_at_the_socket_is_a_startup_error(tmp_path: Path) -> None:
    settings = RouterSettings(master_shard_uds_path=f"{tmp_path}/nothing", shard_connect_timeout=0)
    with pytest.raises(StartupError, match="no shard answers at"):
        await connect(settings, Metrics())


async def test_shards_that_come_late_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("funitel.router.shard_client.shards.MIN_POLL_SECONDS", 0.05)
    settings = RouterSettings(master_shard_uds_path=f"{tmp_path}/shard-0", shard_connect_timeout=30)
    with caplog.at_level("INFO", "funitel"):
        connecting = asyncio.create_task(connect(settings, Metrics()))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        async with running(tmp_path) as (_, (fake,), _):
            engine = await asyncio.wait_for(connecting, 10)
            assert fake.batches == {}
            await engine.close()
    assert [line for line in caplog.messages if "waiting for the shards at unix://" in line]


async def test_shards_that_never_come_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.shard_client.shards.MIN_POLL_SECONDS", 0.05)
    with pytest.raises(StartupError, match="no shard answers at unix:///.* after 1 s: shard rank 0 does not answer"):
        await connect(RouterSettings(master_shard_uds_path=f"{tmp_path}/no", shard_connect_timeout=1), Metrics())


async def test_prompts_longer_than_a_step_need_chunks(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--max-input-tokens 199 must be <= --max-batch-prefill-tokens 32"):
        async with running(tmp_path, 1, {"is_chunked": False}, max_input_tokens=199):
            pass
    async with running(tmp_path, 1, {"is_chunked": False}) as (engine, _, _):
        assert engine.limits.max_input_tokens == 32


async def test_no_request_is_longer_than_what_the_blocks_of_a_plain_peer_hold(tmp_path: Path) -> None:
    shard = {"is_plain": True, "pool_tokens": 102}  # 25 blocks, and the first of them is never a sequence's
    async with running(tmp_path, 1, shard) as (engine, _, _):
        assert (engine.limits.max_input_tokens, engine.limits.max_total_tokens) == (32, 96)
        longest = request(32, 64)
        assert await asyncio.wait_for(run(engine, longest), 10) == expected(longest)
    with pytest.raises(SettingsError, match="the KV pool holds 96 tokens, fewer than --max-total-tokens 97"):
        async with running(tmp_path, 1, shard, max_total_tokens=97):
            pass


@pytest.mark.parametrize("name", ["target_itl_ms", "target_ttft_ms"])
async def test_a_target_needs_chunks(tmp_path: Path, name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    for shard in ({"is_chunked": False}, {"is_plain": True}):
        with pytest.raises(SettingsError, match=f"{flag} 50.0 needs shards that compute prompts in chunks"):
            async with running(tmp_path, 1, shard, **{name: 50.0}):
                pass


@pytest.mark.parametrize(("target_itl_ms", "num_lines"), [(0.001, 1), (100_000.0, 0), (None, 0)])
async def test_a_target_gap_that_cannot_be_held_is_told_once_and_stalls_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target_itl_ms: float | None, num_lines: int
) -> None:
    caplog.set_level("WARNING", "funitel")
    async with running(tmp_path, target_itl_ms=target_itl_ms) as (engine, (fake,), _):
        fake.delay = lambda: 0.002  # the early one is still running when the prompts come
        early = asyncio.create_task(run(engine, request(3, 150)))
        await asyncio.sleep(0.05)
        assert await run(engine, request(120, 3, first=9)) == expected(request(120, 3, first=9))
        assert await run(engine, request(80, 3, first=5)) == expected(request(80, 3, first=5))
        assert await early == expected(request(3, 150))
    told = [line for line in caplog.messages if "--target-itl-ms 0.001 cannot be held: decoding alone takes" in line]
    assert len(told) == num_lines


async def test_a_refused_newcomer_costs_the_others_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (engine, shards, _):
        old = asyncio.create_task(run(engine, request(5, 40)))

        async def has_begun() -> bool:
            return bool(shards[0].steps)

        await eventually(has_begun, "a step")
        for fake in shards:
            fake.refuses_prompts_from = 90
        with pytest.raises(InvalidRequest, match="refused"):
            await run(engine, request(5, 5, first=90))
        assert await old == expected(request(5, 40))
        assert all(fake.batches == {} for fake in shards)


async def test_scores_that_are_no_numbers_fail_their_sequence_alone(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (engine, shards, _):
        for fake in shards:
            fake.has_no_scores_from = 90
        other = asyncio.create_task(run(engine, request(5, 30)))
        with pytest.raises(StepFailed, match="scores are not numbers"):
            await run(engine, request(5, 8, first=90))
        with pytest.raises(StepFailed, match="scores are not numbers"):
            await run(engine, request(5, 1, first=90))  # at its last token
        assert await other == expected(request(5, 30))


async def test_a_rank_that_hangs_is_given_up_once_another_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.shard_client.shards.STRAGGLER_SECONDS", 0.1)
    async with running(tmp_path, 2) as (engine, shards, _):
        shards[0].failures.append(grpc.StatusCode.ABORTED)
        shards[1].pause.clear()
        with pytest.raises(ShardFailed, match="shard rank 1 does not answer"):
            await asyncio.wait_for(run(engine, request()), 5)


async def test_a_step_that_never_ends_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.shard_client.rank.STEP_TIMEOUT_SECONDS", 0.2)
    async with running(tmp_path) as (engine, (fake,), _):
        fake.pause.clear()
        with pytest.raises(ShardFailed, match="does not answer"):
            await asyncio.wait_for(run(engine, request()), 5)


async def test_what_plain_shards_would_ignore_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, 1, {"is_plain": True}) as (engine, _, _):
        asked = Request(
            input_ids=(1,), inputs="a", sampling=SamplingParams(min_p=0.5), stopping=StoppingParams(max_new_tokens=1)
        )
        with pytest.raises(InvalidRequest, match="`min_p` is not supported by the shards"):
            engine.submit(asked)


@pytest.mark.parametrize(
    ("shard", "settings", "reason"),
    [
        ({}, {}, "chunking"),
        ({"is_chunked": False}, {"waiting_served_ratio": 0.0, "max_waiting_tokens": 1000}, "backpressure"),
        ({"is_chunked": False}, {"waiting_served_ratio": 99.0, "max_waiting_tokens": 2}, "wait_exceeded"),
    ],
)
async def test_why_a_sequence_joins_running_ones_is_counted(
    tmp_path: Path, shard: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    async with running(tmp_path, 1, shard, **settings) as (engine, _, metrics):
        async with engine.submit(request(max_new_tokens=60)) as first:
            await anext(aiter(first))
            await run(engine, request(first=9))
            async for _generation in first:
                pass
        counted = {
            labels["reason"]: value
            for name, labels, value in (
                (sample.name, sample.labels, sample.value)
                for family in metrics.registry.collect()
                for sample in family.samples
            )
            if name == "tgi_batch_concat_total"
        }
    assert counted == {reason: 1.0}


@pytest.mark.parametrize("has_prefix_cache", [True, False])
async def test_a_known_prefix_is_not_computed_again(tmp_path: Path, has_prefix_cache: bool) -> None:
    async with running(tmp_path, shard={"has_prefix_cache": has_prefix_cache}) as (engine, (fake,), metrics):
        asked = request(30, 3)
        cached = []
        for _ in range(2):
            async with engine.submit(asked) as stream:
                ids = [token_id async for generation in stream for token_id in generation.tokens.ids]
                cached.append(stream.num_cached_tokens)
            assert ids == expected(asked)
        found = 28 if has_prefix_cache else 0
        assert cached == [0, found]
        assert fake.num_computed == 2 * (30 + 2) - found
        text = metrics.exposition().decode()
        assert "funitel_prefix_cache_queried_tokens_total 60.0" in text
        assert f"funitel_prefix_cache_hit_tokens_total {found}.0" in text
        assert 'funitel_blocks{state="used"} 0.0' in text


def with_grammar(asked: Request, grammar: str = "a+") -> Request:
    sampling = SamplingParams(grammar=grammar, grammar_type=GrammarType.REGEX)
    return replace(asked, sampling=sampling)


async def test_a_grammar_is_compiled_on_every_rank_before_its_sequence_is_scheduled(tmp_path: Path) -> None:
    async with running(tmp_path, 2) as (engine, shards, _):
        for shard in shards:
            shard.pause.clear()
        waiting = asyncio.create_task(run(engine, with_grammar(request())))
        await asyncio.sleep(0.05)
        assert [shard.steps for shard in shards] == [[], []]
        for shard in shards:
            shard.pause.set()
        assert await waiting == expected(request())
        assert [shard.grammars for shard in shards] == [["a+"], ["a+"]]


async def test_a_grammar_the_shards_refuse_is_the_senders_error_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, shards, _):
        other = asyncio.create_task(run(engine, request(max_new_tokens=20)))
        with pytest.raises(InvalidRequest, match="grammar is not valid: bad"):
            await run(engine, with_grammar(request(), "bad"))
        assert await other == expected(request(max_new_tokens=20))
        assert len({sequence_id for step in shards[0].steps for sequence_id in step}) == 1


async def test_leaving_while_a_grammar_is_compiled_is_leaving(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, shards, _):
        shards[0].pause.clear()
        leaver = asyncio.create_task(run(engine, with_grammar(request())))
        await asyncio.sleep(0.05)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        shards[0].pause.set()
        assert await run(engine, request()) == expected(request())
        assert all(0 not in step for step in shards[0].steps)


async def test_plain_shards_get_regular_expressions_with_the_step(tmp_path: Path) -> None:
    async with running(tmp_path, 1, {"is_plain": True}) as (engine, shards, _):
        assert await run(engine, with_grammar(request())) == expected(request())
        assert shards[0].grammars == []


@pytest.mark.parametrize("shard", [{}, {"is_chunked": False}], ids=["chunked", "unchunked"])
async def test_generations_of_several_tokens_reach_their_streams(tmp_path: Path, shard: dict[str, Any]) -> None:
    async with running(tmp_path, 2, shard) as (engine, shards, _):
        for fake in shards:
            fake.stride = 3
        asked = [request(1 + 3 * i % 30, 1 + i % 9, first=i) for i in range(40)]
        answers = await asyncio.gather(*(run(engine, one) for one in asked))
        assert answers == [expected(one) for one in asked]


async def test_what_was_answered_is_delivered_though_the_next_step_cannot_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, pipeline_steps=1) as (engine, (fake,), _):
        plan_next = engine._scheduler.schedule

        def schedule() -> object:
            if len(fake.steps) == 3:
                raise AssertionError("made up")
            return plan_next()

        monkeypatch.setattr(engine._scheduler, "schedule", schedule)
        short, long = request(5, 3), request(5, 30, first=9)
        ends = await asyncio.gather(run(engine, short), run(engine, long), return_exceptions=True)
        assert ends[0] == expected(short), "it had ended with the step before"
        assert isinstance(ends[1], ShardFailed)
