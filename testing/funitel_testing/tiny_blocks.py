"""Tiny models as folders that point to blocks, without the metadata of a GGUF."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from funitel.model_server.checkpoint.gguf_file import GgufTensorFile
from funitel.model_server.files.gguf_pointer import POINTER, GgufEntry, GgufPointer, part_of, write_pointer
from funitel.model_server.quantized.block_types import BlockType
from funitel_testing.block_oracle import random_blocks

# As tiny as blocks allow: two ranks split heads and units at whole blocks.
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
}
GPT2_SIZES = {"n_embd": 96, "n_inner": 160, "n_head": 6}


def add_blocks(folder: Path, type_of: Callable[[str], str | None]) -> Path:
    """Make blocks of the matrices for which `type_of` has the name of a type, in place of its safetensors.

    Returns `folder`.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    is_transposed = json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    entries, content = {}, b"GGUF".ljust(32)
    for seed, (name, weight) in enumerate(tensors.items()):
        kind = type_of(name) if weight.dim() == 2 else None
        turns = is_transposed and ".c_" in name and weight.dim() == 2
        rows = np.ascontiguousarray((weight.t() if turns else weight).numpy())
        if kind is None or BlockType[kind].cuts((0, rows.shape[-1])):
            kind, data = "F32", rows
        else:
            data = quantised(kind, rows, seed)
        entries[name] = GgufEntry(name, kind, rows.shape, len(content), is_turned=turns)
        content += data.tobytes().ljust(-(-data.nbytes // 32) * 32)
    (folder / "blocks.gguf").write_bytes(content)
    write_pointer(folder, GgufPointer((part_of(folder, folder / "blocks.gguf", 32),), entries))
    return folder


def quantised(kind: str, values: npt.NDArray[np.float32], seed: int = 0) -> npt.NDArray[np.uint8]:
    """Blocks [outputs, bytes] of values [outputs, inputs]; drawn at random for a type the library only reads."""
    try:
        return np.asarray(gguf.quantize(values, GGMLQuantizationType[kind])).view(np.uint8)
    except NotImplementedError:
        return random_blocks(kind, values.shape, seed, float(np.abs(values).mean()) / 64)


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 values of a folder that points to a GGUF, by their names in the checkpoint."""
    file = GgufTensorFile(folder / POINTER)
    return {name: file.get_tensor(name).float() for name in file.keys()}
