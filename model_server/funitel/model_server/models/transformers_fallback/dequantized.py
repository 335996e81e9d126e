"""The tensors of a quantised checkpoint as transformers reads floating-point ones, each when it is asked for.

The formats are those of the table's models (`checkpoint`). Quantisers of transformers, which need packages and kernels
of each format, take no part.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.checkpoint.float_storages import open_float8_stack
from funitel.model_server.checkpoint.mxfp4 import Mxfp4Storage
from funitel.model_server.checkpoint.open_storages import TGI_TENSORS, gptq_tensors, open_storages
from funitel.model_server.checkpoint.sparse_tensor import MASK, SparseTensor, dense_files
from funitel.model_server.checkpoint.storage import Files, PlainStorage, Range, Storage, TensorFile, open_file
from funitel.model_server.files.integrity import weight_files
from funitel.model_server.quantized.config import Quantization
from funitel.model_server.quantized.published import find_quantization
from funitel.proto.errors import StartupError

Matrix = Callable[[int], Storage]  # one of a stack

_CPU = torch.device("cpu")
_BLOCKS, _SCALES = "_blocks", "_scales"  # of a stack in MXFP4


class DequantizedCheckpoint:
    """Every tensor of a checkpoint folder by the name it would have unquantised.

    `tensors` are what transformers takes for slices of a file; `failure` is the first error of reading one, of which
    transformers itself says nothing.

    Raises:
        StartupError: quantised in a way that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.failure: StartupError | None = None
        files: dict[str, TensorFile] = {}
        for path in weight_files(folder):
            file, names = open_file(path)
            files |= dict.fromkeys(names, file)
        files = dense_files(files)
        quantization = find_quantization(folder) or gptq_tensors(files)
        self.tensors: dict[str, Any] = {}
        stacks = _stacks(files, quantization)
        parts = {name for _, names in stacks.values() for name in names}
        for name, storage in open_storages(files, quantization).items():
            if isinstance(storage, PlainStorage) and not isinstance(files[name], SparseTensor):
                if name not in parts and name not in TGI_TENSORS:
                    self.tensors[name] = files[name].get_slice(name)
            else:
                self.tensors[name] = _Lazy(self, storage.shape, storage.read)
        for name, (matrices, _) in stacks.items():
            self.tensors[name] = _Lazy(self, (len(matrices), *matrices[0].shape), _stacked(matrices))


def is_quantized(folder: Path) -> bool:
    """Whether a checkpoint holds tensors that transformers cannot read as they are. Raises: `StartupError`."""
    if find_quantization(folder) is not None:
        return True
    return any(
        name.endswith((_BLOCKS, MASK, ".qweight")) for path in weight_files(folder) for name in open_file(path)[1]
    )


Read = Callable[[Range | None, Range | None, torch.dtype, torch.device], torch.Tensor]


class _Lazy:
    """A tensor with the face of a slice of safetensors, dequantised to float32 when it is indexed."""

    def __init__(self, owner: DequantizedCheckpoint, shape: Sequence[int], read: Read) -> None:
        self._owner = owner
        self._shape = list(shape)
        self._read = read

    def get_shape(self) -> list[int]:
        """See TensorSlice."""
        return self._shape

    def get_dtype(self) -> str:
        """See TensorSlice."""
        return "F32"

    def __getitem__(self, part: Any) -> torch.Tensor:
        try:
            return self._part(part if isinstance(part, tuple) else (part,))
        except StartupError as error:
            self._owner.failure = self._owner.failure or error
            raise

    def _part(self, part: tuple[Any, ...]) -> torch.Tensor:
        """A rank's rows and columns of a matrix are read alone."""
        plain = [each for each in part if isinstance(each, slice) and each.step in (None, 1)]
        if len(self._shape) != 2 or len(plain) != len(part):
            return self._read(None, None, torch.float32, _CPU)[part]
        ranges = [each.indices(size)[:2] for each, size in zip(plain, self._shape, strict=False)]
        rows, columns = (*ranges, None)[:2] if len(ranges) == 1 else ranges
        return self._read(rows, columns, torch.float32, _CPU)


def _stacks(files: Files, quantization: Quantization | None) -> dict[str, tuple[list[Storage], tuple[str, ...]]]:
    """Stacks of experts: the matrices of each, and the tensors that make it up."""
    found: dict[str, tuple[list[Storage], tuple[str, ...]]] = {}
    for name in files:
        stem = name.removesuffix(_BLOCKS)
        shape = files[name].get_slice(name).get_shape()
        if stem != name and f"{stem}{_SCALES}" in files:
            matrices: list[Storage] = [_Transposed(Mxfp4Storage(files, stem, i)) for i in range(shape[0])]
            found[stem] = matrices, (name, f"{stem}{_SCALES}")
        elif len(shape) == 3 and shape[0] and (first := open_float8_stack(files, name, 0, quantization)) is not None:
            others = (open_float8_stack(files, name, i, quantization) for i in range(1, shape[0]))
            found[name] = [first, *(each for each in others if each is not None)], first.names
    return found


class _Transposed(Storage):
    """A matrix the other way round: gpt-oss has its experts [inputs, outputs], but where they are in MXFP4."""

    def __init__(self, storage: Storage) -> None:
        self.shape, self.names = storage.shape[::-1], storage.names
        self._storage = storage

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        return self._storage.read(columns, rows, dtype, device).t()


def _stacked(matrices: Sequence[Storage]) -> Read:
    def read(rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.stack([matrix.read(rows, columns, dtype, device) for matrix in matrices])

    return read
