"""Read a GGUF file: its metadata by key and its tensors by name, refusing a file that is cut short.

Knows nothing of architectures or tokenizers; `gguf_convert` and `gguf_tokenizer` do. Tensor data stays memory
mapped until `GgufFile.dequantise`.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFEndian, GGUFReader, ReaderTensor, dequantize

from funitel.proto.errors import UnsupportedModel, WeightsError

_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One opened GGUF. Accessors raise `WeightsError` when a value is missing or of the wrong kind."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        """The architecture's name, the prefix of its metadata keys."""
        return self.text("general.architecture")

    def key(self, name: str) -> str:
        """Return the full key of an architecture's own setting."""
        return f"{self.architecture}.{name}"

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number, or `default` when the key is absent and a default is given."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float as the shortest decimal that its 32 bits stand for: 1e-05, not 9.99999974e-06."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float):
            raise self._wrong(key, "number")
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, or `default` when the key is absent."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or `default` when the key is absent and a default is given."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "string")
        return value

    def items(self, key: str) -> list[Any]:
        """Return an array."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "array")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, outermost dimension first (the file stores it innermost first)."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def dequantise(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor's exact float32 values, in `shape(name)`."""
        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            message = f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which cannot be read"
            raise UnsupportedModel(message) from error
        return np.asarray(values, dtype=np.float32).reshape(self.shape(name))

    def _wrong(self, key: str, kind: str) -> WeightsError:
        state = f"is not a {kind}" if key in self.metadata else "is missing"
        return WeightsError(f"{self.path}: metadata {key} {state}")


def check_magic(path: Path) -> None:
    """Check that a file calls itself a GGUF. Raises: `WeightsError`."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    if magic != _MAGIC:
        raise WeightsError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and check that it is as long as its own index says.

    Raises: `WeightsError` for a file that is no GGUF, damaged or truncated; `UnsupportedModel` if big-endian.
    """
    check_magic(path)
    try:
        reader = _BoundedReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise WeightsError(f"{path} is a damaged GGUF file: {error}") from error
    if reader.endianess is not GGUFEndian.LITTLE:
        raise UnsupportedModel(f"{path}: big-endian GGUF files cannot be read")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


class _BoundedReader(GGUFReader):
    """The library's reader takes a short read for an empty value; this one stops at the end of the file."""

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.nbytes:
            part = "tensor data" if hasattr(self, "data_offset") else "header"
            raise ValueError(f"truncated, its {part} reaches byte {end} but the file has {self.data.nbytes}")
        return super()._get(offset, dtype, count, override_order)
