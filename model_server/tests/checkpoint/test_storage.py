"""Quantised layers of other people's checkpoints: any cut of them has the weights their published layout says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.quantized import bit_packing
from funitel.model_server.quantized.bit_packing import pack, unpack
from funitel.proto.errors import UnsupportedModel, WeightsError
from funitel_testing.packed import (
    Float8Layer,
    Layer,
    awq_tensors,
    compressed_tensors,
    gptq_tensors,
    random_float8,
    random_layer,
)

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 80, 32
# Cuts on words and groups, inside both, of one element, of none.
CUTS = [
    (None, None),
    ((0, 12), None),
    ((5, 29), None),
    ((7, 8), None),
    (None, (0, 40)),
    (None, (13, 51)),
    (None, (79, 80)),
]


def gptq_config(bits: int = 4, group_size: int = 16, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size} | more


def packed_config(bits: int, group_size: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group_size}
    if group_size == -1:
        weights |= {"strategy": "channel", "group_size": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: object) -> Weights:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return Weights(folder, torch.float32, CPU)


def assert_cuts(weights: Weights, layer: Layer | Float8Layer) -> None:
    whole = layer.weight()
    for rows, columns in CUTS:
        part = weights.read_linear("a", OUTPUTS, INPUTS, rows=rows, columns=columns)
        expected = whole[slice(*(rows or (None,))), slice(*(columns or (None,)))]
        assert part.is_contiguous()
        torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_packed_comes_out_again(bits: int, dim: int) -> None:
    codes = torch.randint(0, 2**bits, (48, 64), dtype=torch.uint8)
    words = pack(codes, bits, dim)
    assert words.dtype is torch.int32
    assert words.shape[dim] == codes.shape[dim] * bits // 32
    assert torch.equal(unpack(words, bits, dim), codes)


def test_the_first_code_is_lowest_and_a_last_word_is_filled_up() -> None:
    words = pack(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15, 9]], dtype=torch.uint8), 4, 1)
    assert words.tolist() == [[0xF7654321 - 2**32, 9]]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("is_reordered", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (4, -1), (4, 48), (2, 20), (8, 32)])
def test_gptq(tmp_path: Path, bits: int, group_size: int, is_reordered: bool, is_exact: bool) -> None:
    layer = random_layer(INPUTS, OUTPUTS, bits, group_size, is_reordered=is_reordered)
    config = gptq_config(bits, group_size, **({"checkpoint_format": "gptq_v2"} if is_exact else {}))
    weights = write(tmp_path, gptq_tensors(layer, "a", is_exact=is_exact), config)
    assert_cuts(weights, layer)
    weights.finish(())


def test_a_large_layer_is_turned_to_floating_point_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer(INPUTS, OUTPUTS, is_reordered=True)
    monkeypatch.setattr(bit_packing, "_CHUNK_ELEMENTS", 7 * OUTPUTS)
    assert_cuts(write(tmp_path, gptq_tensors(layer, "a"), gptq_config()), layer)


def test_gptq_without_an_order_of_groups(tmp_path: Path) -> None:
    layer = random_layer(INPUTS, OUTPUTS, is_symmetric=True)
    assert_cuts(write(tmp_path, gptq_tensors(layer, "a", with_order=False), gptq_config()), layer)


def test_gptq_described_by_tensors_as_tgi_did(tmp_path: Path) -> None:
    layer = random_layer(INPUTS, OUTPUTS)
    described = {"gptq_bits": 4, "gptq_groupsize": 16, "gptq_sym": 0}
    tensors = gptq_tensors(layer, "a") | {name: torch.tensor(value) for name, value in described.items()}
    weights = write(tmp_path, tensors, None)
    assert weights.quantization is not None
    assert weights.quantization.flags == ("gptq",)
    assert_cuts(weights, layer)
    weights.finish(())


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (4, -1), (8, -1), (8, 20)])
def test_compressed_tensors(tmp_path: Path, bits: int, group_size: int, is_symmetric: bool) -> None:
    layer = random_layer(INPUTS, OUTPUTS, bits, group_size, is_symmetric=is_symmetric)
    tensors = compressed_tensors(layer, "a", is_symmetric=is_symmetric)
    weights = write(tmp_path, tensors, packed_config(bits, group_size))
    assert_cuts(weights, layer)
    weights.finish(())


def test_compressed_tensors_in_another_order_of_groups(tmp_path: Path) -> None:
    layer = random_layer(INPUTS, OUTPUTS, is_symmetric=True, is_reordered=True)
    tensors = compressed_tensors(layer, "a", is_symmetric=True, with_order=True)
    assert_cuts(write(tmp_path, tensors, packed_config(4, 16)), layer)


def test_quantised_and_plain_layers_lie_side_by_side_and_are_counted_as_read(tmp_path: Path) -> None:
    layer = random_layer(INPUTS, OUTPUTS)
    plain = torch.randn(OUTPUTS, INPUTS)
    weights = write(tmp_path, gptq_tensors(layer, "a") | {"b.weight": plain}, gptq_config())
    weights.read_linear("a", OUTPUTS, INPUTS, rows=(0, 6))
    assert torch.equal(weights.read_linear("b", OUTPUTS, INPUTS), plain)
    assert weights.sharded_bytes == 6 * INPUTS * 4
    assert weights.total_sharded_bytes == OUTPUTS * INPUTS * 4
    assert weights.held_bytes == (6 + OUTPUTS) * INPUTS * 4


def test_a_bias_of_zeros_beside_a_quantised_layer_is_nothing(tmp_path: Path) -> None:
    tensors = gptq_tensors(random_layer(INPUTS, OUTPUTS), "a")
    weights = write(tmp_path, tensors | {"a.bias": torch.zeros(OUTPUTS)}, gptq_config())
    weights.read_linear("a", OUTPUTS, INPUTS)
    weights.finish(())
    weights = write(tmp_path, tensors | {"a.bias": torch.ones(OUTPUTS)}, gptq_config())
    weights.read_linear("a", OUTPUTS, INPUTS)
    with pytest.raises(WeightsError, match=r"1 tensors the model does not know: a\.bias"):
        weights.finish(())


def without(part: str) -> dict[str, torch.Tensor]:
    tensors = gptq_tensors(random_layer(INPUTS, OUTPUTS), "a")
    return {name: tensor for name, tensor in tensors.items() if name != f"a.{part}"}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (without("scales"), gptq_config(), r"lacks tensor a\.scales"),
        (without("qzeros"), gptq_config(), r"lacks tensor a\.qzeros"),
        (without(""), gptq_config(group_size=32), r"a\.scales has shape \[5, 32\], expected \[3, 32\]"),
        (without(""), gptq_config(bits=8, group_size=8), r"a\.qzeros has shape \[5, 4\], expected \[5, 8\]"),
        (without("") | {"a.g_idx": torch.arange(INPUTS)}, gptq_config(), r"a\.g_idx names groups 0 to 79, there are 5"),
        (without("") | {"a.g_idx": torch.zeros(3)}, gptq_config(), r"a\.g_idx has shape \[3\], expected \[80\]"),
        (without(""), None, r"a\.qweight is quantised, but no quantization_config says how"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: object, message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        write(tmp_path, tensors, config).read_linear("a", OUTPUTS, INPUTS)


def test_a_quantised_layer_of_another_size_is_named(tmp_path: Path) -> None:
    weights = write(tmp_path, gptq_tensors(random_layer(INPUTS, OUTPUTS), "a"), gptq_config())
    with pytest.raises(WeightsError, match=r"a\.weight has shape \[32, 80\], expected \[32, 88\] from config\.json"):
        weights.read_linear("a", OUTPUTS, 88)


def test_what_tgi_tensors_describe_must_be_readable(tmp_path: Path) -> None:
    tensors = {"gptq_bits": torch.tensor(3), "gptq_groupsize": torch.tensor(16)}
    with pytest.raises(UnsupportedModel, match="bits 3 is not supported with gptq; supported: 2, 4, 8"):
        write(tmp_path, tensors, None)


@pytest.mark.parametrize("group_size", [16, 80, -1])
def test_awq(tmp_path: Path, group_size: int) -> None:
    layer = random_layer(INPUTS, OUTPUTS, group_size=group_size)
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    weights = write(tmp_path, awq_tensors(layer, "a"), config)
    assert_cuts(weights, layer)
    weights.finish(())


def compressed_float8(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [16, 24]}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("layer", "config"),
    [
        (random_float8(INPUTS, OUTPUTS), compressed_float8("channel")),
        (random_float8(INPUTS, OUTPUTS, is_whole=True), compressed_float8("tensor")),
        (random_float8(INPUTS, OUTPUTS, is_whole=True), {"quant_method": "fp8", "activation_scheme": "static"}),
        (random_float8(INPUTS, OUTPUTS), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        (random_float8(INPUTS, OUTPUTS, block=(16, 24)), {"quant_method": "fp8", "weight_block_size": [16, 24]}),
        (random_float8(INPUTS, OUTPUTS, block=(16, 24)), compressed_float8("block")),
    ],
)
def test_float8(tmp_path: Path, layer: Float8Layer, config: dict[str, Any]) -> None:
    weights = write(tmp_path, layer.tensors("a"), config)
    assert_cuts(weights, layer)
    weights.finish(())


def test_a_float8_layer_of_other_scales_is_refused(tmp_path: Path) -> None:
    layer = random_float8(INPUTS, OUTPUTS, block=(16, 24))
    with pytest.raises(WeightsError, match=r"tensor a\.weight_scale_inv has shape \[2, 4\], expected one number or 32"):
        write(tmp_path, layer.tensors("a"), {"quant_method": "fp8"})
    with pytest.raises(WeightsError, match=r"has shape \[2, 4\], expected \[4, 4\]"):
        write(tmp_path, layer.tensors("a"), {"quant_method": "fp8", "weight_block_size": [8, 24]})
