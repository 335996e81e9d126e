"""Read one tensor of a checkpoint by rows and columns; quantised ones are in `quantized_storage`.

`Weights` keeps one storage for each tensor the model may ask for. A storage reads rows and columns of its own tensor
and knows neither ranks nor layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from funitel.model_server.checkpoint.gguf_file import GgufTensorFile
from funitel.model_server.checkpoint.torch_pickle import PickleFile
from funitel.model_server.files.gguf_pointer import POINTER
from funitel.proto.errors import WeightsError

Range = tuple[int, int]
Part = tuple[str, int, Range]  # checkpoint name, outputs of the whole layer, this rank's rows


def part_shape(shape: Sequence[int], rows: Range | None, columns: Range | None) -> list[int]:
    """The shape of a tensor's rows and columns within these ranges; None is all of them."""
    sizes = list(shape)
    for place, part in enumerate((rows, columns)):
        if part is not None:
            sizes[place] = part[1] - part[0]
    return sizes


class TensorSlice(Protocol):
    """A tensor in a file, of which parts can be read."""

    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: Any) -> torch.Tensor: ...


class TensorFile(Protocol):
    """An open file of tensors, with the face of safetensors' own."""

    def get_slice(self, name: str) -> TensorSlice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class RenamedTensor:
    """One tensor of a file, which has it by another name."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file = file
        self._name = name

    def get_slice(self, name: str) -> TensorSlice:
        """See TensorFile."""
        return self._file.get_slice(self._name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """See TensorFile."""
        return self._file.get_tensor(self._name)


Files = Mapping[str, TensorFile]  # by the names of the tensors


def open_file(path: Path) -> tuple[TensorFile, list[str]]:
    """Open a file of weights: safetensors, the pointer to a GGUF, or PyTorch's own; also the names of its tensors.

    Raises:
        WeightsError: it is not whole, or holds more than tensors.
    """
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    if path.name == POINTER:
        mapped = GgufTensorFile(path)
        return mapped, mapped.keys()
    pickled = PickleFile(path)
    return pickled, pickled.keys()


def open_safetensors(path: Path) -> tuple[Any, list[str]]:
    """Open a safetensors file; returns it and the names of its tensors. Raises: `WeightsError`: it is not whole."""
    try:
        file = safe_open(path, framework="pt")
        return file, list(file.keys())  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a whole safetensors file: {error}") from error


class Storage(ABC):
    """One tensor of the model. `shape` is the tensor's, `names` are the tensors of the files that make it up."""

    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def num_elements(self) -> int:
        """Values of everything that `names` stand for."""
        return prod(self.shape)

    @abstractmethod
    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Read a part (None: all of that dimension) into memory of its own."""


class PlainStorage(Storage):
    """A tensor that is stored as it is."""

    def __init__(self, files: Files, name: str) -> None:
        self.names = (name,)
        self._slice = files[name].get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        if not self.shape:  # a number, which has no rows
            part = self._slice[...]
        else:
            part = self._slice[slice(*(rows or (None, None)))] if columns is None else cut(self._slice, rows, columns)
        kept: torch.Tensor = part.to(device=device, dtype=dtype, copy=True).contiguous()
        return kept


class HollowStorage(Storage):
    """A tensor of which only the shape is known: what is read of it has no values."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.names = (name,)
        self.shape = tuple(shape)

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage; `device` is meta."""
        return torch.empty(part_shape(self.shape, rows, columns), dtype=dtype, device=device)


class StackedStorage(Storage):
    """One matrix of a stack [matrices, outputs, inputs], or with `num_dims` 1 one vector of [vectors, elements].

    Raises:
        WeightsError: the tensor is no stack, or has fewer matrices.
    """

    def __init__(self, files: Files, name: str, place: int, num_dims: int = 2) -> None:
        self.names = (name,)
        self._slice = files[name].get_slice(name)
        self._stack: tuple[int, ...] = tuple(self._slice.get_shape())
        if len(self._stack) != 1 + num_dims or place >= self._stack[0]:
            what = "matrix" if num_dims == 2 else "vector"
            raise WeightsError(f"tensor {name} has shape {list(self._stack)}, expected a stack with a {what} {place}")
        self._place = place
        self.shape = self._stack[1:]

    @property
    def num_elements(self) -> int:
        """See Storage."""
        return prod(self._stack)

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        parts = [slice(*(part or (None, None))) for part in (rows, columns)]
        cut = self._slice[slice(self._place, self._place + 1), *parts[: len(self.shape)]]
        kept: torch.Tensor = cut[0].to(device=device, dtype=dtype, copy=True).contiguous()
        return kept


def cut(source: Any, rows: Range | None, columns: Range) -> torch.Tensor:
    """Read some rows and columns of a matrix in a file; None is all rows."""
    part: torch.Tensor = source[slice(*(rows or (None, None))), slice(*columns)]
    return part
