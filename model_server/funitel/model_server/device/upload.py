"""Upload numbers of the host to the device of a step, without waiting for what it has still to do."""

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on a device; on a CPU the same memory.

    From pageable memory a copy would wait for every kernel before it. Torch keeps pinned memory until copies out of it
    are done, whatever has let go of it.
    """
    here = torch.from_numpy(values)
    if device.type == "cuda" and values.size:
        here = here.pin_memory()
    return here.to(device, non_blocking=True)
