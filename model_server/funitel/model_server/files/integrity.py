"""Check the integrity of a checkpoint on disk by headers and sizes, before anything heavy starts.

Knows the Hugging Face folder layout, the safetensors container and the zip that PyTorch writes, not what the tensors
mean. No torch here.
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

from funitel.model_server.files.gguf_pointer import POINTER, check_pointer
from funitel.model_server.files.progress import Progress
from funitel.proto.errors import WeightsError

MAX_JSON_BYTES = 1 << 26
"""Longest JSON file of a checkpoint folder; the index of a model of thousands of tensors has one hundredth."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file; the format's own limit."""
GGUF_MAGIC = b"GGUF"
LLAMA2C_TOKENIZER = "tokenizer.bin"  # lies beside a model of llama2.c
_CHUNK_BYTES = 1 << 22
_LENGTH_BYTES = 8
_SAFETENSORS_INDEX = "model.safetensors.index.json"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLES = ("pytorch_model.bin", "*.bin", "*.pt", "*.pth")  # the first that is there counts
_NO_WEIGHTS = re.compile(r"arg(ument)?s|training|optimizer|scheduler|rng_state")  # in names of pickles
_ENCRYPTED = 0x01 | 0x20 | 0x40  # flags of a record in a zip; the second: it is a patch to another


def check_folder(folder: Path) -> None:
    """Check that a folder holds a readable config.json and weights that are as long as their headers say.

    Raises: `WeightsError` naming the file.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise WeightsError(f"{folder} has no config.json")
    read_json(config)
    for path in weight_files(folder):
        if not path.is_file():  # a pipe would be waited for
            raise WeightsError(f"{path} is not a file")
        if path.name == POINTER:
            check_pointer(path)
        else:
            check_safetensors(path) if path.suffix == ".safetensors" else check_pickle(path)


def weight_files(folder: Path) -> list[Path]:
    """The files with a checkpoint's weights: safetensors if there are any, else the pointer to a GGUF, else PyTorch's.

    Raises: `WeightsError`: there are none, or the index names one that is not there.
    """
    if (folder / _SAFETENSORS_INDEX).is_file():
        return _listed(folder / _SAFETENSORS_INDEX)
    if paths := sorted(folder.glob("*.safetensors")):
        return paths
    if (folder / POINTER).is_file():
        return [folder / POINTER]
    if (folder / _PICKLE_INDEX).is_file():
        return _listed(folder / _PICKLE_INDEX)
    for pattern in _PICKLES:
        if paths := sorted(path for path in folder.glob(pattern) if not _NO_WEIGHTS.search(path.name)):
            return paths
    raise WeightsError(f"{folder} has no weights (*.safetensors, *.bin, *.pt or *.pth)")


def _listed(index: Path) -> list[Path]:
    """The files that an index names; all of them lie beside it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightsError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    if strange := [name for name in names if name != Path(name).name]:
        raise WeightsError(f"{index} names a file that is not beside it: {strange[0]}")
    for name in names:
        if not (index.parent / name).is_file():
            raise WeightsError(f"{index.parent} has no {name}, which {index.name} lists")
    return [index.parent / name for name in names]


def file_format(path: Path) -> str:
    """What a model that is one file is: gguf, or llama2c where its name ends in `.bin`.

    Raises: `WeightsError`: neither, or not readable.
    """
    if not path.is_file():  # a pipe would be waited for
        raise WeightsError(f"{path} is not a file")
    try:
        with path.open("rb") as file:
            start = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    if start == GGUF_MAGIC:
        return "gguf"
    if path.suffix == ".bin":
        return "llama2c"
    raise WeightsError(f"{path} is not a GGUF file: it starts with {start!r}, not {GGUF_MAGIC!r}")


def check_safetensors(path: Path) -> None:
    """Check a safetensors file's length against its header. Raises: `WeightsError`."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            data_start = _LENGTH_BYTES + header_bytes
            if size_bytes < max(data_start, _LENGTH_BYTES):
                message = f"{path} is truncated: its header reaches byte {data_start}, the file has {size_bytes}"
                raise WeightsError(message)
            if header_bytes > MAX_HEADER_BYTES:
                raise WeightsError(f"{path} has a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are read")
            header = json.loads(file.read(header_bytes))
        tensors = (entry for name, entry in header.items() if name != "__metadata__")
        expected_bytes = data_start + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise WeightsError(f"{path} is not a safetensors file: its header cannot be read") from error
    if size_bytes != expected_bytes:
        state = "truncated" if size_bytes < expected_bytes else "too long"
        raise WeightsError(f"{path} is {state}: its header says {expected_bytes} bytes, the file has {size_bytes}")


def check_pickle(path: Path) -> None:
    """Check that a file of PyTorch's, where it is a zip, is a whole one of records as torch writes them.

    Raises: `WeightsError`.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if not is_zip:
            return  # older, or something else: only reading tells
        with zipfile.ZipFile(path) as archive:
            strange = [info.filename for info in archive.infolist() if not _is_plain(info)]
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise WeightsError(f"{path} is truncated or damaged: {error}") from error
    if strange:
        raise WeightsError(f"{path} is not one of PyTorch's files: its record {strange[0]} is compressed or encrypted")


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Whether a record of a zip holds its bytes as they are."""
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED


def hash_file(path: Path) -> str:
    """Return a file's SHA-256 in hex, with progress on stderr. Raises: `WeightsError` if unreadable."""
    try:
        progress = Progress(f"hashing {path.name}", path.stat().st_size)
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                progress.advance(len(chunk))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    progress.finish()
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint folder.

    Raises:
        WeightsError: the file is missing or no JSON object.
    """
    try:
        if (size_bytes := path.stat().st_size) > MAX_JSON_BYTES:
            raise WeightsError(f"{path} has {size_bytes} bytes, at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path.parent} holds no {path.name}") from error
    except PermissionError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}: let this user read it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return value
