"""A pool of float8: what it takes, what is read from it, and the checkpoint's scales of keys and values."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache, Slots
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import WeightsError
from funitel_testing.executors import load_executor
from funitel_testing.forward_worker import step_through
from funitel_testing.tiny import save_tiny

CPU, BLOCK = torch.device("cpu"), 4
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
PROMPTS = [[5, 200, 17, 0, 42, 9, 101, 33], list(range(21))]


def cache_of(spec: ModelSpec, dtype: torch.dtype, kind: type[KVCache] = KVCache) -> KVCache:
    return kind(spec, HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads), 40, BLOCK, dtype, CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def with_scales(folder: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    save_file(load_file(folder / "model.safetensors") | scales, target / "model.safetensors")
    return target


def decoder_of(folder: Path, *, scales_kv: bool) -> Decoder:
    spec = spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    weights.scales_kv = scales_kv
    return Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK, CPU))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_pool_takes_a_byte_a_number_and_what_is_too_large_as_its_largest(folder: Path, dtype: torch.dtype) -> None:
    spec = spec_of(read_json(folder / "config.json"))
    cache = cache_of(spec, dtype)
    assert cache.num_bytes * 4 == cache_of(spec, torch.float32).num_bytes
    assert KVCache.bytes_per_block(spec, HeadSplit(0, 6, 0, 3), BLOCK, dtype) * cache.num_blocks == cache.num_bytes
    slots = torch.tensor([7, 9]), torch.tensor([1, 3])
    keys = torch.full((2, 3, spec.head_dim), 1.0625)
    keys[0, 0, 0], keys[1, 2, 1] = 1e6, -1e6
    cache.write(1, slots, keys, torch.full_like(keys, torch.nan))
    most = torch.finfo(dtype).max
    found = cache.keys[1][7, 1].float(), cache.keys[1][9, 3].float()
    assert (found[0][0, 0], found[1][2, 1], found[0][1, 1]) == (most, -most, 1.0)
    assert cache.values[1][9, 3].float().isnan().all()
    assert not cache.keys[0].float().any()
    cache.wipe([7, 9])
    assert not cache.pool.view(torch.uint8).any()


class Rounding(KVCache):
    """Holds in float32 what a pool of float8 would hold, times its scales."""

    dtype = torch.float8_e4m3fn
    scales = (1.0, 1.0)

    def write(self, layer: int, slots: Slots, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        assert values is not None
        most = torch.finfo(self.dtype).max
        super().write(layer, slots, *(
            (part / scale).clamp(-most, most).to(self.dtype).float() * scale
            for part, scale in zip((keys, values), self.scales, strict=True)
        ))  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_attention_reads_what_was_written(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(Rounding, "dtype", dtype)
    decoder = decoder_of(folder, scales_kv=True)
    found = step_through(decoder, cache_of(decoder.spec, dtype), PROMPTS, 3)
    expected = step_through(decoder, cache_of(decoder.spec, torch.float32, Rounding), PROMPTS, 3)
    plain = step_through(decoder, cache_of(decoder.spec, torch.float32), PROMPTS, 3)
    for ours, rounded, exact in zip(found, expected, plain, strict=True):
        torch.testing.assert_close(ours, rounded, rtol=0, atol=1e-4)
        assert (ours - exact).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("names", "scales"),
    [
        (("k_scale", "v_scale"), (0.05, 3.0)),
        (("k_proj.k_scale", "v_proj.v_scale"), (0.05, 3.0)),
        (("kv_scale",), (0.3, 0.3)),
    ],
)
def test_scales_of_the_checkpoint(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    scales: tuple[float, float],
) -> None:
    monkeypatch.setattr(Rounding, "scales", scales)
    tensors = {
        f"model.layers.{i}.self_attn.{name}": torch.tensor([scale])
        for i in range(2)
        for name, scale in zip(names, scales, strict=False)
    }
    with_scales(folder, tmp_path, tensors)
    plain, scaled = decoder_of(folder, scales_kv=True), decoder_of(tmp_path, scales_kv=True)
    found = step_through(scaled, cache_of(plain.spec, torch.float8_e4m3fn), PROMPTS, 3)
    expected = step_through(plain, cache_of(plain.spec, torch.float32, Rounding), PROMPTS, 3)
    unused = step_through(decoder_of(tmp_path, scales_kv=False), cache_of(plain.spec, torch.float32), PROMPTS, 3)
    exact = step_through(plain, cache_of(plain.spec, torch.float32), PROMPTS, 3)
    for ours, theirs, without, float32 in zip(found, expected, unused, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
        assert torch.equal(without, float32)  # a pool in another precision has no use for them


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_that_makes_no_sense_is_named(folder: Path, tmp_path: Path, scale: float) -> None:
    with_scales(folder, tmp_path, {"model.layers.1.self_attn.v_scale": torch.tensor(scale)})
    with pytest.raises(WeightsError, match=r"tensor model\.layers\.1\.self_attn\.v_scale must be one number > 0"):
        decoder_of(tmp_path, scales_kv=True)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3fn", "fp8_e5m2", "float16", "int8", "uint4"])
def test_a_cpu_has_such_pools_too(folder: Path, dtype: str) -> None:
    executor = load_executor(folder, kv_cache_dtype=dtype)
    bits = {"float16": 16, "uint4": 4}.get(dtype, 8)
    spec = spec_of(read_json(folder / "config.json"))
    of_scales = 8 if dtype in ("int8", "uint4") else 0  # of a token and head, for keys and for values
    dim = 32 if dtype == "uint4" else 16 if dtype == "int8" else spec.head_dim  # heads of 8 elements are filled up
    assert executor.runner.pool.pool[0].nbytes == 2 * spec.num_kv_heads * BLOCK * (2 * dim * bits // 8 + of_scales)
