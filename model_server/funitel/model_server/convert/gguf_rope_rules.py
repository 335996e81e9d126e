"""Ways to read rotary positions off a GGUF's metadata and its tensors of factors."""

import math

import numpy as np

from funitel.model_server.convert.gguf_reader import GgufFile
from funitel.proto.errors import UnsupportedModel, WeightsError

FACTORS = ("rope_freqs.weight",)
"""Tensors that Llama 3's scaling is read from."""
LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that Phi-3's scaling is read from."""


def rope_theta(gguf: GgufFile) -> float:
    """Base of the rotary frequencies."""
    return gguf.number(gguf.key("rope.freq_base"), 10000.0)


def rope_scaling(gguf: GgufFile) -> dict[str, object] | None:
    """How the rotary positions of a longer context are made of those trained."""
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf)
    kind = gguf.text(gguf.key("rope.scaling.type"), "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{gguf.path}: rope scaling {kind} is not supported; supported: linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": gguf.number(gguf.key("rope.scaling.factor"))}
    if kind == "yarn":
        original = gguf.integer(gguf.key("rope.scaling.original_context_length"))
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(gguf: GgufFile) -> dict[str, object]:
    """Find Llama 3's scaling again: the file holds only its outcome, a divisor for each rotary frequency.

    Every published Llama 3 has these bounds; a file with divisors that they do not explain is refused.
    Source: `_compute_llama3_parameters` of transformers.
    """
    low, high, original = 1.0, 4.0, 8192
    divisors = gguf.dequantise("rope_freqs.weight")  # [head_dim / 2]
    factor = float(divisors.max())
    exponents = np.arange(len(divisors)) / len(divisors)
    turns = original / (2 * math.pi * rope_theta(gguf) ** exponents)  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedModel(f"{gguf.path}: the factors in rope_freqs.weight are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def longrope_scaling(gguf: GgufFile) -> dict[str, object] | None:
    """Phi-3's two lists of factors, where the file has them."""
    if not any(name in gguf.tensors for name in LONGROPE):
        return rope_scaling(gguf)
    if missing := [name for name in LONGROPE if name not in gguf.tensors]:
        raise WeightsError(f"{gguf.path}: tensor {missing[0]} is missing")
    short, long = (gguf.dequantise(name).tolist() for name in LONGROPE)
    return {"type": "longrope", "short_factor": short, "long_factor": long}
