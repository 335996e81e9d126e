"""CPU affinity: keep this process to some cores and to one node's memory. Comes before torch starts threads.

Threads that are there already are not moved; the memory policy is for memory that is first used later.
"""

import ctypes
import errno
import logging
import os
import platform

from funitel.model_server.settings import MAX_NODES, ModelServerSettings
from funitel.proto.errors import SettingsError
from funitel.proto.process.cores import Cores

logger = logging.getLogger(__name__)

# The system call, for which the C library has no function. Source: the kernel's tables of system calls.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
# Memory of that node while it has some, then of others: the other choice is to be killed. Source: linux/mempolicy.h.
_MPOL_PREFERRED = 1


def pin(settings: ModelServerSettings) -> None:
    """Pin the calling thread, and so the threads it starts from here on, as `--cores` and `--memory-node` say.

    Raises:
        SettingsError: this process may not run on one of the cores, or there is no such node.
    """
    if settings.cores is not None:
        allowed = Cores(os.sched_getaffinity(0))
        if not settings.cores <= allowed:
            raise SettingsError(f"--cores {settings.cores} must be among the cores this process may use, {allowed}")
        os.sched_setaffinity(0, settings.cores)
    if settings.memory_node is not None:
        _prefer_memory_of(settings.memory_node)
    if settings.cores is not None or settings.memory_node is not None:
        node = "any" if settings.memory_node is None else settings.memory_node
        logger.info("pinned cores=%s memory_node=%s", Cores(os.sched_getaffinity(0)), node)


def _prefer_memory_of(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        logger.warning("--memory-node %d has no effect on %s", node, platform.machine())
        return
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (MAX_NODES // word_bits))()
    mask[node // word_bits] = 1 << node % word_bits
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_PREFERRED, mask, MAX_NODES) == 0:
        return
    error = ctypes.get_errno()
    if error == errno.EINVAL:
        raise SettingsError(f"--memory-node must be a node with memory that this process may use, given {node}")
    # Containers often forbid it. Pages are taken from the node of the thread that first writes to them anyhow.
    logger.warning("--memory-node %d is left to the system: %s", node, os.strerror(error))
