"""A checkpoint must hold exactly what its config promises; anything else is one line that names the tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.integrity import read_json
from funitel.proto.errors import UnsupportedModel, WeightsError
from funitel_testing.executors import load_executor
from funitel_testing.tiny import save_tiny

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path)


def rewrite(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if name != drop}
    save_file(tensors | add, path)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(WeightsError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_executor(folder)


def test_a_missing_head_is_not_taken_for_a_tied_one(folder: Path) -> None:
    rewrite(folder, drop="lm_head.weight")
    with pytest.raises(WeightsError, match=r"lacks tensor lm_head\.weight"):
        load_executor(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    with pytest.raises(
        WeightsError, match=r"1 tensors the model does not know: model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        load_executor(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, drop="model.norm.weight", **{"model.norm.weight": torch.zeros(47)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \[47\], expected \[48\]"):
        load_executor(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors is not a whole safetensors file"):
        load_executor(folder)


def test_a_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no weights \(\*\.safetensors"):
        Weights(tmp_path, torch.float32, CPU)
    with pytest.raises(WeightsError, match=r"holds no config\.json"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(WeightsError, match="is not a JSON object"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="not readable JSON"):
        read_json(tmp_path / "config.json")


def test_no_end_token_is_an_error(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name, field in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        values = json.loads((folder / name).read_text())
        values.pop(field, None)
        (folder / name).write_text(json.dumps(values))
    with pytest.raises(WeightsError, match="names no end-of-sequence token"):
        load_executor(folder)


def test_a_checkpoint_of_the_bare_model_is_understood(tmp_path: Path) -> None:
    folder = save_tiny("gpt2", tmp_path)
    path = folder / "model.safetensors"
    save_file({name.removeprefix("transformer."): t.clone() for name, t in load_file(path).items()}, path)
    load_executor(folder)


def test_bytes_are_counted(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    weights = Weights(folder, torch.float32, CPU)
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if len(shape) == 2:
            weights.read(name, shape, rows=(0, shape[0] // 2))
        else:
            weights.read(name, shape)
    whole = sum(t.numel() * 4 for t in tensors.values() if t.dim() == 1)
    split = sum(t.numel() * 4 for t in tensors.values() if t.dim() == 2)
    assert weights.total_sharded_bytes == split
    assert weights.sharded_bytes == split // 2
    assert weights.held_bytes == whole + split // 2
    weights.finish(())


def test_what_is_read_in_another_precision_counts_as_that(folder: Path) -> None:
    name, tensor = next(item for item in load_file(folder / "model.safetensors").items() if item[1].dim() == 2)
    weights = Weights(folder, torch.float16, torch.device("cpu"))
    weights.read(name, list(tensor.shape), rows=(0, tensor.shape[0] // 2), dtype=torch.float32)
    assert (weights.sharded_bytes, weights.total_sharded_bytes) == (tensor.numel() * 2, tensor.numel() * 4)


def test_architectures_without_a_row_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["NopeForCausalLM"], "model_type": "nope"})
    )
    with pytest.raises(UnsupportedModel, match="NopeForCausalLM"):
        load_executor(folder)
