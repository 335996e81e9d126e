"""Weight offload: layers with weights in the host's memory, prefetched before they compute (`--cpu-offload-gb`).

The weights of such a layer are one piece of page-locked memory. There are two slots on the device: while a layer
computes out of one, the next is copied into the other. Every tensor of a layer is a view into its slot, made once, so
nothing but the copies happens in a step. Knows nothing of what layers compute.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from funitel.model_server.device.pinned_memory import page_locked
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError

logger = logging.getLogger(__name__)

_ALIGNMENT = 256  # bytes: what torch's allocator gives every tensor on a GPU
_NUM_SLOTS = 2

Arrival = Callable[[], None]  # has what is enqueued from then on wait for a copy


class Layer(Protocol):
    """What computes one layer."""

    def __call__(self, *arguments: Any) -> Any:
        """Hidden states in and out."""


L = TypeVar("L", bound=Layer)


class Prefetcher(Protocol):
    """Copies from the host to the device while that computes."""

    def hold(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host that can be copied from in the background: [num_bytes] uint8."""

    def send(self, source: torch.Tensor, into: torch.Tensor) -> Arrival:
        """Copy once all is done that was enqueued until now, as that may read what is overwritten."""


@dataclass(slots=True)
class _Kept:
    """One tensor of a layer: where it is held, and its elements in the order in which they lie in memory."""

    owner: Any
    key: str | int
    tensor: torch.Tensor
    order: list[int]  # dimensions, the one of the longest steps first
    begin: int  # bytes from the start of its layer's piece

    def write(self, piece: torch.Tensor) -> None:
        """Copy the elements to their place in a piece of memory."""
        self._view(piece).copy_(self.tensor)

    def point_at(self, piece: torch.Tensor) -> None:
        """Have the layer find its tensor in a piece of memory."""
        _put(self.owner, self.key, self._view(piece))

    def _view(self, piece: torch.Tensor) -> torch.Tensor:
        num_bytes = self.tensor.numel() * self.tensor.element_size()
        flat = piece[self.begin : self.begin + num_bytes].view(self.tensor.dtype)
        ordered = flat.view([self.tensor.shape[i] for i in self.order])
        return ordered.permute([self.order.index(i) for i in range(len(self.order))])


class OffloadedLayer(Generic[L]):
    """A layer with weights that are there when it computes, and not before."""

    def __init__(self, layer: L, place: int, offload: "Offload") -> None:
        self.layer = layer
        self._place = place
        self._offload = offload

    def fetch(self) -> L:
        """The layer with its weights there, outside of a step."""
        self._offload.send(self._place)
        self._offload.arrive(self._place)
        return self.layer

    def __call__(self, *arguments: Any) -> Any:
        """See the layer."""
        self._offload.arrive(self._place)
        result = self.layer(*arguments)
        self._offload.send(self._place + _NUM_SLOTS)  # into the slot that is free as soon as this layer is done
        return result


