"""`marlin-24` checkpoints: the weights of an encoder that places one integer at a time, of any part of a matrix."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.proto.errors import UnsupportedModel, WeightsError
from funitel_testing.sparse import Tensors, marlin_24, pruned_24

CUTS = [(None, None), ((3, 37), None), (None, (1, 95)), ((64, 128), (32, 96)), ((63, 66), (30, 34)), ((5, 5), (0, 9))]


def config(bits: object = 4, **changes: object) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None} | changes
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"group_0": group}}


def opened(folder: Path, tensors: Tensors, given: object) -> Weights:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": given}))
    return Weights(folder, torch.float32, torch.device("cpu"), is_shown=False)


def layer(shape: tuple[int, int], bits: int, num_groups: int = 1) -> tuple[Tensors, torch.Tensor]:
    """Tensors, and the weights that they stand for; some fours have fewer values than two."""
    generator = torch.Generator().manual_seed(bits)
    weight = pruned_24(torch.randn(shape, generator=generator))
    weight[2], weight[3, :8], weight[4, 0] = 0.0, 0.0, 0.0
    top = 2 ** (bits - 1)
    scales = (torch.rand(shape[0], num_groups, generator=generator) + 0.5).half()
    codes = (weight * top / 3).round().clamp(-top, top - 1).int()
    spread = scales.float().repeat_interleave(shape[1] // num_groups, dim=1)
    return marlin_24(codes + top, scales, "x", bits=bits), codes * spread


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("shape", "num_groups"), [((128, 96), 1), ((128, 512), 4), ((192, 256), 2), ((128, 128), 1)])
def test_parts_of_a_matrix(bits: int, shape: tuple[int, int], num_groups: int, tmp_path: Path) -> None:
    tensors, expected = layer(shape, bits, num_groups)
    changes = {"strategy": "group", "group_size": 128} if num_groups > 1 else {}
    weights = opened(tmp_path, tensors, config(bits, **changes))
    assert weights.quantization is not None
    assert weights.quantization.flags == ("marlin-24", "compressed-tensors")
    for rows, columns in CUTS:
        found = weights.read_linear("x", *shape, rows=rows, columns=columns)
        assert torch.equal(found, expected[slice(*(rows or (None,)))][:, slice(*(columns or (None,)))])


def changed(values: torch.Tensor, value: int) -> torch.Tensor:
    values = values.clone()
    values[1, 5] = value
    return values


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("x.meta", lambda t: changed(t, 0), "x.meta is not 2:4: four inputs have their two places out of order"),
        ("x.meta", lambda t: t[:, 1:], "x.meta has shape [3, 255], expected [3, 256]"),
        ("x.meta", lambda t: t.int(), "x.meta is I32, expected I16"),
        ("x.meta", lambda t: None, "the checkpoint lacks tensor x.meta"),
        ("x.weight_packed", lambda t: t[:, 2:], "x.weight_packed has rows of 254 words, no tiles of 64 outputs"),
        ("x.weight_packed", lambda t: t[:, :0], "x.weight_packed has rows of 0 words, no tiles of 64 outputs"),
        ("x.weight_packed", lambda t: t[1:], "x.meta has shape [3, 256], expected [2, 256]"),
        ("x.weight_packed", lambda t: t.long(), "x.weight_packed is I64, expected I32"),
        ("x.weight_packed", lambda t: None, "the checkpoint lacks tensor x.weight_packed"),
        ("x.scale_packed", lambda t: t[:, 1:], "x.scale_packed has shape [1, 127], expected [1, 128]"),
        ("x.scale_packed", lambda t: None, "the checkpoint lacks tensor x.scale_packed"),
        ("x.scale_packed", lambda t: t * torch.nan, "x.scale_packed holds the scale nan; scales must be finite"),
    ],
)
def test_what_is_damaged_is_one_line(
    name: str, spoil: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors, _ = layer((128, 96), 4)
    spoiled = spoil(tensors.pop(name))
    if spoiled is not None:
        tensors[name] = spoiled.contiguous()
    with pytest.raises(WeightsError, match=re.escape(message)) as raised:
        opened(tmp_path, tensors, config()).read_linear("x", 128, 96)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symmetric": False}, "symmetric False is not supported with marlin-24; supported: True"),
        ({"bits": 2}, "num_bits 2 is not supported with compressed-tensors; supported: 4, 8"),
        ({"strategy": "group", "group_size": 64}, "group_size 64 is not supported with marlin-24; supported: -1, 128"),
        (
            {"strategy": "tensor"},
            "strategy 'tensor' is not supported with compressed-tensors; supported: group, channel",
        ),
    ],
)
def test_what_its_writer_does_not_make_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        opened(tmp_path, layer((64, 32), 4)[0], config(**changes))
