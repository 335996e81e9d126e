"""Sparse tensors as compressed-tensors writes them, encoded in NumPy from its description, without code under test."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def pruned_24(weight: torch.Tensor) -> torch.Tensor:
    """The two largest of each four consecutive inputs, the others zero."""
    fours = weight.unflatten(1, (-1, 4))
    dropped = fours.abs().argsort(-1)[..., :2]
    return fours.scatter(-1, dropped, 0.0).flatten(1)


def sparse_24(dense: torch.Tensor, stem: str) -> Tensors:
    """`sparse-24-bitmask` of [outputs, inputs], of which two of each four inputs are zero at least."""
    words = dense.contiguous().view(_BYTES[dense.itemsize]).numpy()
    fours = words.reshape(len(words), -1, 4)
    places = np.sort(np.argsort(fours == 0, axis=-1, kind="stable")[..., :2], axis=-1)
    mask = np.zeros(fours.shape, dtype=bool)
    np.put_along_axis(mask, places, True, axis=-1)
    assert not fours[~mask].any()
    values = np.take_along_axis(fours, places, axis=-1).reshape(len(words), -1)
    return {
        f"{stem}.shape": torch.tensor(dense.shape).reshape(-1, 1),
        f"{stem}.compressed": torch.from_numpy(values).view(dense.dtype),
        f"{stem}.bitmask": torch.from_numpy(np.packbits(mask.reshape(words.shape), axis=-1, bitorder="little")),
    }


def sparse_rows(dense: torch.Tensor, stem: str) -> Tensors:
    """`sparse-bitmask`: all values but zeros, one row after the other."""
    words = dense.contiguous().view(_BYTES[dense.itemsize]).numpy()
    mask = words != 0
    counts = mask.sum(axis=-1)
    return {
        f"{stem}.shape": torch.tensor(dense.shape),
        f"{stem}.compressed": torch.from_numpy(words[mask]).view(dense.dtype),
        f"{stem}.bitmask": torch.from_numpy(np.packbits(mask, axis=-1, bitorder="little")),
        f"{stem}.row_offsets": torch.from_numpy(np.cumsum(counts) - counts).reshape(counts.shape),
    }


def sparsity(kind: str) -> Mapping[str, Any]:
    """`sparsity_config` of a format."""
    return {
        "format": kind,
        "global_sparsity": 0.5,
        "ignore": ["lm_head"],
        "sparsity_structure": "2:4" if "24" in kind else "unstructured",
        "targets": ["Linear"],
    }
