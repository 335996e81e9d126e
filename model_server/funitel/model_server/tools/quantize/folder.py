"""Write the output folder atomically: everything is written beside the target and moved there whole.

Also writes safetensors one tensor at a time, so that a model never has to be in memory.
"""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

import torch

from funitel.model_server.convert.hf_folder import write_json
from funitel.model_server.files.atomic_folder import install
from funitel.proto.errors import SettingsError, StartupError

# What the format calls the types; the same names serve to plan a tensor and to write it.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_FILE_BYTES = 5_000_000_000
Plan = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def check_target(target: Path) -> None:
    """Refuse a target that holds something already. Raises: `SettingsError`."""
    if target.is_dir():
        if any(target.iterdir()):
            raise SettingsError(f"OUTPUT_DIR {target} exists and is not empty")
    elif target.exists() or target.is_symlink():
        raise SettingsError(f"OUTPUT_DIR {target} exists and is not a folder")


@contextmanager
def finished_folder(target: Path) -> Iterator[Path]:
    """Lend an empty folder that becomes `target` when the block ends well, and vanishes when it does not.

    Raises:
        SettingsError: the target holds something, or another process is writing it.
    """
    check_target(target)
    made = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.partial"
    try:
        with _locked(work, target):
            try:
                result = work / target.name
                result.mkdir()
                yield result
                check_target(target)
                install(result, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    finally:
        for parent in made:  # those still empty: nothing came of it
            try:
                parent.rmdir()
            except OSError:
                break


@contextmanager
def _locked(work: Path, target: Path) -> Iterator[None]:
    """Be the only process that works in `work`; what a killed one left there is swept away."""
    work.mkdir(exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(f"OUTPUT_DIR {target} is being written by another process") from error
        if not work.exists() or os.stat(work).st_ino != os.fstat(lock).st_ino:
            raise SettingsError(f"OUTPUT_DIR {target} was being written by another process just now: try again")
        for left in work.iterdir():
            shutil.rmtree(left)
        yield
    finally:
        os.close(lock)


def check_space(folder: Path, plan: Plan) -> None:
    """Refuse to begin what the disk cannot hold. Raises: `StartupError`."""
    needed, free = sum(map(_num_bytes, plan.values())), shutil.disk_usage(folder).free
    if needed > free:
        raise StartupError(f"the quantised model takes {needed / 1e6:.0f} MB, the disk has {free / 1e6:.0f} MB left")


class SafetensorsWriter:
    """Write planned tensors in their order, to one file or, beyond `max_file_bytes`, to several with an index."""

    def __init__(self, folder: Path, plan: Plan, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder = folder
        self._plan = dict(plan)
        self._files = _split(self._plan, max_file_bytes)
        self._waiting = iter([(i, name) for i, names in enumerate(self._files) for name in names])
        self._open: tuple[int, BinaryIO] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._open is not None:
            self._open[1].close()
        if kind is None:
            assert next(self._waiting, None) is None, "every planned tensor is written"
            self._write_index()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor of the plan."""
        index, expected = next(self._waiting)
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, *self._plan[expected]), f"{name} as planned"
        if self._open is None or self._open[0] != index:
            if self._open is not None:
                self._open[1].close()
            self._open = (index, (self._folder / self._name(index)).open("wb"))
            self._open[1].write(self._header(index))
        self._open[1].write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _name(self, index: int) -> str:
        count = len(self._files)
        return "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"

    def _header(self, index: int) -> bytes:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self._files[index]:
            dtype, shape = self._plan[name]
            start, end = end, end + _num_bytes((dtype, shape))
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        return len(encoded).to_bytes(8, "little") + encoded

    def _write_index(self) -> None:
        if len(self._files) == 1:
            return
        index = {
            "metadata": {"total_size": sum(map(_num_bytes, self._plan.values()))},
            "weight_map": {name: self._name(i) for i, names in enumerate(self._files) for name in names},
        }
        write_json(self._folder / "model.safetensors.index.json", index)


def _split(plan: Plan, max_file_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, entry in plan.items():
        if files[-1] and size + _num_bytes(entry) > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += _num_bytes(entry)
    return files


def _num_bytes(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(entry[1]) * entry[0].itemsize
