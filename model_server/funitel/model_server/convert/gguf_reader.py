"""Read a GGUF file: its metadata by key and its tensors by name, refusing one that is cut short or contradicts itself.

Every length is held against the end of the file and against a bound before anything is made of it. Knows nothing of
architectures or tokenizers; `gguf` and `gguf_tokenizer` do. A model that is split over files is read from all of them.
Tensor data stays memory mapped until `GgufFile.dequantise`.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from funitel.model_server.files.integrity import GGUF_MAGIC, file_format
from funitel.proto.errors import UnsupportedModel, WeightsError

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 24  # of an array: many times the largest vocabulary
MAX_NAME_BYTES = 1 << 10
MAX_DIMENSIONS = 4
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # where the file names none
_SPLIT_COUNT = "split.count"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_KINDS = {kind.value: kind for kind in GGML_QUANT_SIZES}
_NUMBERS = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2", GGMLQuantizationType.F64: "<f8"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: its type and shape, outermost dimension first, and its data in the file.

    `data` is numbers in `shape` for floating-point types that numpy has, else bytes: [..., bytes of a row].
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    data: npt.NDArray[Any]
    part: int = 0  # the number of its file


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One opened GGUF. Accessors raise `WeightsError` when a value is missing or of the wrong kind."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    parts: tuple[tuple[Path, int], ...]
    """Its files, each with the bytes before the tensors' data."""

    @property
    def architecture(self) -> str:
        """The architecture's name, the prefix of its metadata keys."""
        return self.text("general.architecture")

    def key(self, name: str) -> str:
        """Return the full key of an architecture's own setting."""
        return f"{self.architecture}.{name}"

    def has(self, key: str) -> bool:
        """Whether the file says anything under this key."""
        return key in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number, or `default` when the key is absent and a default is given."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float as the shortest decimal that its 32 bits stand for: 1e-05, not 9.99999974e-06."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or not abs(value) <= np.finfo(np.float32).max:
            raise self._wrong(key, "finite number")
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

    def items(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Return an array of items of one kind."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(key, "array of the right kind")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, outermost dimension first (the file stores it innermost first)."""
        return self.tensors[name].shape

    def dequantise(self, name: str, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return the exact float32 values of a tensor, or of some rows of a matrix."""
        self.check_kind(name)
        tensor = self.tensors[name]
        data = tensor.data[rows]
        shape = tensor.shape if len(tensor.shape) == 1 else (len(data), *tensor.shape[1:])
        with np.errstate(all="ignore"):  # scales that are no numbers
            values = data if tensor.kind in _NUMBERS else dequantize(data, tensor.kind)
        return np.asarray(values, dtype=np.float32).reshape(shape)

    def check_kind(self, name: str) -> None:
        """Raise UnsupportedModel where the library cannot read a tensor's type."""
        kind = self.tensors[name].kind
        if not _is_readable(kind):
            raise UnsupportedModel(f"{self.path}: tensor {name} has type {kind.name}, which cannot be read")

    def _wrong(self, key: str, kind: str) -> WeightsError:
        state = f"is not a {kind}" if key in self.metadata else "is missing"
        return WeightsError(f"{self.path}: metadata {key} {state}")


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and check that its index fits its size and itself.

    Raises: `WeightsError` for a file that is no GGUF, damaged or truncated; `UnsupportedModel` if big-endian.
    """
    first = read_part(path)
    count = first.metadata.get(_SPLIT_COUNT, 1)
    if count in (0, 1):
        return first
    tensors: dict[str, StoredTensor] = {}
    files = [read_part(each) for each in _split_paths(path, count)]
    for number, file in enumerate(files):
        if file.metadata.get("split.no") != number or file.metadata.get(_SPLIT_COUNT) != count:
            raise WeightsError(f"{file.path} is not part {number + 1} of {count}, as its name says")
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise WeightsError(f"{file.path}: tensor {name} is in two parts")
            tensors[name] = replace(tensor, part=number)
    return GgufFile(files[0].path, files[0].metadata, tensors, tuple(each for file in files for each in file.parts))


def _split_paths(path: Path, count: object) -> list[Path]:
    """The files of a model that is split, by the name of one of them. Raises: `WeightsError`: one is not there."""
    found = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", path.name)
    if not isinstance(count, int) or found is None or int(found[2]) != count:
        raise WeightsError(f"{path} is one of {count} parts: their names must end in -00001-of-{count:05}.gguf, ...")
    paths = [path.with_name(f"{found[1]}-{number:05}-of-{found[2]}.gguf") for number in range(1, count + 1)]
    if missing := [each for each in paths if not each.is_file()]:
        raise WeightsError(f"{path} is one of {count} parts, and {missing[0].name} is not beside it")
    return paths


def read_part(path: Path) -> GgufFile:
    """Open one file of a GGUF. Raises: as `read_gguf`."""
    if file_format(path) != "gguf":
        raise WeightsError(f"{path} is not a GGUF file")
    try:
        return _read(path)
    except (ValueError, struct.error, OSError) as error:
        raise WeightsError(f"{path} is a damaged GGUF file: {error}") from error


@cache
def _is_readable(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return kind in _NUMBERS
    return True


def _read(path: Path) -> GgufFile:
    header = _Header(np.memmap(path, dtype=np.uint8, mode="r"))
    version = header.integer("<I")
    if version & 0xFFFF == 0:
        raise UnsupportedModel(f"{path}: big-endian GGUF files cannot be read")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, versions {_VERSIONS[0]} and {_VERSIONS[1]} can be read")
    num_tensors, num_keys = header.integer("<Q"), header.integer("<Q")
    _within("tensors", num_tensors, MAX_TENSORS)
    _within("metadata keys", num_keys, MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = header.name()
        if key in metadata:
            raise ValueError(f"metadata {key} is there twice")
        metadata[key] = header.value(key, header.integer("<I"))
    infos: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = header.name()
        if name in infos:
            raise ValueError(f"tensor {name} is there twice")
        infos[name] = header.tensor(name)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, given {alignment!r}")
    start = -(-header.at // alignment) * alignment
    tensors = {name: _tensor(header.data, name, start, alignment, *info) for name, info in infos.items()}
    _check_apart(tensors)
    return GgufFile(path, metadata, tensors, ((path, start),))


class _Header:
    """The part of the file before the tensor data, read from its start."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data
        self.at = len(GGUF_MAGIC)

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        end = self.at + num_bytes
        _check_end("header", end, self.data)
        taken = self.data[self.at : end].tobytes()
        self.at = end
        return taken

    def integer(self, form: str) -> int:
        """A whole number by its struct format."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def name(self) -> str:
        """A key or a tensor's name."""
        num_bytes = self.integer("<Q")
        _check_end("header", self.at + num_bytes, self.data)
        _within("bytes of a name", num_bytes, MAX_NAME_BYTES)
        return self.take(num_bytes).decode()

    def value(self, key: str, kind: int) -> Any:
        """A value of metadata."""
        if kind == _STRING:
            return self.take(self.integer("<Q")).decode()
        if kind == _ARRAY:
            kind, count = self.integer("<I"), self.integer("<Q")
            _within(f"items of metadata {key}", count, MAX_ITEMS)
            if kind == _STRING:
                return [self.take(self.integer("<Q")).decode() for _ in range(count)]
            return self._scalars(key, kind, count)
        return self._scalars(key, kind, 1)[0]

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"metadata {key} is of type {kind}, which cannot be read")
        form = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(form.itemsize * count), form)
        return list((values != 0).tolist() if kind == _BOOL else values.tolist())

    def tensor(self, name: str) -> tuple[GGMLQuantizationType, tuple[int, ...], int]:
        """Type, shape and offset of a tensor, without its name."""
        num_dims = self.integer("<I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions, must have 1..{MAX_DIMENSIONS}")
        shape = tuple(self.integer("<Q") for _ in range(num_dims))[::-1]
        if min(shape) < 1:
            raise ValueError(f"tensor {name} has shape {list(shape)}, sizes must be at least 1")
        kind = self.integer("<I")
        if kind not in _KINDS:
            raise ValueError(f"tensor {name} is of type {kind}, which is none of GGUF's")
        return _KINDS[kind], shape, self.integer("<Q")


