"""What lies between matrix products as Triton kernels: what torch computes, over shapes and models drawn at random.

Without a GPU they run in Triton's interpreter, so this proves what they compute and nothing about their speed.
"""

import logging
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.elementwise import HeadRule, TorchElementwiseOps
from funitel.model_server.layers.elementwise_kernels import TritonElementwiseOps
from funitel.model_server.layers.linear import ACTIVATIONS, NormLayer
from funitel.model_server.models.decoder import Decoder, DecoderLayer
from funitel.model_server.models.fuse_elementwise import check_elementwise, fuse_elementwise
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import Activation
from funitel_testing.elementwise_cases import BOUNDS, Placing, draw_join, draw_placing, error_of
from funitel_testing.forward_worker import step_through
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 4
# QK norms, offset and post norms, partial rotary in parallel blocks, clips, LayerNorm without weights.
QUICK = ("qwen3", "gemma2", "gpt_neox")


class NoElementwiseOps(TorchElementwiseOps):
    """A reference that must not be asked."""

    def norm(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("a norm fell back to torch")

    join = place = norm  # type: ignore[assignment]


def no_fall_back(kv_dtype: torch.dtype) -> TritonElementwiseOps:
    elementwise = TritonElementwiseOps(kv_dtype)
    elementwise._reference = NoElementwiseOps()
    return elementwise


@pytest.mark.parametrize("seed", range(16))
def test_residual_and_norms(seed: int) -> None:
    case = draw_join(seed, DEVICE)
    found = case.through(TritonElementwiseOps(case.x.dtype))
    assert error_of(found, case.exact().through(TorchElementwiseOps())) <= BOUNDS[case.x.dtype]


@pytest.mark.parametrize("seed", range(24))
def test_heads_in_their_places(seed: int) -> None:
    case = draw_placing(seed, DEVICE)
    found = case.through(no_fall_back(case.kv_dtype))
    assert error_of(found, case.exact().through(TorchElementwiseOps())) <= BOUNDS[case.qkv.dtype]


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_pool_of_float8_takes_what_is_beyond_its_range_as_its_largest(kv_dtype: torch.dtype) -> None:
    """With numbers that it holds exactly: Triton's interpreter rounds others to half of what they are."""
    case = next(case for case in map(draw_placing, range(100), repeat(DEVICE)) if len(case.qkv) > 2)
    rule = HeadRule(case.rule.num_heads, case.rule.num_kv_heads, None, None, key_scale=0.5, value_scale=2.0)
    numbers = torch.tensor([0.25, -1.5, 7.0, 30000.0, -60000.0], device=DEVICE)
    qkv = numbers[torch.arange(case.qkv.numel(), device=DEVICE).view_as(case.qkv) % len(numbers)]
    placing = Placing(qkv, rule, None, case.spec, kv_dtype)
    queries, pool = placing.through(no_fall_back(kv_dtype))
    exact_queries, exact_pool = replace(placing, kv_dtype=torch.float32).through(TorchElementwiseOps())
    most = torch.finfo(kv_dtype).max
    assert torch.equal(queries, exact_queries)
    assert exact_pool.abs().max() > most
    assert torch.equal(pool.float(), exact_pool.clamp(-most, most).to(kv_dtype).float())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_over_many_shapes(seed: int) -> None:
    join, placing = draw_join(seed, DEVICE), draw_placing(seed, DEVICE)
    assert (
        error_of(join.through(TritonElementwiseOps(join.x.dtype)), join.exact().through(TorchElementwiseOps()))
        <= BOUNDS[join.x.dtype]
    )
    found = placing.through(no_fall_back(placing.kv_dtype))
    assert error_of(found, placing.exact().through(TorchElementwiseOps())) <= BOUNDS[placing.qkv.dtype]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of what a sigmoid rightly makes 0
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(activation: Activation) -> None:
    for i, (dtype, bound) in enumerate(BOUNDS.items()):
        x = (3 * torch.randn(3, 2 * (100 + 1000 * i), generator=torch.Generator().manual_seed(i))).to(DEVICE, dtype)
        found, expected = (
            TritonElementwiseOps(dtype).gate(x, activation),
            TorchElementwiseOps().gate(x.float(), activation),
        )
        assert error_of([found], [expected]) <= bound


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    spec = spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, dtype, CPU, spec.names.prefix)
    return Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK, CPU))


