"""The model that faults are done to: tiny, random, and of answers that are as long as they are asked to be."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from funitel_testing.faults.asks import CONTEXT
from funitel_testing.tiny import save_tiny

END = 256  # the token that ends an answer
HEAD = "lm_head.weight"


def save_endless(folder: Path) -> Path:
    """Save the model; returns `folder`. The score of the last token is 0, of the others as many are above as below."""
    weights = save_tiny("llama", folder, max_position_embeddings=CONTEXT, eos_token_id=END) / "model.safetensors"
    tensors = load_file(weights)
    tensors[HEAD][END] = 0
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder
