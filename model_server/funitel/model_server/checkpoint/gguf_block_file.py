"""Read the GGUF blocks of a converted model as they lie in the file; see `gguf_block_types`."""

import logging
from math import prod
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.checkpoint.gguf_block_types import BLOCKS, BlockType, why_unusable
from funitel.model_server.checkpoint.storage import Range, open_safetensors
from funitel.proto.errors import WeightsError

logger = logging.getLogger(__name__)


class BlockFile:
    """The blocks of one converted model.

    Raises:
        WeightsError: the file is not whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, names = open_safetensors(path)
        self._types = {name: self._type(name) for name in names}

    def type_of(self, name: str, columns: Range | None = None) -> BlockType | None:
        """The type of a tensor's blocks; None for a tensor of another type, and where `columns` would cut a block."""
        kind = self._types.get(name)
        return None if kind is None or kind.cuts(columns) else kind

    def num_bytes(self, name: str) -> int:
        """Bytes of the blocks of a tensor that has a type."""
        return prod(self._file.get_slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, int], rows: Range | None, columns: Range | None) -> torch.Tensor:
        """Read outputs `rows` and inputs `columns` of a matrix of `shape`: [outputs, bytes] uint8.

        Raises:
            WeightsError: the tensor is of another shape.
        """
        kind = self._types[name]
        num_outputs, num_inputs = shape
        source: Any = self._file.get_slice(name)
        expected = [num_outputs, kind.row_bytes(num_inputs)]
        if kind.cuts((0, num_inputs)) or list(source.get_shape()) != expected:
            raise WeightsError(f"{self._path}: tensor {name} has shape {source.get_shape()}, expected {expected}")
        first, last = columns or (0, num_inputs)
        part: torch.Tensor = source[slice(*(rows or (None, None))), kind.row_bytes(first) : kind.row_bytes(last)]
        return part.contiguous()

    def _type(self, name: str) -> BlockType:
        found: str = (self._file.metadata() or {}).get(name, "none")
        if found not in BlockType.__members__:
            raise WeightsError(f"{self._path}: tensor {name} is of type {found}, which is none of GGUF's that are read")
        return BlockType[found]


def open_blocks(folder: Path) -> BlockFile | None:
    """The blocks of a folder; None where it has none, or where they stand for other weights, which is logged.

    Raises:
        WeightsError: the file is not whole.
    """
    if not (folder / BLOCKS).is_file():
        return None
    if (reason := why_unusable(folder)) is not None:
        logger.warning("%s is not used: %s", folder / BLOCKS, reason)
        return None
    return BlockFile(folder / BLOCKS)
