"""Weights that are not numbers are refused while they are loaded, and so is a GGUF with such blocks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file, save_file

from funitel.model_server.checkpoint.gguf_file import GgufTensorFile
from funitel.model_server.checkpoint.weights import has_nan
from funitel.model_server.files.gguf_pointer import POINTER
from funitel.model_server.hub.resolve import resolve
from funitel.proto.errors import WeightsError
from funitel_testing.executors import load_executor
from funitel_testing.tiny import save_tiny


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None], ids=str)
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a6_weights_of_0xff_are_refused_by_name(name: str, dtype: str | None, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(torch.int32).view(-1)[3:7] = -1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"^tensor {name} holds values that are not numbers: its file is damaged$"):
        load_executor(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a6_numbers_are_told_from_what_is_none(dtype: torch.dtype) -> None:
    values = torch.full((3, 5), -65000.0).to(dtype)
    assert not has_nan(values)
    assert not has_nan(torch.full((2,), torch.inf, dtype=dtype))
    assert not has_nan(torch.empty(0, 4, dtype=dtype))
    assert not has_nan(torch.empty(3, device="meta"))
    assert not has_nan(torch.full((4,), -1, dtype=torch.int32))
    values[2, 4] = torch.nan
    assert has_nan(values)
    assert has_nan(torch.tensor(torch.nan, dtype=dtype))


HF_NAMES = {"blk.0.attn_q.weight": "0.self_attn.q_proj", "blk.1.ffn_up.weight": "1.mlp.up_proj"}


def test_a6_a_gguf_of_0xff_is_refused_by_the_name_of_the_tensor(tmp_path: Path, make_gguf: Callable[..., Any]) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path, types={"blk.0.attn_q.weight": GGMLQuantizationType.Q8_0})
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_up.weight"):
        content = bytearray(path.read_bytes())
        tensor = next(each for each in GGUFReader(path).tensors if each.name == name)
        content[tensor.data_offset : tensor.data_offset + 40] = b"\xff" * 40
        spoiled = tmp_path / "spoiled.gguf"
        spoiled.write_bytes(content)
        weights = GgufTensorFile(resolve(str(spoiled), cache_dir=tmp_path / "cache").folder / POINTER)
        with pytest.raises(
            WeightsError, match=rf"spoiled\.gguf is damaged: tensor {name} holds values that are not num"
        ):
            weights.get_tensor(f"model.layers.{HF_NAMES[name]}.weight")
