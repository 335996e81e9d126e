"""Pinned memory: memory of the host that a GPU copies from and to in the background."""

import torch

from funitel.proto.errors import NotEnoughMemory


def page_locked(num_bytes: int, device: torch.device, flag: str) -> torch.Tensor:
    """[num_bytes] uint8, locked where it lies: torch's own allocator would round up to the next power of two.

    Beside a CPU it is memory like any other. It is never given back.

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
