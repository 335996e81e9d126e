"""Write a Hugging Face folder from a file of another format: JSON, and safetensors that are never whole in memory."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from funitel.model_server.files.progress import Progress


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor to be written; `read` gives its values, in parts along its first dimension, when their turn has come.

    `dtype` is safetensors' name of the type of the values.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int
    read: Callable[[], Iterable[npt.NDArray[Any]]]


def write_json(path: Path, value: object) -> None:
    """Write JSON for people to read as well."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str], label: str) -> None:
    """Stream the tensors out, so that no more than a part of one is in memory at a time."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    progress = Progress(label, end)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            for part in tensor.read():
                file.write(np.ascontiguousarray(part).data)
                progress.advance(part.nbytes)
    progress.finish()
