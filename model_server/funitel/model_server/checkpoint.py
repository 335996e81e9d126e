"""Is a checkpoint on disk whole? Cheap checks of headers and sizes, before anything heavy starts.

Knows the Hugging Face folder layout and the safetensors container, not what the tensors mean.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from funitel.model_server.progress import Progress
from funitel.proto.errors import WeightsError

_CHUNK_BYTES = 1 << 22
_LENGTH_BYTES = 8


def check_folder(folder: Path) -> None:
    """Check that a folder holds a readable config.json and safetensors that are as long as their headers say.

    Raises: `WeightsError` naming the file.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise WeightsError(f"{folder} has no config.json")
    read_json(config)
    for path in _weight_files(folder):
        check_safetensors(path)


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
            header = json.loads(file.read(header_bytes))
        tensors = (entry for name, entry in header.items() if name != "__metadata__")
        expected_bytes = data_start + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise WeightsError(f"{path} is not a safetensors file: its header cannot be read") from error
    if size_bytes != expected_bytes:
        state = "truncated" if size_bytes < expected_bytes else "too long"
        raise WeightsError(f"{path} is {state}: its header says {expected_bytes} bytes, the file has {size_bytes}")


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


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightsError(f"{index} has no weight_map")
        paths = sorted({folder / str(name) for name in weight_map.values()})
        for path in paths:
            if not path.is_file():
                raise WeightsError(f"{folder} has no {path.name}, which {index.name} lists")
        return paths
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsError(f"{folder} has no weights (*.safetensors)")
    return paths


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
