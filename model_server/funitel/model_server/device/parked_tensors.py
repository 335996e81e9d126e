"""Tensors of a device, kept in the host's memory while a shard sleeps.

A tensor stays the same object: its storage is emptied on the device, and filled again later. So every view, closure and
layer finds its weights without being told, at other addresses. What is recorded with addresses must be dropped before.
"""

import gc
import logging
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from funitel.model_server.device.host_memory import available_memory
from funitel.model_server.device.memory import MEMORY_ERRORS, bytes_held, is_out_of_memory, release_memory
from funitel.model_server.device.pinned_memory import give_back, page_locked
from funitel.proto.errors import InvalidRequest, NotEnoughMemory, ResourceExhausted, WrongState

logger = logging.getLogger(__name__)

_ALIGNMENT = 256  # bytes: what torch's allocator gives every tensor on a GPU
_LEAVES = (str, bytes, int, float, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)


def tensors_of(root: object, device: torch.device) -> list[torch.Tensor]:
    """The tensors on a device that an object refers to, directly or through others; modules are not looked into."""
    seen = {id(vars(module)) for module in tuple(sys.modules.values()) if isinstance(module, types.ModuleType)}
    found: list[torch.Tensor] = []
    waiting: list[object] = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _LEAVES):
            continue
        seen.add(id(each))
        if issubclass(type(each), torch.Tensor):  # some proxies answer isinstance by what they stand for
            tensor = cast(torch.Tensor, each)
            found += [tensor] if _lies_on(tensor, device) else []
        if isinstance(each, types.FunctionType):  # its globals are a module's
            waiting += [each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)]
        else:
            waiting += gc.get_referents(each)
    return found


def _lies_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor has bytes of its own on a device, which can be given back."""
    if tensor.device != device or tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() > 0 and storage.resizable()


@dataclass(frozen=True, slots=True)
class _Place:
    """A storage, and where its bytes lie in the host's memory."""

    storage: torch.UntypedStorage
    begin: int
    num_bytes: int

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Its bytes as a tensor: [num_bytes] uint8."""
        whole = torch.empty(0, dtype=torch.uint8, device=device)
        whole.set_(self.storage, 0, torch.Size((self.num_bytes,)), (1,))
        return whole


class ParkedTensors:
    """The bytes of some tensors in the host's memory, each storage once; page-locked beside a GPU where it can be.

    Raises:
        ResourceExhausted: the host does not have the memory; nothing has changed.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._places: list[_Place] = []
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        end = 0
        for storage in storages.values():
            self._places.append(_Place(storage, end, storage.nbytes()))
            end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._memory, self._is_locked = _host_memory(end, device)
        for place in self._places:
            self._on_host(place).copy_(place.on_device(device), non_blocking=True)
        _wait(device)
        for place in self._places:
            place.storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, each storage once."""
        return sum(place.num_bytes for place in self._places)

    def restore(self) -> None:
        """Put the bytes back, and let go of the host's memory.

        Raises:
            ResourceExhausted: the device does not have the memory any more; nothing has changed.
        """
        try:
            for place in self._places:
                place.storage.resize_(place.num_bytes)
        except MEMORY_ERRORS as error:
            for place in self._places:
                place.storage.resize_(0)
            release_memory(self._device)
            if not is_out_of_memory(error):
                raise
            message = f"the weights need {self.num_bytes} bytes of {self._device}, which has fewer: the shard sleeps on"
            raise ResourceExhausted(message) from None
        for place in self._places:
            place.on_device(self._device).copy_(self._on_host(place), non_blocking=True)
        _wait(self._device)
        if self._is_locked:
            give_back(self._memory, self._device)
        self._places, self._memory = [], torch.empty(0, dtype=torch.uint8)

    def _on_host(self, place: _Place) -> torch.Tensor:
        return self._memory[place.begin : place.begin + place.num_bytes]


def _host_memory(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, bool]:
    """Memory of the host, and whether it is page-locked: a system may lock less than it has."""
    available = available_memory()
    if num_bytes > available.num_bytes:
        raise ResourceExhausted(f"the weights need {num_bytes} bytes of the host to sleep, more than the {available}")
    try:
        return page_locked(num_bytes, device, "Sleep"), device.type == "cuda"
    except NotEnoughMemory:
        return torch.empty(num_bytes, dtype=torch.uint8), False


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SleepState:
    """Whether a shard sleeps, and its weights while it does.

    On a CPU weights stay where they are: that is the host's memory already.
    """

    LEVEL = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parked: ParkedTensors | None = None
        self.is_asleep = False

    def check_awake(self) -> None:
        """Raise WrongState while the shard sleeps."""
        if self.is_asleep:
            raise WrongState("the shard sleeps: Wake comes first, then Warmup")

    def check_level(self, level: int) -> None:
        """Raise InvalidRequest for a level that there is not."""
        if level != self.LEVEL:
            raise InvalidRequest(
                f"level must be {self.LEVEL}, given {level}: weights stay in the host's memory", "level"
            )

    def sleep(self, root: object, let_go: Callable[[], None] = lambda: None) -> int:
        """Let go of pools, and move what `root` still refers to away from a GPU; returns the bytes that became free.

        A shard that sleeps frees nothing more.

        Raises:
            ResourceExhausted: the host does not have the memory for the weights; the shard is awake, without pools.
        """
        if self.is_asleep:
            return 0
        before = bytes_held(self._device)
        let_go()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._parked = ParkedTensors(tensors_of(root, self._device), self._device)
        release_memory(self._device)
        self.is_asleep = True
        freed = max(0, before - bytes_held(self._device))
        logger.info("asleep freed_bytes=%d", freed)
        return freed

    def wake(self) -> None:
        """Put everything back; nothing happens to a shard that is awake.

        Raises:
            ResourceExhausted: the device does not have the memory any more; the shard sleeps on.
        """
        if self._parked is not None:
            self._parked.restore()
        if self.is_asleep:
            logger.info("awake again")
        self._parked, self.is_asleep = None, False
