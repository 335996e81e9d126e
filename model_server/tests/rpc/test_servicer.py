"""The servicer over a real Unix socket: order, health under load, statuses, discovery."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading.encoder import load_encoder
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.rpc.serve import CallServer
from funitel.model_server.rpc.servicer import EncoderServicer, Servicer, make_server
from funitel.model_server.settings import ModelServerSettings
from funitel.proto import encoder_wire, generate_pb2_grpc, wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError, ShardFailed
from funitel.proto.step import (
    Capability,
    EncoderInput,
    EncoderTask,
    GrammarType,
    MediaFacts,
    MediaKind,
    ShardInfo,
    WarmupLimits,
)
from funitel_testing.executors import load_executor, num_sequences, start
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import EIGHT, save_adapter
from funitel_testing.tiny_encoders import save_tiny_encoder
from funitel_testing.tiny_vision import TINY_VISION, media_of

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


class Shard:
    """A served executor and a stub to it."""

    def __init__(
        self, executor: Executor, stub: generate_pb2_grpc.TextGenerationServiceStub, failures: list[FunitelError]
    ) -> None:
        self.failures = failures
        self.executor = executor
        self.stub = stub

    def prefill(self, batch_id: int, request_id: int, step_seq: int | None = None) -> pb.PrefillRequest:
        batch = wire.encode_batch(batch_id, [start(request_id, PROMPT)], 4)
        return wire.encode_prefill(batch, None, (), step_seq)


@pytest.fixture
async def shard(executor: Executor, tmp_path: Path) -> AsyncIterator[Shard]:
    executor.clear()
    address = f"unix:{tmp_path}/shard-0"
    info = ShardInfo(block_size=4, capabilities=frozenset(Capability))
    with ThreadPoolExecutor(1) as compute:
        failures: list[FunitelError] = []
        urls = ["unix:///a-0", "unix:///a-1"]
        server = CallServer(executor, info.world_size, "", compute, failures.append)
        await server.start()
        grpc_server = make_server(Servicer(executor, info, urls, server.dispatcher), address)
        await grpc_server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            yield Shard(executor, stub, failures)
        await grpc_server.stop(None)
        await server.stop()


async def test_info_and_discovery(shard: Shard) -> None:
    info = wire.decode_info(await shard.stub.Info(pb.InfoRequest()))
    assert info.block_size == 4
    assert info.capabilities == frozenset(Capability)
    found = await shard.stub.ServiceDiscovery(pb.ServiceDiscoveryRequest())
    assert list(found.urls) == ["unix:///a-0", "unix:///a-1"]


async def test_numbered_calls_run_in_order_whatever_the_order_of_arrival(shard: Shard) -> None:
    third = asyncio.ensure_future(shard.stub.Prefill(shard.prefill(3, 3, step_seq=3)))
    await asyncio.sleep(0.05)
    second = asyncio.ensure_future(shard.stub.Prefill(shard.prefill(2, 2, step_seq=2)))
    await asyncio.sleep(0.05)
    assert not third.done()
    assert not second.done()
    assert num_sequences(shard.executor) == 0
    await shard.stub.Prefill(shard.prefill(1, 1, step_seq=1))
    answers = await asyncio.gather(second, third)
    assert [a.batch.id for a in answers] == [2, 3]
    assert num_sequences(shard.executor) == 3


async def test_a_number_is_executed_once_and_clearing_all_starts_again(shard: Shard) -> None:
    await shard.stub.Prefill(shard.prefill(1, 1, step_seq=1))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await shard.stub.Prefill(shard.prefill(2, 2, step_seq=1))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "step_seq 1 was executed already" in (refused.value.details() or "")
    await shard.stub.ClearCache(pb.ClearCacheRequest())
    await shard.stub.Prefill(shard.prefill(2, 2, step_seq=1))


async def test_steps_may_be_sent_before_the_one_before_is_answered(shard: Shard) -> None:
    """Three at once, of which the first brings the last token: the second finds nothing, the third joins no row."""
    batch = wire.encode_batch(1, [start(1, PROMPT, 1)], 4)
    ended = wire.decode_cached(pb.CachedBatch(id=1, request_ids=[1]))
    calls = (
        shard.stub.Prefill(wire.encode_prefill(batch, None, (), 1)),
        shard.stub.Decode(wire.encode_decode([ended], (), 2)),
        shard.stub.Prefill(wire.encode_prefill(wire.encode_batch(2, [start(2, PROMPT)], 4), ended, (), 3)),
    )
    first, second, third = await asyncio.gather(*calls)
    assert [len(wire.decode_result(answer).generations) for answer in (first, second, third)] == [1, 0, 1]
    assert [answer.HasField("batch") for answer in (first, second, third)] == [False, False, True]
    assert list(third.batch.request_ids) == [2]


async def test_a_failed_call_does_not_block_the_next(shard: Shard) -> None:
    bad = pb.FilterBatchRequest(batch_id=99, request_ids=[1], step_seq=1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await shard.stub.FilterBatch(bad)
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    assert refused.value.details() == "Batch ID 99 not found in cache"
    await shard.stub.Prefill(shard.prefill(1, 1, step_seq=2))


async def test_health_says_what_memory_the_process_holds(shard: Shard) -> None:
    answer = await shard.stub.Health(pb.HealthRequest())
    assert 50_000_000 < answer.resident_bytes <= answer.peak_bytes


async def test_health_answers_during_a_long_step(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def slow(batch_id: int | None = None) -> None:
        assert may_end.wait(60)

    monkeypatch.setattr(shard.executor, "clear", slow)
    step = asyncio.ensure_future(shard.stub.ClearCache(pb.ClearCacheRequest(id=1)))
    await asyncio.sleep(0.05)
    for _ in range(5):
        await shard.stub.Health(pb.HealthRequest(), timeout=30)
    assert not step.done()
    may_end.set()
    await step


async def test_a_client_that_hangs_up_does_not_stop_a_step_that_has_begun(shard: Shard) -> None:
    call = shard.stub.Prefill(shard.prefill(1, 1, step_seq=2))
    await asyncio.sleep(0.05)
    call.cancel()
    await shard.stub.Prefill(shard.prefill(2, 2, step_seq=1))
    answer = await shard.stub.Decode(wire.encode_decode([wire.decode_cached(pb.CachedBatch(id=1))], (), 3))
    assert list(answer.batch.request_ids) == [1]


async def test_an_exception_in_a_step_is_aborted_and_the_shard_lives_on(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("out of\nmemory")

    with monkeypatch.context() as patch:
        patch.setattr(shard.executor.runner, "decoder", explode)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await shard.stub.Prefill(shard.prefill(1, 1, step_seq=1))
    assert failed.value.code() is grpc.StatusCode.ABORTED
    assert failed.value.details() == "RuntimeError: out of memory"
    assert num_sequences(shard.executor) == 0
    await shard.stub.Prefill(shard.prefill(1, 1, step_seq=2))


async def test_a_rank_that_lost_the_others_gives_up(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*arguments: object) -> None:
        raise ShardFailed("rank 0 lost the other ranks")

    monkeypatch.setattr(shard.executor.runner, "decoder", lose)
    with pytest.raises(grpc.aio.AioRpcError):
        await shard.stub.Prefill(shard.prefill(1, 1))
    assert [failure.message for failure in shard.failures] == ["rank 0 lost the other ranks"]


async def test_clearing_all_refuses_calls_that_still_wait(shard: Shard) -> None:
    waiting = asyncio.ensure_future(shard.stub.Prefill(shard.prefill(1, 1, step_seq=7)))
    await asyncio.sleep(0.05)
    await shard.stub.ClearCache(pb.ClearCacheRequest())
    with pytest.raises(grpc.aio.AioRpcError, match="step_seq 7 belongs to a numbering that was given up"):
        await waiting
    await shard.stub.Prefill(shard.prefill(2, 2, step_seq=1))


async def test_grammars_are_compiled_beside_a_long_step(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard.executor, "clear", lambda batch_id=None: time.sleep(1.0))
    step = asyncio.ensure_future(shard.stub.ClearCache(pb.ClearCacheRequest(id=1)))
    await asyncio.sleep(0.05)
    await shard.stub.CompileGrammar(wire.encode_grammar(GrammarType.REGEX, "[ab]+"))
    await shard.stub.CompileGrammar(wire.encode_grammar(GrammarType.JSON, '{"type": "object"}'))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await shard.stub.CompileGrammar(wire.encode_grammar(GrammarType.REGEX, "[ab"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("grammar is not valid: unclosed character class")
    assert not step.done()
    await step


async def test_adapters_are_loaded_and_dropped_aside_from_the_steps(shard: Shard, tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    folder = save_adapter(base, tmp_path / "adapter", EIGHT[1])
    loaded = await shard.stub.LoadAdapter(pb.LoadAdapterRequest(id="a", path=str(folder)))
    assert (loaded.max_rank, loaded.bytes > 0) == (8, True)
    batch = wire.encode_batch(1, [start(1, PROMPT, adapter_id="a")], 4)
    answer = await shard.stub.Prefill(wire.encode_prefill(batch, None, (), None))
    assert answer.num_forward_tokens == len(PROMPT)
    await shard.stub.UnloadAdapter(pb.UnloadAdapterRequest(id="a"))
    batch = wire.encode_batch(2, [start(2, PROMPT, adapter_id="a")], 4)
    for call in (
        shard.stub.Prefill(wire.encode_prefill(batch, None, (), None)),
        shard.stub.UnloadAdapter(pb.UnloadAdapterRequest(id="a")),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="a is not loaded") as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="adapter b cannot be loaded: path .* is not a folder"):
        await shard.stub.LoadAdapter(pb.LoadAdapterRequest(id="b", path=str(tmp_path / "nowhere")))


async def warm_up(shard: Shard) -> None:
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000)
    await shard.stub.Warmup(wire.encode_warmup(wire.encode_batch(0, [start(0, PROMPT)], 4), limits))


async def test_a_shard_sleeps_and_wakes_up(shard: Shard) -> None:
    before = wire.decode_result(await shard.stub.Prefill(shard.prefill(1, 1, step_seq=1)))
    await shard.stub.ClearCache(pb.ClearCacheRequest())
    answer = await shard.stub.Sleep(pb.SleepRequest(level=1))
    assert answer.freed_bytes >= 0
    assert (await shard.stub.Sleep(pb.SleepRequest(level=1))).freed_bytes == 0
    batch = wire.encode_batch(1, [start(1, PROMPT)], 4)
    for call in (
        shard.stub.Prefill(shard.prefill(1, 1, step_seq=1)),
        shard.stub.Warmup(wire.encode_warmup(batch, WarmupLimits())),
        shard.stub.LoadAdapter(pb.LoadAdapterRequest(id="a", path="/nowhere")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == "the shard sleeps: Wake comes first, then Warmup"
    await shard.stub.Health(pb.HealthRequest())
    await shard.stub.Info(pb.InfoRequest())
    await shard.stub.Wake(pb.WakeRequest())
    await shard.stub.ClearCache(pb.ClearCacheRequest())
    await warm_up(shard)
    after = wire.decode_result(await shard.stub.Prefill(shard.prefill(1, 1, step_seq=1)))
    assert [each.tokens for each in after.generations] == [each.tokens for each in before.generations]


async def test_a_shard_with_work_does_not_sleep(shard: Shard) -> None:
    waiting = asyncio.ensure_future(shard.stub.Prefill(shard.prefill(1, 1, step_seq=2)))
    await asyncio.sleep(0.05)
    with pytest.raises(grpc.aio.AioRpcError, match="the shard cannot sleep: 1 calls wait for their turn") as refused:
        await shard.stub.Sleep(pb.SleepRequest(level=1))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await shard.stub.Prefill(shard.prefill(2, 2, step_seq=1))
    await waiting
    with pytest.raises(grpc.aio.AioRpcError, match="the shard cannot sleep: 2 sequences are here") as refused:
        await shard.stub.Sleep(pb.SleepRequest(level=1))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await shard.stub.ClearCache(pb.ClearCacheRequest())
    with pytest.raises(grpc.aio.AioRpcError, match="level must be 1") as refused:
        await shard.stub.Sleep(pb.SleepRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await shard.stub.Prefill(shard.prefill(1, 1, step_seq=1))


async def test_an_encoder_answers_sleep_and_wake(tmp_path: Path) -> None:
    folder = save_tiny_encoder("Bert", "Model", tmp_path / "model")
    executor, info = load_encoder(ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1), folder)
    address = f"unix:{tmp_path}/shard-0"
    call = encoder_wire.encode_inputs(EncoderTask.EMBED, [EncoderInput(input_ids=(2, 3, 4))])
    with ThreadPoolExecutor(1) as compute:
        server = make_server(EncoderServicer(executor, info, [f"unix:///{tmp_path}"], compute), address)
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            expected = (await stub.Encode(call)).values
            await stub.Sleep(pb.SleepRequest(level=1))
            with pytest.raises(grpc.aio.AioRpcError, match="the shard sleeps") as refused:
                await stub.Encode(call)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            await stub.Wake(pb.WakeRequest())
            assert (await stub.Encode(call)).values == expected
        await server.stop(None)


async def test_media_are_encoded_beside_steps(tmp_path: Path) -> None:
    tiny = TINY_VISION["qwen2_vl"]
    tiny.write(tmp_path)
    settings = ModelServerSettings(model_id=str(tmp_path), device="cpu", media_cache_gb=1e-6)
    executor, info = load_generator(settings, tmp_path)
    assert info.media == MediaFacts(kinds=frozenset([MediaKind.IMAGE]), cache_bytes=1073, feature_bytes=128)
    assert Capability.MEDIA in info.capabilities
    text_weights = load_generator(replace(settings, media_cache_gb=0.0), tmp_path)[1].weight_bytes
    assert executor.media is not None
    assert info.weight_bytes - text_weights > 100_000  # the tower's
    media = encoder_wire.encode_media(media_of(tiny, 6))
    address = f"unix:{tmp_path}/shard-0"
    with ThreadPoolExecutor(1) as compute:
        server = CallServer(executor, info.world_size, "", compute, lambda error: None)
        await server.start()
        grpc_server = make_server(Servicer(executor, info, ["unix:///a-0"], server.dispatcher), address)
        await grpc_server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            assert wire.decode_info(await stub.Info(pb.InfoRequest())).media == info.media
            answers = await asyncio.gather(*(stub.EncodeMedia(media) for _ in range(3)))
            assert [answer.bytes for answer in answers] == [768] * 3
            assert all(answer.total_ns > 0 for answer in answers)
            other = pb.EncodeMediaRequest()
            other.CopyFrom(media)
            other.key = b"other"
            assert await _refusal(stub.EncodeMedia(other)) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the media cache is full: 768 bytes are needed, 305 of 1073 are free; --media-cache-gb sets its size",
            )
            await stub.DropMedia(pb.DropMediaRequest(keys=[media.key, b"unknown"]))
            other.num_features = 5
            wrong = "num_features must be 6 for this item, given 5"
            assert await _refusal(stub.EncodeMedia(other)) == (grpc.StatusCode.INVALID_ARGUMENT, wrong)
            other.kind = 9
            wrong = "kind must be one of those of MediaKind, given 9"
            assert await _refusal(stub.EncodeMedia(other)) == (grpc.StatusCode.INVALID_ARGUMENT, wrong)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(executor.media.encoder, "encode", _fail)
                failed = grpc.StatusCode.ABORTED, "RuntimeError: broken"
                assert await _refusal(stub.EncodeMedia(media)) == failed
            assert (await stub.EncodeMedia(media)).bytes == 768
        await grpc_server.stop(None)
        await server.stop()


def _fail(*arguments: object) -> None:
    raise RuntimeError("broken")


async def _refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""
