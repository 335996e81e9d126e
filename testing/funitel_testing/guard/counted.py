"""Run a module of ours as a program that counts: Python calls of all its threads, and allocations.

    python -m funitel_testing.guard.counted COUNTS LIBRARY funitel.router --port 3000

COUNTS is a file of `NUM_SLOTS` numbers of 64 bits that this process maps; LIBRARY is `allocations.cpp` compiled, or
empty. A byte on stdin asks for something, and the number of bytes that were answered is the first slot.
"""

import asyncio
import ctypes
import gc
import mmap
import os
import runpy
import sys
import threading
from importlib import import_module
from itertools import count
from types import FrameType
from typing import Any

import uvicorn

NUM_SLOTS = 512
ANSWERED, MODULES, BLOCKS, ALLOCATIONS = range(4)
FIRST_OF_THREADS = 8
LOOK, STOP_PROFILE, MORE_CALLS, MORE_SYSTEM_CALLS = b"l", b"s", b"c", b"k"

# What wakes by the clock would count more on a slow machine.
CLOCKS = (
    ("funitel.router.core.file_watch", "POLL_SECONDS", 3600.0),
    ("funitel.router.transport.server", "TICK_SECONDS", 3600.0),
    ("funitel.router.engine.step_loop", "TICK_SECONDS", 3600.0),
)


async def tick_once(server: uvicorn.Server) -> None:
    """Do what uvicorn does every 0.1 s a single time."""
    await server.on_tick(0)
    await asyncio.Event().wait()


class Counted:
    """The counts of this process."""

    def __init__(self, path: str, library: str) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * NUM_SLOTS)
        self._slots = memoryview(self._memory).cast("Q")
        self._is_profiled = True
        self._thread_slots = count(FIRST_OF_THREADS)
        if library:
            address = ctypes.addressof(ctypes.c_uint64.from_buffer(self._memory, 8 * ALLOCATIONS))
            ctypes.PyDLL(library).count_allocations(ctypes.c_void_p(address))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))  # it allocates to its very end
        threading.Thread(target=self._answer, daemon=True).start()
        threading.setprofile(self._begin)
        self._begin()

    def _begin(self, *_: Any) -> None:
        """Profile this thread from now on; each has a slot, since additions of two may meet."""
        slots, place = self._slots, next(self._thread_slots)

        def profile(_: FrameType, event: str, __: Any) -> None:
            if event == "call" or event == "c_call":
                slots[place] += 1
            if not self._is_profiled:
                sys.setprofile(None)

        sys.setprofile(profile)

    def _answer(self) -> None:
        sys.setprofile(None)
        while asked := os.read(0, 1):
            if asked == STOP_PROFILE:
                self._is_profiled = False
                threading.setprofile(None)
            elif asked in (MORE_CALLS, MORE_SYSTEM_CALLS):
                slow_down(asked)
            else:
                gc.collect()
                self._slots[MODULES], self._slots[BLOCKS] = len(sys.modules), sys.getallocatedblocks()
            self._slots[ANSWERED] += 1
        os._exit(1)  # what started this process is gone


def slow_down(how: bytes) -> None:
    """Do more for each token of a router, as a change that should be noticed would: a call, or a system call too."""
    stream = import_module("funitel.router.core.stream").TokenStream
    deliver = stream.deliver

    def call(self: Any, *event: Any) -> None:
        deliver(self, *event)

    def system_call(self: Any, *event: Any) -> None:
        os.getppid()
        deliver(self, *event)

    stream.deliver = call if how == MORE_CALLS else system_call


def main() -> None:
    """Entry point."""
    _, path, library, module, *arguments = sys.argv
    for name, constant, value in CLOCKS:
        if module.startswith("funitel.router"):
            setattr(import_module(name), constant, value)
            uvicorn.Server.main_loop = tick_once  # type: ignore[assignment]
    Counted(path, library)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
