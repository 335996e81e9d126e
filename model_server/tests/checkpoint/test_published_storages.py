"""Parts of matrices in the formats of published checkpoints, cut anywhere: those of the whole, dequantised."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.proto.errors import WeightsError
from funitel_testing.published import FORMATS

CPU = torch.device("cpu")
SHAPE = (40, 304)
CUTS = [(None, None), ((3, 37), None), (None, (1, 303)), ((5, 6), (129, 146)), ((0, 40), (15, 17))]


def opened(folder: Path, tensors: dict[str, torch.Tensor], config: Any) -> Weights:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return Weights(folder, torch.float32, CPU, is_shown=False)


def assert_parts(weights: Weights, stem: str, expected: torch.Tensor) -> None:
    shape = tuple(expected.shape)
    for rows, columns in CUTS:
        wanted = expected[slice(*(rows or (None, None))), slice(*(columns or (None, None)))]
        part = weights.read_linear(stem, *shape, rows=rows, columns=columns)
        torch.testing.assert_close(part, wanted, rtol=1e-6, atol=1e-9)


def random_matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.2


@pytest.mark.parametrize("kind", [kind for kind, each in FORMATS.items() if each.file == "config.json"])
def test_parts_of_a_matrix(kind: str, tmp_path: Path) -> None:
    tensors, expected = FORMATS[kind].pack(random_matrix(*SHAPE), "x")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert_parts(opened(tmp_path, tensors, FORMATS[kind].config), "x", expected)


@pytest.mark.parametrize(("strategy", "size"), [("tensor", None), ("group", 32)])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_bytes_with_scales_of_groups_or_of_all(
    strategy: str, size: int | None, is_symmetric: bool, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, SHAPE, generator=generator, dtype=torch.int8)
    shape = (1,) if size is None else (SHAPE[0], -(-SHAPE[1] // size))
    scales = torch.rand(shape, generator=generator) + 0.5
    zeros = torch.randint(-20, 20, shape, generator=generator, dtype=torch.int8)
    tensors = {"x.weight": codes, "x.weight_scale": scales}
    if not is_symmetric:
        tensors["x.weight_zero_point"] = zeros
    groups = torch.zeros(SHAPE[1], dtype=torch.int64) if size is None else torch.arange(SHAPE[1]) // size
    spread = [each.reshape(1, 1) if size is None else each for each in (scales, zeros)]
    offset = 0 if is_symmetric else spread[1][:, groups].float()
    expected = (codes.float() - offset) * spread[0][:, groups]
    given = {"num_bits": 8, "type": "int", "strategy": strategy, "group_size": size}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"0": {"weights": given}},
    }
    assert_parts(opened(tmp_path, tensors, config), "x", expected)


FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((3,), FP8),
        ((3, 1, 1), FP8),
        ((3, 40, 1), FP8),
        ((3, 1, 304), FP8),
        ((3, 3, 5), FP8 | {"weight_block_size": [16, 64]}),
    ],
)
def test_a_matrix_of_a_stack_in_float8(shape: tuple[int, ...], config: Any, tmp_path: Path) -> None:
    codes = (random_matrix(3, *SHAPE) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(4)) + 0.5
    by_dimension = scales.reshape(*shape, *(1,) * (3 - len(shape)))
    for dim in (1, 2):
        each = -(-codes.shape[dim] // by_dimension.shape[dim])
        each = config["weight_block_size"][dim - 1] if "weight_block_size" in config else each
        by_dimension = by_dimension.repeat_interleave(each, dim).narrow(dim, 0, codes.shape[dim])
    weights = opened(tmp_path, {"x": codes, "x_scale_inv": scales}, config)
    for i in range(3):
        assert_parts(weights, f"x[{i}]", (codes.float() * by_dimension)[i])
    weights.finish(())


def test_what_is_wrong_with_a_stack_is_named(tmp_path: Path) -> None:
    codes = (random_matrix(3, *SHAPE) * 100).to(torch.float8_e4m3fn)
    config = FP8 | {"weight_block_size": [16, 64]}
    with pytest.raises(WeightsError, match="the checkpoint lacks tensor x_scale_inv"):
        opened(tmp_path, {"x": codes}, config).read_linear("x[0]", *SHAPE)
    with pytest.raises(WeightsError, match=r"tensor x_scale_inv has shape \[3, 3, 4\], expected \[3, 3, 5\]"):
        opened(tmp_path, {"x": codes, "x_scale_inv": torch.ones(3, 3, 4)}, config).read_linear("x[0]", *SHAPE)
    scales = torch.ones(3, 3, 5)
    scales[1, 2, 4] = torch.inf
    weights = opened(tmp_path, {"x": codes, "x_scale_inv": scales}, config)
    weights.read_linear("x[0]", *SHAPE)
    with pytest.raises(WeightsError, match="tensor x_scale_inv holds the scale inf; scales must be finite"):
        weights.read_linear("x[1]", *SHAPE)


def test_float8_that_is_no_number_is_refused(tmp_path: Path) -> None:
    tensors, _ = FORMATS["fp8_channel"].pack(random_matrix(*SHAPE), "x")
    tensors["x.weight"].view(torch.uint8)[7, 9] = 0xFF
    weights = opened(tmp_path, tensors, FORMATS["fp8_channel"].config)
    with pytest.raises(WeightsError, match="tensor x.weight holds values that are not numbers"):
        weights.read_linear("x", *SHAPE)


@pytest.mark.parametrize(
    ("kind", "part", "change", "line"),
    [
        ("nvfp4", "weight_scale", lambda t: t[:, 1:], r"x.weight_scale has shape \[40, 18\], expected \[40, 19\]"),
        ("nvfp4", "weight_packed", lambda t: t.float(), "x.weight_packed is F32, expected U8: two numbers a byte"),
        ("nvfp4", "weight_global_scale", lambda t: -t, "x.weight_global_scale must be one number > 0, found -"),
        ("nvfp4_modelopt", "weight_scale_2", lambda t: torch.ones(2), "x.weight_scale_2 must be one number > 0"),
        ("nvfp4_modelopt", "weight_scale", lambda t: t.float() * torch.nan, "x.weight_scale holds the scale nan"),
        (
            "int8_activations",
            "weight_scale",
            lambda t: t[1:],
            r"x.weight_scale has shape \[39, 1\], expected \[40, 1\]",
        ),
        ("int8_activations", "weight", lambda t: t.float(), "x.weight is F32, expected I8 beside its scales"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_named(kind: str, part: str, change: Any, line: str, tmp_path: Path) -> None:
    tensors, _ = FORMATS[kind].pack(random_matrix(*SHAPE), "x")
    tensors |= {f"x.{part}": change(tensors[f"x.{part}"])}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with pytest.raises(WeightsError, match=line):
        opened(tmp_path, tensors, FORMATS[kind].config).read_linear("x", *SHAPE)


@pytest.mark.parametrize(("kind", "part"), [("int8_activations", "weight_scale"), ("nvfp4", "weight_global_scale")])
def test_a_matrix_without_scales_is_refused(kind: str, part: str, tmp_path: Path) -> None:
    tensors, _ = FORMATS[kind].pack(random_matrix(*SHAPE), "x")
    del tensors[f"x.{part}"]
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with pytest.raises(WeightsError, match=f"the checkpoint lacks tensor x.{part}"):
        opened(tmp_path, tensors, FORMATS[kind].config).read_linear("x", *SHAPE)