def _tensor(
    data: npt.NDArray[np.uint8],
    name: str,
    start: int,
    alignment: int,
    kind: GGMLQuantizationType,
    shape: tuple[int, ...],
    offset: int,
) -> StoredTensor:
    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_items:
        raise ValueError(f"tensor {name} has rows of {shape[-1]}, not a multiple of {kind.name}'s {block_items}")
    if offset % alignment:
        raise ValueError(f"tensor {name} is at offset {offset}, not a multiple of {alignment}")
    rows = (*shape[:-1], shape[-1] // block_items * block_bytes)
    first = start + offset
    _check_end("tensor data", first + math.prod(rows), data)
    part = data[first : first + math.prod(rows)]
    if kind in _NUMBERS:
        return StoredTensor(kind, shape, first, part.view(_NUMBERS[kind]).reshape(shape))
    return StoredTensor(kind, shape, first, part.reshape(rows))


def _check_apart(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that share bytes."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ValueError(f"tensor {name} overlaps tensor {before}")
        end, before = tensor.offset + tensor.data.nbytes, name


def _check_end(part: str, end: int, data: npt.NDArray[np.uint8]) -> None:
    if end > data.nbytes:
        raise ValueError(f"truncated, its {part} reaches byte {end} but the file has {data.nbytes}")


def _within(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{count} {what}, at most {most} are read")
