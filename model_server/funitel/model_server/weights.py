"""A checkpoint's tensors by name, sliced per rank; strict about missing, unexpected and misshapen ones.

Reads safetensors, memory-mapped: no rank reads another rank's slices. `decoder` asks for every tensor it needs and
then calls `finish`, which refuses what nobody asked for.
"""

import json
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from funitel.model_server.progress import Progress
from funitel.proto.errors import WeightsError

Range = tuple[int, int]


class Weights:
    """The tensors of one checkpoint folder, cast to `dtype` on `device` as they are read.

    Names are those of the causal-LM model; a checkpoint saved from the bare model, without `prefix`, is understood.

    `held_bytes` counts what this rank holds, `sharded_bytes` the part of it that is split between ranks, and
    `total_sharded_bytes` the same tensors unsplit.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self.dtype = dtype
        self.device = device
        self.held_bytes = 0
        self.sharded_bytes = 0
        self.total_sharded_bytes = 0
        self._files: dict[str, Any] = {}
        self._used: set[str] = set()
        for path in sorted(folder.glob("*.safetensors")):
            self._open(path)
        if not self._files:
            raise WeightsError(f"{folder} holds no *.safetensors weights")
        self.prefix = prefix if any(name.startswith(prefix) for name in self._files) else ""
        num_elements = sum(prod(f.get_slice(name).get_shape()) for name, f in self._files.items())
        self._progress = Progress("loading weights", num_elements * dtype.itemsize)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is not a whole safetensors file: {error}") from error
        for name in names:
            if name in self._files:
                raise WeightsError(f"tensor {name} is in two files of {path.parent}")
            self._files[name] = file

    def read(
        self, name: str, shape: Sequence[int], *, rows: Range | None = None, columns: Range | None = None
    ) -> torch.Tensor:
        """Read a tensor of the checkpoint, or the range of its rows or columns that is this rank's share.

        Args:
            name: name in the checkpoint, with prefix.
            shape: shape the whole tensor must have.
            rows: range of dimension 0; given (or `columns`), the tensor counts as split between ranks.
            columns: range of dimension 1.

        Raises:
            WeightsError: the tensor is missing or has another shape.
        """
        if name not in self._files:
            raise WeightsError(f"the checkpoint lacks tensor {name}")
        source = self._files[name].get_slice(name)
        found = tuple(source.get_shape())
        if found != tuple(shape):
            raise WeightsError(f"tensor {name} has shape {list(found)}, expected {list(shape)} from config.json")
        is_sharded = rows is not None or columns is not None
        self._count_whole(name, prod(shape), is_sharded)
        cut = source[slice(*(rows or (None, None)))] if columns is None else source[:, slice(*columns)]
        kept: torch.Tensor = cut.to(device=self.device, dtype=self.dtype, copy=True).contiguous()
        num_bytes = kept.numel() * kept.element_size()
        self.held_bytes += num_bytes
        self.sharded_bytes += num_bytes if is_sharded else 0
        return kept

    def count_copy(self, part: torch.Tensor, num_elements: int) -> None:
        """Note that a layer keeps a second copy of its part of a split tensor of `num_elements`."""
        num_bytes = part.numel() * part.element_size()
        self.held_bytes += num_bytes
        self.sharded_bytes += num_bytes
        self.total_sharded_bytes += num_elements * self.dtype.itemsize

    def _count_whole(self, name: str, num_elements: int, is_sharded: bool) -> None:
        if name in self._used:
            return
        self._used.add(name)
        num_bytes = num_elements * self.dtype.itemsize
        self.total_sharded_bytes += num_bytes if is_sharded else 0
        self._progress.advance(num_bytes)

    def finish(self, ignored: Sequence[str]) -> None:
        """Refuse tensors nobody asked for, except those matching a pattern of `ignored`, and close the files."""
        patterns = [re.compile(pattern) for pattern in ignored]
        extra = [n for n in self._files if n not in self._used and not any(p.search(n) for p in patterns)]
        self._progress.finish()
        self._files.clear()
        if extra:
            some = ", ".join(sorted(extra)[:3])
            raise WeightsError(f"the checkpoint holds {len(extra)} tensors the model does not know: {some}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint folder.

    Raises:
        WeightsError: the file is missing or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path.parent} holds no {path.name}") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return value