def heads_of(decoder: Decoder) -> HeadSplit:
    return HeadSplit(0, decoder.spec.num_heads, 0, decoder.spec.num_kv_heads)


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in ZOO]
)
def test_logits_of_the_reference(family: str, tmp_path: Path) -> None:
    ZOO[family].save(tmp_path)
    decoder = decoder_of(tmp_path)
    elementwise = no_fall_back(torch.float32) if family in QUICK else TritonElementwiseOps(torch.float32)
    prompts = [torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (13, 5)]
    logits = []
    for _ in range(2):
        cache = KVCache(decoder.spec, heads_of(decoder), 60, BLOCK, torch.float32, CPU)
        logits.append(step_through(decoder, cache, prompts, 2))
        decoder.adopt(elementwise)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(*logits, strict=True))
    check_elementwise(elementwise, decoder, heads_of(decoder), CPU, torch.float32, torch.float32)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3"])
def test_a_layer_multiplies_four_times(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values by one matrix, gates and values by one, however the checkpoint has them."""
    ZOO[family].save(tmp_path)
    decoder = decoder_of(tmp_path, torch.bfloat16)
    widths = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        widths.append(len(weight))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(
        "funitel.model_server.layers.linear.F", SimpleNamespace(**vars(torch.nn.functional) | {"linear": linear})
    )
    step_through(decoder, KVCache(decoder.spec, heads_of(decoder), 60, BLOCK, torch.bfloat16, CPU), [[3]], 1)
    spec = decoder.spec
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = [heads, spec.hidden_size, spec.intermediate_size * (1 + spec.is_gated), spec.hidden_size]
    assert widths == layer * spec.num_layers + [spec.vocab_size]


class WrongNorm(TritonElementwiseOps):
    def norm(self, norm: NormLayer, x: torch.Tensor) -> torch.Tensor:
        return super().norm(norm, x) * 1.1


class WrongPlace(TritonElementwiseOps):
    def place(self, qkv: torch.Tensor, *rest: object) -> torch.Tensor:  # type: ignore[override]
        return super().place(qkv.roll(1, dims=1), *rest)  # type: ignore[arg-type]


class WrongGate(TritonElementwiseOps):
    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        return super().gate(x.roll(x.shape[1] // 2, dims=1), activation)


@pytest.mark.parametrize("wrong", [WrongNorm, WrongPlace, WrongGate])
def test_a_wrong_kernel_does_not_pass_the_probe(wrong: type[TritonElementwiseOps], tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    decoder = decoder_of(tmp_path)
    with pytest.raises(ValueError, match="a probe is off by"):
        check_elementwise(wrong(torch.float32), decoder, heads_of(decoder), CPU, torch.float32, torch.float32)


def test_what_fails_the_probe_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ZOO["llama"].save(tmp_path)
    decoder = decoder_of(tmp_path)
    fuse_elementwise(decoder, heads_of(decoder), CPU, torch.float32, torch.float32)
    assert decoder.elementwise.name == "torch"

    def refuse(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("funitel.model_server.models.fuse_elementwise.check_elementwise", refuse)
    with caplog.at_level(logging.WARNING):
        fuse_elementwise(decoder, heads_of(decoder), torch.device("cuda"), torch.float32, torch.float32)
    assert decoder.elementwise.name == "torch"
    assert "RuntimeError: no compiler" in caplog.text
    monkeypatch.setattr("funitel.model_server.models.fuse_elementwise.check_elementwise", lambda *_: None)
    fuse_elementwise(decoder, heads_of(decoder), torch.device("cuda"), torch.float32, torch.float32)
    layer = decoder.layers[-1]
    assert isinstance(layer, DecoderLayer)
    adopted = [decoder, layer.attention_residual, layer.mlp_residual, layer.attention, *layer.mlp.mlps()]
    assert {each.elementwise.name for each in adopted} == {"triton"}  # type: ignore[attr-defined]
