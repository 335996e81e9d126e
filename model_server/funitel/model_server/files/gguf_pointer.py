"""The pointer of a folder to the GGUF that holds its weights: where the file is, and where in it each tensor lies.

`convert.gguf` writes it, `checkpoint.gguf_file` reads tensors by it. A fingerprint of the header and of samples tells
another file of the same size from the one that the folder was made of. No torch here.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from funitel.proto.errors import WeightsError

POINTER = "model.gguf.json"
"""In a folder that was made of a GGUF; weights in another format beside it count instead of it."""
_NUM_SAMPLES, _SAMPLE_BYTES = 32, 1 << 16
_MAX_POINTER_BYTES = 1 << 26
HALVES, GROUPED = "halves", "grouped"


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One file of a GGUF: its path, absolute or relative to the folder, its bytes, those before its tensors' data."""

    file: str
    num_bytes: int
    header_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """One tensor of the checkpoint in the file, or with `{j}` in its name one matrix for each of a stack's.

    `shape` and `offset` (bytes from the start of file number `part`) are the whole tensor's, outermost dimension first,
    as the file has it. `order` says how its rows lie there: `HALVES`, each of `num_heads` heads for a rotary embedding
    of neighbours; `GROUPED`, all queries, all keys, all values of `num_heads` key heads of `head_dim`; or nothing.
    `is_turned`: the checkpoint has it the other way round. `minus` is subtracted from the values.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    part: int = 0
    order: str = ""
    num_heads: int = 0
    head_dim: int = 0
    is_turned: bool = False
    minus: float = 0.0


@dataclass(frozen=True, slots=True)
class GgufPointer:
    """What a pointer says; `tensors` by their names in the checkpoint."""

    parts: tuple[GgufPart, ...]
    tensors: Mapping[str, GgufEntry]


def write_pointer(folder: Path, pointer: GgufPointer) -> None:
    """Write the pointer of a folder."""
    defaults = asdict(GgufEntry("", "", (), 0))
    tensors = {
        name: {key: value for key, value in asdict(entry).items() if key not in defaults or value != defaults[key]}
        for name, entry in pointer.tensors.items()
    }
    content = {"parts": [asdict(part) for part in pointer.parts], "tensors": tensors}
    (folder / POINTER).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_pointer(path: Path) -> GgufPointer:
    """Read a pointer. Raises: `WeightsError`: it is none."""
    try:
        if path.stat().st_size > _MAX_POINTER_BYTES:
            raise WeightsError(f"{path} has {path.stat().st_size} bytes, at most {_MAX_POINTER_BYTES} are read")
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        parts = tuple(_part(each) for each in content["parts"])
        tensors = {str(name): _entry(each, parts) for name, each in content["tensors"].items()}
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        message = f"{path} is no pointer to a GGUF ({error}): delete {path.parent} and name the GGUF as --model-id"
        raise WeightsError(message) from error
    return GgufPointer(parts, tensors)


def _part(given: Mapping[str, Any]) -> GgufPart:
    return GgufPart(str(given["file"]), int(given["num_bytes"]), int(given["header_bytes"]), str(given["fingerprint"]))


def _entry(given: Mapping[str, Any], parts: tuple[GgufPart, ...]) -> GgufEntry:
    shape = tuple(map(int, given["shape"]))
    entry = GgufEntry(**{**given, "shape": shape})
    if not shape or min(shape) < 1 or not 0 <= entry.part < len(parts) or entry.offset < 0:
        raise ValueError(f"tensor {entry.name}")
    if entry.order and entry.num_heads < 1 or entry.order not in ("", HALVES, GROUPED):
        raise ValueError(f"order of tensor {entry.name}")
    return entry


def part_paths(pointer_path: Path, pointer: GgufPointer) -> list[Path]:
    """The files that a pointer names."""
    return [pointer_path.parent / part.file for part in pointer.parts]


def fingerprint(path: Path, header_bytes: int) -> str:
    """A digest of a file's size, of its first bytes and of samples of the others. Raises: `OSError`."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(f"{num_bytes} ".encode())
        digest.update(file.read(header_bytes))
        step = max(_SAMPLE_BYTES, math.ceil((num_bytes - header_bytes) / _NUM_SAMPLES))
        for at in range(header_bytes, num_bytes, step):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def part_of(folder: Path, path: Path, header_bytes: int) -> GgufPart:
    """Describe a file as it is now for the pointer of a folder. Raises: `WeightsError`: it cannot be read."""
    name = path.name if path.parent == folder else str(path.absolute())
    try:
        return GgufPart(name, path.stat().st_size, header_bytes, fingerprint(path, header_bytes))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error


def check_pointer(path: Path) -> GgufPointer:
    """Read a pointer and compare its files with what they were. Raises: `WeightsError` naming the file."""
    pointer = read_pointer(path)
    for part, file in zip(pointer.parts, part_paths(path, pointer), strict=True):
        try:
            if not file.is_file():
                raise WeightsError(f"{file} is gone, of which {path.parent} was made: name the GGUF as --model-id")
            found = file.stat().st_size
            if found != part.num_bytes:
                was = f"it has {found} bytes, it had {part.num_bytes}"
            elif fingerprint(file, part.header_bytes) != part.fingerprint:
                was = "its bytes are others"
            else:
                continue
        except OSError as error:
            raise WeightsError(f"cannot read {file}: {error.strerror}") from error
        raise WeightsError(
            f"{file} was changed since {path.parent} was made of it ({was}): name it as --model-id again"
        )
    return pointer
