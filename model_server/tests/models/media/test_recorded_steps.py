"""Images over the Triton kernels, through recorded steps and with offloaded weights: the logits of transformers.

Without a GPU a recorded step is its work done again on the same fixed tensors.
"""

from pathlib import Path

import pytest
import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.cuda_graphs import Body, GraphedDecoder
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.weight_offload import Arrival, Offload
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec
from funitel_testing.media_zoo import IMAGES, Pictured, step_at_random

CPU = torch.device("cpu")
BLOCK, NUM_DECODE, BOUND = 4, 4, 2e-4
PROMPTS = ((3, (16, 16), 2, (24, 16), 2 + NUM_DECODE), (5 + NUM_DECODE,))


class Redone:
    """Work done again instead of replayed; counts the times."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, body: Body) -> Body:
        def replay() -> torch.Tensor | None:
            self.num_replays += 1
            return body()

        return replay


class Prefetcher:
    """Copies when the copy is waited for."""

    def hold(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, source: torch.Tensor, into: torch.Tensor) -> Arrival:
        def arrive() -> None:
            into.copy_(source)

        return arrive


def sequences(name: str, folder: Path) -> list[Pictured]:
    model = IMAGES[name].save(folder)
    return [IMAGES[name].sequence(model, pieces, seed) for seed, pieces in enumerate(PROMPTS)]


def decoder_of(folder: Path, attention: AttentionBackend, offload: Offload | None = None) -> Decoder:
    spec = spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    return Decoder(spec, weights, TensorParallel(), attention, offload)


def error(forward: Forward, spec: ModelSpec, wanted: list[Pictured]) -> float:
    heads = HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads)
    cache = KVCache(spec, heads, 60, BLOCK, torch.float32, CPU)
    found = step_at_random(forward, cache, [each.span for each in wanted], NUM_DECODE, 20, 1)
    return max(float((ours - each.logits).abs().max()) for ours, each in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "gemma3", "llava"])
def test_recorded_steps_take_positions_by_axis(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from funitel.model_server.attention.triton_kernels import TritonAttention

    wanted = sequences(name, tmp_path)
    spec = spec_of(read_json(tmp_path / "config.json"))
    sizes = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    attention = TritonAttention(BLOCK, CPU, **sizes, dtype=torch.float32, num_processors=16)
    recorder = Redone()
    graphed = GraphedDecoder(decoder_of(tmp_path, attention), attention, (1, 2), 80, recorder)
    assert error(graphed, spec, wanted) < BOUND
    assert recorder.num_replays >= NUM_DECODE


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4_moe"])
def test_offloaded_layers_give_the_same(name: str, tmp_path: Path) -> None:
    wanted = sequences(name, tmp_path)
    spec = spec_of(read_json(tmp_path / "config.json"))
    offload = Offload(1, spec.num_layers, CPU, Prefetcher())
    assert error(decoder_of(tmp_path, TorchAttention(BLOCK, CPU), offload), spec, wanted) < BOUND
