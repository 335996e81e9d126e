"""How much memory a KV pool may take on this device, and how much this process has."""

import ctypes
import gc
import socket
from pathlib import Path

import torch

from funitel.model_server.parallel import TensorParallel
from funitel.proto.errors import NotEnoughMemory

# Free memory is shared with the activations of later steps, and on a host with everything else that runs there.
GPU_SHARE = 0.90
CPU_SHARE = 0.5
MOST_POOL_TOKENS = 2**31 - 1  # as many as the wire can say: a state of a few kilobytes stands for thousands
# What torch and the C++ library say of memory that is not there, in errors of no class of its own.
WORDS_OF_NO_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory")


def pool_bytes(device: torch.device, fraction: float, parallel: TensorParallel) -> int:
    """Bytes this rank's pool may take: `fraction` of what is free, shared fairly with the ranks of the same host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return pool_share(device, free_bytes(device), fraction, 1)
    hosts = parallel.exchange(socket.gethostname())
    return pool_share(device, free_bytes(device), fraction, hosts.count(hosts[parallel.rank]))


def pool_share(device: torch.device, free: int, fraction: float, num_ranks: int) -> int:
    """Bytes that the pool of each of `num_ranks` on a device may take of the `free` ones."""
    if device.type == "cuda":
        return max(0, free - int((1 - fraction * GPU_SHARE) * torch.cuda.mem_get_info(device)[1]))
    return max(0, int(free * CPU_SHARE * fraction / num_ranks))


def free_bytes(device: torch.device) -> int:
    """Memory this process can still get: of a GPU, of the host, or of its control group if that allows less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (group / "memory.stat").is_file():
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Pages of files just read, such as the checkpoint, count as used but are given back on demand.
            used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            available = min(available, int(limit) - used)
    return max(available, 0)


def resident_bytes() -> int:
    """Memory of this process that no file stands behind, once what glibc keeps of freed memory is given back.

    After loading that is megabytes which nobody would use again.
    """
    _trim()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def bytes_in_use(device: torch.device) -> int:
    """Memory this process holds where weights on `device` lie."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether something failed because there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | NotEnoughMemory):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in WORDS_OF_NO_MEMORY)


def give_back(device: torch.device) -> None:
    """Give freed memory back, to the device and to the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
