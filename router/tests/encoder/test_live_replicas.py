"""Replicas of an encoder that join and leave while texts are encoded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from encoders import EMBEDS, FILLS, FakeEncoder
from fakes import eventually

from funitel.proto.errors import NotReady, ShardFailed, StartupError
from funitel.proto.step import EncoderInput, EncoderTask
from funitel.router.encoder.engine import Encoded, EncoderEngine, start_encoder
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

Encoders = list[FakeEncoder]


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, *weights: float, **settings: Any
) -> AsyncIterator[tuple[EncoderEngine, Encoders, Metrics]]:
    """An engine over fake encoders, and further ones that `add` finds by the number in their address."""
    fakes, metrics = [FakeEncoder() for _ in range(4)], Metrics()

    async def connect(address: str, *_: object, keeps: bool = False) -> FakeEncoder:
        return fakes[int(address[-1])]

    monkeypatch.setattr(Shards, "connect", connect)
    places = [ReplicaAddress(index, f"unix:///{index}", weight) for index, weight in enumerate(weights)]
    chosen = RouterSettings(**({"shard_return_timeout": 0, "max_batch_size": 1} | settings))
    engine = start_encoder(list(zip(places, fakes, strict=False)), chosen, metrics)  # type: ignore[arg-type]
    yield engine, fakes, metrics
    for fake in fakes:
        fake.pause.set()
    await asyncio.wait_for(engine.close(), 10)


def encode(engine: EncoderEngine, count: int = 1) -> "asyncio.Task[Encoded]":
    inputs = [EncoderInput(input_ids=tuple(range(4))) for _ in range(count)]
    return asyncio.create_task(engine.encode(EncoderTask.EMBED, inputs))


async def holds(claim: Callable[[], bool], what: str) -> None:
    async def ask() -> bool:
        return claim()

    await eventually(ask, what)


def given(fakes: Encoders) -> list[int]:
    return [len(fake.batches) for fake in fakes]


async def test_a_replica_joins_and_takes_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 1.0) as (engine, fakes, metrics):
        fakes[0].pause.clear()
        task = encode(engine, 6)
        await holds(lambda: given(fakes)[0] == 2, "as many batches as are in flight at once")
        await engine.add(5, "unix:///1")
        await holds(lambda: given(fakes)[1] == 4, "the other takes the rest")
        assert engine.compute_type == "2-fake"
        (first, second) = engine.replicas
        assert (first.num_running, second.replica_id, second.state) == (2, 5, "serving")
        fakes[0].pause.set()
        assert len((await task).rows) == 6
        value = metrics.registry.get_sample_value
        assert value("funitel_replica_requests_total", {"replica": "5"}) == 4
        assert value("funitel_replica_prompt_tokens_total", {"replica": "5"}) == 16


async def test_shares_follow_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 3.0, 1.0, 0.0) as (engine, fakes, _):
        await asyncio.wait_for(asyncio.gather(*(encode(engine, 10) for _ in range(4))), 10)
        assert given(fakes) == [30, 10, 0, 0]
        engine.set_weights({0: 0, 1: 0, 2: 1})
        await asyncio.wait_for(encode(engine, 5), 10)
        assert given(fakes) == [30, 10, 5, 0]


async def test_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 1.0) as (engine, fakes, metrics):
        fakes[1] = FakeEncoder(FILLS)
        with pytest.raises(StartupError, match="another model"):
            await engine.add(1, "unix:///1")
        assert len(engine.replicas) == 1
        assert 'replica="1"' not in metrics.exposition().decode()


async def test_a_drained_one_ends_its_batches_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 1.0, 1.0) as (engine, fakes, metrics):
        fakes[0].pause.clear()
        fakes[1].pause.clear()
        task = encode(engine, 8)
        await holds(lambda: given(fakes)[:2] == [2, 2], "both are at work")
        draining = asyncio.create_task(engine.drain(0))
        fakes[1].pause.set()
        await holds(lambda: given(fakes)[:2] == [2, 6], "the other takes the rest")
        assert not draining.done()
        assert engine.replicas[0].state == "draining"
        fakes[0].pause.set()
        await asyncio.wait_for(draining, 10)
        assert len((await asyncio.wait_for(task, 10)).rows) == 8
        await asyncio.wait_for(encode(engine, 4), 10)
        assert given(fakes)[:2] == [2, 10]
        text = metrics.exposition().decode()
        assert 'replica="0"' not in text
        assert 'rank="0"' not in text


async def test_texts_wait_where_the_last_one_has_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 1.0) as (engine, fakes, _):
        fakes[0].pause.clear()
        task = encode(engine, 5)
        await holds(lambda: given(fakes)[0] == 2, "it is at work")
        draining = asyncio.create_task(engine.drain(0))
        await asyncio.sleep(0)
        fakes[0].pause.set()
        await asyncio.wait_for(draining, 10)
        late = encode(engine)
        await asyncio.sleep(0.02)
        assert not task.done()
        assert not late.done()
        assert given(fakes) == [2, 0, 0, 0]
        await engine.add(1, "unix:///1")
        assert len((await asyncio.wait_for(task, 10)).rows) == 5
        await asyncio.wait_for(late, 10)


async def test_the_last_one_encodes_the_rest_where_new_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 1.0) as (engine, fakes, _):
        fakes[0].pause.clear()
        task = encode(engine, 5)
        await holds(lambda: given(fakes)[0] == 2, "it is at work")
        draining = asyncio.create_task(engine.drain(0, holds=False))
        await asyncio.sleep(0)
        with pytest.raises(NotReady, match="no replica left"):
            await encode(engine)
        fakes[0].pause.set()
        await asyncio.wait_for(draining, 10)
        assert len((await task).rows) == 5


async def test_one_that_fails_while_it_drains_gives_its_texts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 1.0, 1.0) as (engine, fakes, _):
        fakes[0].pause.clear()
        task = encode(engine, 8)
        await holds(lambda: given(fakes)[0] == 2, "it is at work")
        draining = asyncio.create_task(engine.drain(0))
        await asyncio.sleep(0)
        fakes[0].errors += [ShardFailed("gone")] * 2
        fakes[0].pause.set()
        await asyncio.wait_for(draining, 10)
        assert len((await asyncio.wait_for(task, 10)).rows) == 8
        assert [each.replica_id for each in engine.replicas] == [1]


async def test_a_removed_one_takes_no_more_and_the_last_fails_or_holds_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(monkeypatch, 1.0, 1.0) as (engine, fakes, _):
        fakes[1].pause.clear()
        engine.remove(0)
        task = encode(engine, 4)
        await holds(lambda: given(fakes)[1] == 2, "the other is at work")
        engine.remove(1, holds=False)
        with pytest.raises(NotReady, match="no replica left"):
            await asyncio.wait_for(task, 10)
        assert engine.facts == EMBEDS
        await engine.add(0, "unix:///0")
        await asyncio.wait_for(encode(engine), 10)


async def test_closing_does_not_wait_for_a_batch_that_no_client_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, 1.0, 1.0) as (engine, fakes, _):
        fakes[0].pause.clear()
        fakes[1].pause.clear()
        task = encode(engine, 2)
        await holds(lambda: given(fakes)[:2] == [2, 0], "it is at work")
        draining = asyncio.create_task(engine.drain(0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert not draining.done()
        await asyncio.wait_for(engine.close(), 5)
        await asyncio.wait_for(draining, 5)
