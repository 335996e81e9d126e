"""Random Medusa heads for a tiny Llama, as their checkpoints are."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZE, VOCAB = 48, 288


def save_medusa(
    folder: Path, num_heads: int = 3, num_blocks: int = 1, *, has_out: bool = True
) -> dict[str, torch.Tensor]:
    """Write heads to a folder; their tensors."""
    torch.manual_seed(4)
    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(SIZE, SIZE) * 0.3
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(SIZE) * 0.3
        if has_out:
            tensors[f"{head}.{num_blocks}.weight"] = torch.randn(VOCAB, SIZE)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks, "base_model_name_or_path": "org/base"}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
