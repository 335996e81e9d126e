"""The blocks of a GGUF for tiny models: as `gguf_convert` would leave them, without a GGUF."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from funitel.model_server.checkpoint.gguf_block_types import BLOCKS, BlockType, record_weights

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
    """Make blocks of the matrices for which `type_of` has the name of a type, and let the model be what they say.

    Returns `folder`.
    """
    path = folder / "model.safetensors"
    tensors, blocks, types = load_file(path), {}, {}
    is_transposed = json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
    for name, weight in tensors.items():
        kind = type_of(name) if weight.dim() == 2 else None
        turns = is_transposed and ".c_" in name
        rows = weight.t() if turns else weight
        if kind is None or BlockType[kind].cuts((0, rows.shape[1])):
            continue
        number = GGMLQuantizationType[kind]
        quantised = gguf.quantize(np.ascontiguousarray(rows.numpy()), number)
        values = torch.from_numpy(gguf.dequantize(quantised, number))
        tensors[name] = (values.t() if turns else values).contiguous()
        blocks[name] = torch.from_numpy(quantised)
        types[name] = kind
    save_file(tensors, path, {"format": "pt"})
    (folder / BLOCKS).parent.mkdir()
    save_file(blocks, folder / BLOCKS, types)
    record_weights(folder, path)
    return folder