class Offload:
    """Keeps some layers' weights on the host.

    Args:
        num_bytes: that the device shall be spared.
        num_layers: of the model.
        device: where layers compute.
        prefetcher: copies.
    """

    def __init__(self, num_bytes: int, num_layers: int, device: torch.device, prefetcher: Prefetcher) -> None:
        self._num_bytes = num_bytes
        self._num_layers = num_layers
        self._device = device
        self._prefetcher = prefetcher
        self._count = 0  # layers to be kept on the host
        self._tensors: list[list[_Kept]] = []
        self._pieces: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._arrivals: dict[int, Arrival] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept on the host."""
        return sum(map(len, self._pieces))

    def keep(self, layer: L, index: int, shared: Sequence[object]) -> L | OffloadedLayer[L]:
        """Take the weights of a layer off the device if it is one of those that are kept on the host.

        Which ones is known once the first layer tells how large layers are: as many as make up what shall be spared,
        evenly spaced, so that those between give the copies time.

        Args:
            layer: loaded on the device.
            index: its number; layers come in order.
            shared: objects that other layers use too; they stay as they are.
        """
        found, num_bytes = self._tensors_of(layer, shared)
        if index == 0:
            self._count = min(self._num_layers, math.ceil(self._num_bytes / max(1, num_bytes)))
        if (index + 1) * self._count // self._num_layers == index * self._count // self._num_layers:
            return layer
        piece = self._prefetcher.hold(num_bytes)
        for kept in found:
            kept.write(piece)
            kept.tensor = torch.empty_like(kept.tensor, device="meta")
            _put(kept.owner, kept.key, kept.tensor)  # gives its memory back: the next layer may need it
        self._tensors.append(found)
        self._pieces.append(piece)
        return OffloadedLayer(layer, len(self._pieces) - 1, self)

    def finish(self) -> None:
        """All layers are there: make the slots, and have every tensor that is kept on the host be a view into one."""
        size = max(map(len, self._pieces), default=0)
        count = min(_NUM_SLOTS, len(self._pieces))
        self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(count)]
        for place, tensors in enumerate(self._tensors):
            for kept in tensors:
                kept.point_at(self._slots[place % _NUM_SLOTS])
        self._tensors.clear()
        logger.info(
            "offload layers=%d of=%d host_bytes=%d slot_bytes=%d",
            len(self._pieces),
            self._num_layers,
            self.num_bytes,
            size,
        )

    def begin(self) -> None:
        """A step begins: send for the first layers, which comes while those before them compute."""
        for place in range(_NUM_SLOTS):
            self.send(place)

    def send(self, place: int) -> None:
        """Send for the weights of the layer at a place among those kept on the host, if there is one."""
        if place < len(self._pieces):
            piece = self._pieces[place]
            self._arrivals[place] = self._prefetcher.send(piece, self._slots[place % _NUM_SLOTS][: len(piece)])

    def arrive(self, place: int) -> None:
        """Have what is enqueued from now on wait for the weights of a layer."""
        self._arrivals.pop(place)()

    def _tensors_of(self, layer: Layer, shared: Sequence[object]) -> tuple[list[_Kept], int]:
        found: list[_Kept] = []
        end = 0
        for owner, key, tensor in _walk(layer, {id(each) for each in shared}):
            if tensor.device.type != self._device.type or tensor.layout is not torch.strided:  # opaque ones of oneDNN
                continue
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            found.append(_Kept(owner, key, tensor, order, end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return found, end


def _walk(owner: Any, seen: set[int]) -> Iterator[tuple[Any, str | int, torch.Tensor]]:
    """Every tensor below an object of ours, with its owner and its name there; not those that a tuple holds."""
    seen.add(id(owner))
    if isinstance(owner, list | tuple):
        items: list[tuple[str | int, Any]] = list(enumerate(owner))
    elif isinstance(owner, dict):
        items = list(owner.items())
    else:
        names = [*getattr(owner, "__dict__", ()), *getattr(type(owner), "__slots__", ())]
        items = [(name, getattr(owner, name, None)) for name in names]
    for key, value in items:
        if isinstance(value, torch.Tensor):
            if not isinstance(owner, tuple):
                yield owner, key, value
        elif id(value) not in seen and (isinstance(value, list | tuple | dict) or _is_ours(value)):
            yield from _walk(value, seen)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("funitel.") and not isinstance(value, type)


def _put(owner: Any, key: str | int, tensor: torch.Tensor) -> None:
    if isinstance(owner, list | dict):
        owner[key] = tensor  # type: ignore[index]
    else:
        object.__setattr__(owner, str(key), tensor)  # some are frozen


class CudaPrefetcher:
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def hold(self, num_bytes: int) -> torch.Tensor:
        """See Prefetcher."""
        return page_locked(num_bytes, self._device, "--cpu-offload-gb")

    def send(self, source: torch.Tensor, into: torch.Tensor) -> Arrival:
        """See Prefetcher."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)


def offload_of(gigabytes: float, num_layers: int, device: torch.device) -> Offload | None:
    """What --cpu-offload-gb asks for; None where that is nothing."""
    if not gigabytes or device.type != "cuda":
        return None
    return Offload(int(gigabytes * 2**30), num_layers, device, CudaPrefetcher(device))


def host_memory_flags(settings: ModelServerSettings) -> dict[str, float]:
    """The flags that keep weights or blocks outside of the device's memory, with their GiB."""
    return {
        "--cpu-offload-gb": settings.cpu_offload_gb,
        "--kv-host-gb": settings.kv_host_gb,
        "--kv-disk-gb": settings.kv_disk_gb,
    }


def refuse_host_memory(settings: ModelServerSettings, models: str) -> None:
    """Raise SettingsError where memory of the host is asked for and `models` are those it is not for."""
    for flag, gigabytes in host_memory_flags(settings).items():
        if gigabytes:
            raise SettingsError(f"{flag} {gigabytes:g} is not for {models}")
