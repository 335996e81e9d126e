"""Requests that are paused and resumed, on one replica or several: what they answer, what counts, what stays."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import fleets
import pytest
from engines import expected, request

from funitel.proto.errors import DeadlineExceeded, NotReady, Overloaded
from funitel.router.core.request import Request
from funitel.router.core.stream import TokenStream
from funitel.router.engine.engine import Engine
from funitel.router.replica_set.replica_set import ReplicaSet


async def started(engine: Engine | ReplicaSet, asked: Request, num_tokens: int = 2) -> tuple[TokenStream, list[int]]:
    """A stream that has so many tokens, and these."""
    stream = engine.submit(asked)
    ids: list[int] = []
    while len(ids) < num_tokens:
        ids += (await anext(stream)).tokens.ids
    return stream, ids


async def rest(stream: TokenStream) -> list[int]:
    return [token_id async for generation in stream for token_id in generation.tokens.ids]


async def left(engine: Engine) -> tuple[int, ...]:
    """What is held once nothing is in flight: streams, paused ones, sequences, blocks."""
    while engine._steps._pipeline.oldest is not None:  # noqa: ASYNC110 - nothing says when
        await asyncio.sleep(0.001)
    scheduler = engine._scheduler
    held = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.shares.sequences)
    return len(engine.requests), len(engine.paused), held, scheduler.blocks.num_used


async def test_a_paused_request_computes_nothing_and_goes_on_as_if_it_never_was(tmp_path: Path) -> None:
    async with engines.running(tmp_path) as (engine, (shard,), _):
        asked = request(max_new_tokens=40)
        stream, ids = await started(engine, asked)
        for _ in range(3):
            assert engine.paused.pause(stream)
            assert stream in engine.paused
            assert not engine.paused.pause(stream)
            assert await left(engine) == (0, 1, 0, 0)
            num_computed = shard.num_computed
            await asyncio.sleep(0.01)
            assert shard.num_computed == num_computed
            assert engine.paused.resume(stream)
            assert not engine.paused.resume(stream)
            ids += (await anext(stream)).tokens.ids
        assert ids + await rest(stream) == expected(asked)
        assert not engine.paused.pause(stream)
        assert await left(engine) == (0, 0, 0, 0)


async def test_pause_and_resume_before_any_step_changes_nothing(tmp_path: Path) -> None:
    async with engines.running(tmp_path) as (engine, _, _):
        asked = request()
        stream = engine.submit(asked)
        for _ in range(5):
            assert engine.paused.pause(stream)
            assert engine.paused.resume(stream)
        assert await rest(stream) == expected(asked)


async def test_a_stopped_request_ends_at_once_with_what_it_has(tmp_path: Path) -> None:
    async with engines.running(tmp_path) as (engine, _, metrics):
        for pauses in (False, True):
            asked = request(max_new_tokens=50)
            stream, ids = await started(engine, asked)
            if pauses:
                engine.paused.pause(stream)
            stream.stop()
            stream.stop()
            generations = [generation async for generation in stream]
            ids += [token_id for generation in generations for token_id in generation.tokens.ids]
            finished = generations[-1].finished
            assert finished is not None
            assert (finished.openai_reason, finished.finish_reason.native) == ("abort", "abort")
            assert finished.num_tokens == len(ids) < 50
            assert ids == expected(asked)[: len(ids)]
            assert await left(engine) == (0, 0, 0, 0)
        assert metrics.registry.get_sample_value("funitel_cancelled_total") == 2


async def test_the_deadline_of_a_paused_request_counts(tmp_path: Path) -> None:
    async with engines.running(tmp_path) as (engine, _, _):
        asked = replace(request(max_new_tokens=500), deadline=time.monotonic() + 0.2)
        stream, ids = await started(engine, asked)
        assert engine.paused.pause(stream)
        with pytest.raises(DeadlineExceeded, match="the deadline passed after [0-9]+ tokens, while paused"):
            await rest(stream)
        assert await left(engine) == (0, 0, 0, 0)


async def test_a_paused_request_counts_as_in_flight(tmp_path: Path) -> None:
    async with engines.running(tmp_path, max_concurrent_requests=2) as (engine, _, _):
        streams = [engine.submit(request(max_new_tokens=50)) for _ in range(2)]
        for stream in streams:
            engine.paused.pause(stream)
        with pytest.raises(Overloaded):
            engine.submit(request())
        streams[0].stop()
        assert await rest(engine.submit(request())) == expected(request())
        streams[1].stop()


async def test_a_client_that_leaves_takes_its_paused_request_along(tmp_path: Path) -> None:
    async with engines.running(tmp_path) as (engine, _, _):
        async with engine.submit(request(max_new_tokens=50)) as stream:
            await anext(stream)
            engine.paused.pause(stream)
        assert await left(engine) == (0, 0, 0, 0)


async def test_draining_lets_paused_requests_go_on(tmp_path: Path) -> None:
    async with engines.running(tmp_path) as (engine, _, _):
        asked = request(max_new_tokens=20)
        stream, ids = await started(engine, asked)
        engine.paused.pause(stream)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        if not stream.has_ended:
            with pytest.raises(NotReady):
                engine.paused.pause(stream)
        assert ids + await rest(stream) == expected(asked)
        await closing


async def test_the_engine_fails_paused_requests_with_the_others(tmp_path: Path) -> None:
    async with engines.running(tmp_path) as (engine, _, _):
        stream, _ = await started(engine, request(max_new_tokens=50))
        engine.paused.pause(stream)
        engine.fail_all(NotReady("over"))
        with pytest.raises(NotReady, match="over"):
            await rest(stream)


async def test_a_paused_request_of_a_lost_replica_goes_on_with_another(tmp_path: Path) -> None:
    async with fleets.running(tmp_path) as running:
        fleet: Any = running.fleet
        asked = fleets.request(max_new_tokens=30)
        stream, ids = await started(fleet, asked)
        (place,) = [
            place for place, member in enumerate(fleet._serving) if member.engine.requests.find(stream) is not None
        ]
        assert fleet.paused.pause(stream)
        await running.lose(place)
        await fleets.holds(lambda: len(fleet._serving) == 1, "one replica is lost")
        assert fleet.paused.resume(stream)
        assert ids + await rest(stream) == fleets.expected(asked)
        assert not len(fleet.paused)


async def test_requests_of_every_replica_are_paused_where_they_are(tmp_path: Path) -> None:
    async with fleets.running(tmp_path) as running:
        fleet: Any = running.fleet
        several = [fleets.request(max_new_tokens=30, first=first) for first in range(6)]
        begun = [await started(fleet, asked) for asked in several]
        assert all(len(member.engine.requests) for member in fleet._serving)
        assert [fleet.paused.pause(stream) for stream, _ in begun] == [True] * 6
        assert not any(len(member.engine.requests) for member in fleet._serving)
        for stream, _ in reversed(begun):
            fleet.paused.resume(stream)
        for asked, (stream, ids) in zip(several, begun, strict=True):
            assert ids + await rest(stream) == fleets.expected(asked)
