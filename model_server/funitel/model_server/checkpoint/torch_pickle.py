"""Read PyTorch's own checkpoint files (`*.bin`, `*.pt`, `*.pth`) without running the code in a pickle.

`torch.load` with `weights_only` rebuilds tensors and refuses every other global; here that refusal becomes one line
with the global's name. A zip, which torch has written since 1.6, is memory mapped; an older file is read into memory.
"""

import logging
import pickletools
import re
import warnings
import zipfile
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from funitel.model_server.files.integrity import check_pickle
from funitel.proto.errors import WeightsError, translating

logger = logging.getLogger(__name__)

WRAPPERS = ("state_dict", "model", "module")
"""Keys under which training scripts keep a model's tensors beside the rest of their state."""
_REFUSED = re.compile(r"GLOBAL (\S+)")
_REASON = re.compile(r"WeightsUnpickler error: (.*)")
# Modules of the globals in checkpoints.
_USUAL = ("collections", "torch", "torch._tensor", "torch._utils", "torch.nn.parameter", "torch.storage")
# Names of types as safetensors writes them.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class PickleFile:
    """The tensors of one file, as an open safetensors file hands them out.

    Raises:
        WeightsError: the file asks for more than tensors, or is not whole, or none of PyTorch's.
    """

    def __init__(self, path: Path) -> None:
        self._tensors = _state(path, _load(path))

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._tensors[name]

    def get_slice(self, name: str) -> "PickleSlice":
        """A tensor of which parts can be read."""
        return PickleSlice(self._tensors[name])


class PickleSlice:
    """One tensor, read by parts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its type by safetensors' name."""
        return _DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self._tensor[part]


def _load(path: Path) -> object:
    check_pickle(path)
    is_zip = zipfile.is_zipfile(path)
    if not is_zip:
        logger.info("%s is in PyTorch's format before 1.6, which is read into memory as a whole", path)
    # A damaged file makes the library raise nearly anything.
    with translating(partial(_refusal, path)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the age of the file's format
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _refusal(path: Path, error: Exception) -> WeightsError:
    """Why a file cannot be read, by what the library raised."""
    refused = _REFUSED.search(str(error))
    name = refused[1] if refused else _foreign_global(path)
    if name is not None:
        return WeightsError(f"{path} is refused: it asks for {name}, and a checkpoint may hold tensors only")
    told = _REASON.search(str(error))
    reason = told[1] if told else (str(error).splitlines() or [type(error).__name__])[0]
    return WeightsError(f"{path} cannot be read as a PyTorch checkpoint: {reason}")


def _foreign_global(path: Path) -> str | None:
    """The first global in the file's pickle that is no part of a checkpoint; None where that cannot be told.

    Reads opcodes and runs none: torch names only globals of the protocol that it writes itself.
    """
    try:
        with _pickle_of(path) as file:
            return next((".".join(each) for each in _globals(file) if each[0] not in _USUAL), None)
    except Exception:  # the file is refused already, and its damage may raise anything in zipfile and pickletools
        return None


def _pickle_of(path: Path) -> IO[bytes]:
    if not zipfile.is_zipfile(path):
        return path.open("rb")
    archive = zipfile.ZipFile(path)
    return archive.open(next((name for name in archive.namelist() if name.endswith("data.pkl")), "data.pkl"))


def _globals(file: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Globals a pickle asks for: module and name."""
    texts: deque[str] = deque(maxlen=2)
    for opcode, argument, _ in pickletools.genops(file):
        if isinstance(argument, str):
            texts.append(argument)
        if opcode.name in ("GLOBAL", "INST"):
            module, _, name = str(argument).partition(" ")
            yield module, name
        elif opcode.name == "STACK_GLOBAL":
            yield (texts[0], texts[1]) if len(texts) == 2 else ("", "a global without a name")


def _state(path: Path, found: object) -> dict[str, torch.Tensor]:
    """A model's tensors by name, taken out of what a training script may have put around them."""
    if isinstance(found, Mapping):
        inner = [found[key] for key in WRAPPERS if isinstance(found.get(key), Mapping)]
        found = inner[0] if inner else found
    if not isinstance(found, Mapping):
        raise WeightsError(f"{path} holds a {type(found).__name__}, not tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not _is_plain(tensor):
            raise WeightsError(f"{path}: {name!r} is a {_kind(tensor)}, not a plain tensor with a name")
    return dict(found)


def _is_plain(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.layout} {value.dtype} tensor on {value.device.type}"
    return type(value).__name__
