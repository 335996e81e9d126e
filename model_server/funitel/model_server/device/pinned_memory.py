"""Pinned memory: memory of the host that a GPU copies from and to in the background, and uploads through it."""

import numpy as np
import torch

from funitel.proto.errors import NotEnoughMemory


def page_locked(num_bytes: int, device: torch.device, flag: str) -> torch.Tensor:
    """[num_bytes] uint8, locked where it lies: torch's own allocator would round up to the next power of two.

    Beside a CPU it is memory like any other. It stays locked until `give_back`.

    Raises:
        NotEnoughMemory: the host does not have it, or does not lock it; `flag` is what asked for it.
    """
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        if device.type == "cuda":
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    except RuntimeError as error:
        raise NotEnoughMemory(f"{flag}: the host has no {num_bytes} bytes that can be locked: {error}") from error
    return memory


def give_back(memory: torch.Tensor, device: torch.device) -> None:
    """Unlock memory of `page_locked`: it is freed with the last tensor that refers to it. No copy may be under way."""
    if device.type == "cuda":
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on a device; on a CPU the same memory.

    From pageable memory a copy would wait for every kernel before it. Torch keeps pinned memory until copies out of it
    are done, whatever has let go of it.
    """
    here = torch.from_numpy(values)
    if device.type == "cuda" and values.size:
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
