"""Whole models over the Triton kernels and through recorded steps: the logits of the torch reference.

Recording needs a GPU; without one a recorded step is its work done again on the same fixed tensors, so that what a
replay reads, what padding touches and which bucket a step takes are tested everywhere.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.attention.triton_kernels import TritonAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward, ForwardBatch, RecordingForward, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.cuda_graphs import Body, GraphedDecoder, default_buckets
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec
from funitel_testing.forward_worker import step_through
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")
BLOCK = 4
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "mistral", "bloom", "gpt_neox", "gpt2")]


class Redone:
    """Work done again instead of replayed; counts the times."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replays = 0

    def __call__(self, body: Body) -> Body:
        self.num_recorded += 1

        def replay() -> torch.Tensor | None:
            self.num_replays += 1
            return body()

        return replay


def decoder_of(folder: Path, attention: AttentionBackend) -> Decoder:
    spec = spec_of(read_json(folder / "config.json"))
    return Decoder(spec, Weights(folder, torch.float32, CPU, spec.names.prefix), TensorParallel(), attention)


def triton_attention(spec: ModelSpec) -> TritonAttention:
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    return TritonAttention(BLOCK, CPU, **heads, dtype=torch.float32, num_processors=16)


def cache_of(spec: ModelSpec) -> KVCache:
    return KVCache(spec, HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads), 120, BLOCK, torch.float32, CPU)


@pytest.mark.parametrize("family", ["gemma2", *SLOW])
def test_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    ZOO[family].save(tmp_path)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 200, (length,), generator=generator).tolist() for length in (13, 5, 24)]
    reference = decoder_of(tmp_path, TorchAttention(BLOCK, CPU))
    spec = reference.spec
    expected = step_through(reference, cache_of(spec), prompts, 4)
    attention = triton_attention(spec)
    fast = decoder_of(tmp_path, attention)
    recorder = Redone()
    graphed = GraphedDecoder(fast, attention, (1, 3), spec.max_position_embeddings, recorder)
    for forward in (fast, graphed):
        found = step_through(forward, cache_of(spec), prompts, 4)
        assert all(torch.allclose(a, b, atol=2e-4) for a, b in zip(found, expected, strict=True))
    # The last steps of the rows overlap for one step of two rows, and end with steps of one.
    assert (recorder.num_recorded, recorder.num_replays) == (2, 4)


def test_padding_touches_block_0_alone(tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    pools = []
    for is_graphed in (False, True):
        spec = spec_of(read_json(tmp_path / "config.json"))
        attention = triton_attention(spec)
        forward: Forward = decoder_of(tmp_path, attention)
        if is_graphed:
            forward = GraphedDecoder(decoder_of(tmp_path, attention), attention, (4,), 40, Redone())
        cache = cache_of(spec)
        # The second step has rows fewer and elsewhere: what the first left behind must not be taken for padding.
        for tables in ([[5, 6], [7, 8], [9, 2], [3, 4]], [[20, 21]]):
            rows = [RowSpan([11 + i], 4 + i % 2, np.array(table, np.int32)) for i, table in enumerate(tables)]
            logits = forward(ForwardBatch.build(rows, BLOCK, CPU), cache)
            assert logits is not None
            assert len(logits) == len(rows)
        pools.append(cache.pool[1:])
    assert torch.allclose(pools[0], pools[1], atol=1e-5)


def test_a_new_pool_is_recorded_anew(tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    spec = spec_of(read_json(tmp_path / "config.json"))
    attention, recorder = triton_attention(spec), Redone()
    graphed = GraphedDecoder(decoder_of(tmp_path, attention), attention, (2,), 40, recorder)
    batch = ForwardBatch.build([RowSpan([3], 0, np.array([1], np.int32))], BLOCK, CPU)
    caches = cache_of(spec), cache_of(spec)
    for cache in caches:
        graphed(batch, cache)
    assert recorder.num_recorded == 2
    assert torch.equal(caches[0].pool[1], caches[1].pool[1])


@torch.inference_mode()
def test_the_largest_is_recorded_ahead_and_all_share_its_memory(tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    spec = spec_of(read_json(tmp_path / "config.json"))
    attention, recorder = triton_attention(spec), Redone()
    decoder = decoder_of(tmp_path, attention)
    graphed = GraphedDecoder(decoder, attention, (1, 3), 40, recorder)
    assert isinstance(graphed, RecordingForward)
    assert graphed.num_recordings == 2
    cache = cache_of(spec)
    graphed.record_largest(cache)
    assert recorder.num_recorded == 1
    shared = graphed._logits
    for num_rows in (3, 1):
        rows = [RowSpan([9 + i], 2, np.array([4 + i], np.int32)) for i in range(num_rows)]
        batch = ForwardBatch.build(rows, BLOCK, CPU)
        expected, found = decoder(batch, cache), graphed(batch, cache)
        assert expected is not None
        assert found is not None
        assert torch.allclose(found, expected, atol=1e-5)
    assert recorder.num_recorded == 2
    assert graphed._logits is shared
    graphed.forget_recordings()
    assert (graphed._steps, graphed._logits) == ({}, None)


def test_a_step_that_there_is_no_memory_to_record_is_computed_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ZOO["llama"].save(tmp_path)
    spec = spec_of(read_json(tmp_path / "config.json"))
    attention, tried = triton_attention(spec), []

    def record(body: Body) -> Body:
        tried.append(body)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    decoder = decoder_of(tmp_path, attention)
    graphed = GraphedDecoder(decoder, attention, (2,), 40, record)
    batch = ForwardBatch.build([RowSpan([3], 0, np.array([1], np.int32))], BLOCK, CPU)
    cache = cache_of(spec)
    for _ in range(2):
        found, expected = graphed(batch, cache), decoder(batch, cache)
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
    assert len(tried) == 1
    assert "steps of 2 rows are not recorded as CUDA graphs" in caplog.text


def test_buckets() -> None:
    buckets = default_buckets()
    assert buckets[:6] == (1, 2, 4, 8, 16, 24)
    assert buckets[-1] == 256
