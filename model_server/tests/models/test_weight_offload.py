"""Weights that come from the host layer by layer: the same logits, and copies that neither come late nor overwrite.

A CPU stands in for the device. Its prefetcher copies as late as it may, and spoils a slot as early as it may.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.elementwise import TorchElementwiseOps
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.models.cuda_graphs import recorded
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.fuse_elementwise import check_elementwise
from funitel.model_server.models.weight_offload import Arrival, Offload, OffloadedLayer, offload_of
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel_testing.forward_worker import step_through
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")
BLOCK = 4
PROMPTS = [list(range(3, 20)), list(range(50, 59))]


class LatePrefetcher:
    """Copies when the copy is waited for; until then NaNs lie there."""

    def __init__(self) -> None:
        self.sent: list[int] = []  # where each copy came from
        self.pieces: list[torch.Tensor] = []
        self.num_pending = self.most_pending = 0

    def hold(self, num_bytes: int) -> torch.Tensor:
        self.pieces.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.pieces[-1]

    def send(self, source: torch.Tensor, into: torch.Tensor) -> Arrival:
        self.sent.append(next(i for i, piece in enumerate(self.pieces) if piece is source))
        self.num_pending += 1
        self.most_pending = max(self.most_pending, self.num_pending)
        into.fill_(255)

        def arrive() -> None:
            self.num_pending -= 1
            into.copy_(source)

        return arrive


def decoder_of(folder: Path, offload: Offload | None = None) -> Decoder:
    spec = spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, torch.bfloat16, CPU, spec.names.prefix)
    return Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK, CPU), offload)


def logits_of(decoder: Decoder) -> list[torch.Tensor]:
    spec = decoder.spec
    heads = HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads)
    cache = KVCache(spec, heads, 60, BLOCK, torch.bfloat16, CPU)
    return step_through(decoder, cache, PROMPTS, 3)


def offload_layers(folder: Path, count: int) -> tuple[Offload, LatePrefetcher]:
    """An offload for as many bytes as so many layers have."""
    prefetcher = LatePrefetcher()
    probe = Offload(1, 1, CPU, LatePrefetcher())
    layer = decoder_of(folder).layers[0]
    assert not isinstance(layer, OffloadedLayer)
    _, num_bytes = probe._tensors_of(layer, ())
    spec = spec_of(read_json(folder / "config.json"))
    return Offload(num_bytes * count - 1, spec.num_layers, CPU, prefetcher), prefetcher


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gemma2"])
def test_logits_do_not_change(family: str, tmp_path: Path) -> None:
    ZOO[family].save(tmp_path)
    expected = logits_of(decoder_of(tmp_path))
    offload, prefetcher = offload_layers(tmp_path, 100)
    decoder = decoder_of(tmp_path, offload)
    assert all(isinstance(layer, OffloadedLayer) for layer in decoder.layers)
    for _ in range(2):
        found = logits_of(decoder)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert prefetcher.most_pending == min(2, len(decoder.layers))


def test_kernels_are_tried_with_weights_that_are_there(tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    offload, _ = offload_layers(tmp_path, 100)
    decoder = decoder_of(tmp_path, offload)
    heads = HeadSplit(0, decoder.spec.num_heads, 0, decoder.spec.num_kv_heads)
    check_elementwise(
        TorchElementwiseOps(), decoder, heads, CPU, torch.bfloat16, torch.bfloat16
    )  # what is spoilt in a slot would equal nothing


def test_layers_are_spread_and_each_is_sent_for_while_the_one_before_computes(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, num_hidden_layers=7)
    offload, prefetcher = offload_layers(tmp_path, 3)
    decoder = decoder_of(tmp_path, offload)
    places = [i for i, layer in enumerate(decoder.layers) if isinstance(layer, OffloadedLayer)]
    assert places == [2, 4, 6]
    assert offload.num_bytes == sum(map(len, prefetcher.pieces))
    expected = logits_of(decoder_of(tmp_path))
    found = logits_of(decoder)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert prefetcher.sent[:6] == [0, 1, 2, 0, 1, 2]
    assert recorded(decoder, None) is decoder


def test_what_is_on_the_host_is_not_on_the_device(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    offload, prefetcher = offload_layers(tmp_path, 100)
    decoder = decoder_of(tmp_path, offload)
    layer: Any = decoder.layers[2]
    weight = layer.layer.attention.qkv.matmul.weight
    slots = [slot.data_ptr() for slot in offload._slots]
    assert any(start <= weight.data_ptr() < start + len(prefetcher.pieces[0]) for start in slots)
    assert len(slots) == 2


def test_a_step_that_failed_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path)
    offload, _ = offload_layers(tmp_path, 100)
    decoder = decoder_of(tmp_path, offload)
    expected = logits_of(decoder)
    layer: Any = decoder.layers[1]

    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "layer", fail)
        with pytest.raises(torch.OutOfMemoryError):
            logits_of(decoder)
    assert all(torch.equal(a, b) for a, b in zip(logits_of(decoder), expected, strict=True))


def test_on_a_cpu_it_changes_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = save_tiny("llama", tmp_path)
    assert offload_of(0.0, 3, torch.device("cuda")) is None
    settings = ModelServerSettings(model_id=str(folder), device="cpu", cpu_offload_gb=2.5, attention="flash")
    load_generator(settings, folder)
    assert "--cpu-offload-gb 2.5 changes nothing: the model runs on a CPU" in caplog.text
    assert "--attention flash changes nothing: the model runs on a CPU" in caplog.text


def test_models_it_is_not_for(tmp_path: Path) -> None:
    folder = save_tiny_seq2seq("t5", tmp_path)
    settings = ModelServerSettings(model_id=str(folder), device="cpu", cpu_offload_gb=2.5)
    with pytest.raises(SettingsError, match="--cpu-offload-gb 2.5 is not for encoder-decoders"):
        load_generator(settings, folder)
