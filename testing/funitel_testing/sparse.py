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


_KEPT = {(): (2, 3), (0,): (0, 2), (1,): (1, 2), (2,): (2, 3), (3,): (2, 3)}  # of fours with fewer than two values


def marlin_24(codes: torch.Tensor, scales: torch.Tensor, stem: str, *, bits: int) -> Tensors:
    """`marlin-24` of codes [outputs, inputs], half of their range where a weight is zero, and scales [outputs, groups].

    One integer at a time, from the description of a kernel's tiles and of CUTLASS' order of meta.
    """
    zero, per_word = 2 ** (bits - 1), 32 // bits
    num_outputs, num_inputs = codes.shape
    words = np.zeros((num_inputs // 32, num_outputs * bits // 2), dtype=np.uint32)
    meta = np.zeros(num_outputs * num_inputs // 16, dtype=np.uint16)
    for o, line in enumerate(codes.tolist()):
        for four in range(num_inputs // 4):
            some = line[4 * four : 4 * four + 4]
            found = tuple(i for i, code in enumerate(some) if code != zero)
            kept = found if len(found) == 2 else _KEPT[found]
            place = _meta_place(o, four // 4, num_outputs)
            meta[place] |= (kept[0] | kept[1] << 2) << 4 * (four % 4)
            for i in (0, 1):
                row, place = _tile_place(2 * four + i, o, bits)
                words[row, place // per_word] |= np.uint32(some[kept[i]] << bits * (place % per_word))
    by_group = scales.t().contiguous()
    if scales.shape[1] > 1 and 128 < num_inputs // 2:
        order = [8 * i + j for i in range(num_outputs // 8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
        by_group = by_group[:, order].contiguous()
    return {
        f"{stem}.weight_packed": torch.from_numpy(words.view(np.int32)),
        f"{stem}.scale_packed": by_group,
        f"{stem}.meta": torch.from_numpy(meta.view(np.int16)).reshape(num_inputs // 32, 2 * num_outputs),
    }


def _tile_place(k: int, o: int, bits: int) -> tuple[int, int]:
    """Row of tiles, and place among its codes, of the code k of those that are stored of an output."""
    row, k = divmod(k, 16)
    tile, n = divmod(o, 64)
    thread = n // 16 * 8 + n % 16 // 8 * 4 + k % 8 // 2
    place = thread * 32 + n % 4 * 8 + n % 8 // 4 * 4 + k // 8 * 2 + k % 2
    interleave = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
    size = len(interleave)
    return row, tile * 1024 + place // size * size + interleave.index(place % size)


def _meta_place(row: int, column: int, num_rows: int) -> int:
    to = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 32 % 4 // 2 * 32 + row % 64 // 8 * 4
    if to % 2 == 0 and column % 2 == 1:
        to, column = to + 1, column - 1
    elif to % 2 == 1 and column % 2 == 0:
        to, column = to - 1, column + 1
    return column // 2 * num_rows * 2 + to * 2 + column % 2
