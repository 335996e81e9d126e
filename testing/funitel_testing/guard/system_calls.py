"""Count the system calls of a process by ptrace, from a thread of this process: no tool is needed."""

import ctypes
import os
import signal
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SYSCALL, GETREGS, DETACH, SEIZE, INTERRUPT = 24, 12, 17, 0x4206, 0x4207
MARKS_CALLS, FOLLOWS_THREADS = 1, 8  # options
WALL, NOT_OF_THREADS = 0x40000000, 0x20000000  # of waitpid: all threads, and only those that this thread traces
STOPPED_AT_CALL = signal.SIGTRAP | 0x80
NUM_REGISTERS, ORIG_RAX = 27, 15
PATIENCE_SECONDS = 30.0

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_ptrace.restype = ctypes.c_long


class CannotTrace(Exception):
    """This machine does not let a process trace another; one line."""


class Tracer:
    """Counts the calls that a process begins in a `with`, `count` of all and `numbers` by their number."""

    def __init__(self, pid: int) -> None:
        self.numbers: Counter[int] = Counter()
        self._pid = pid
        self._begun, self._ended = threading.Event(), threading.Event()
        self._error: CannotTrace | None = None
        self._thread = threading.Thread(target=self._trace, name="tracer")

    @property
    def count(self) -> int:
        """Calls so far."""
        return self.numbers.total()

    def __enter__(self) -> "Tracer":
        self._thread.start()
        self._begun.wait(PATIENCE_SECONDS)
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _trace(self) -> None:
        """All requests come from this thread: the kernel takes them from no other."""
        threads = [int(path.name) for path in Path(f"/proc/{self._pid}/task").iterdir()]
        try:
            for thread in threads:
                _request(SEIZE, thread, MARKS_CALLS | FOLLOWS_THREADS)
        except CannotTrace as error:
            self._error = error
            self._begun.set()
            return
        for thread in threads:
            _request(INTERRUPT, thread)
        stopped, inside = set[int](), set[int]()
        while not self._ended.is_set():
            found, status = self._wait()
            if not found:
                continue
            self._go_on(found, status, inside)
            stopped.add(found)
            if stopped >= set(threads):
                self._begun.set()

    def _wait(self) -> tuple[int, int]:
        try:
            found, status = os.waitpid(-1, WALL | NOT_OF_THREADS | os.WNOHANG)
        except ChildProcessError:
            found, status = 0, 0
        if not found:
            self._ended.wait(0.0005)
        return found, status

    def _go_on(self, thread: int, status: int, inside: set[int]) -> None:
        if not os.WIFSTOPPED(status):
            return
        number = os.WSTOPSIG(status)
        handed_on = 0
        if number == STOPPED_AT_CALL:
            if thread in inside:
                inside.remove(thread)
            else:
                inside.add(thread)
                self.numbers[_number(thread)] += 1
        elif status >> 16 == 0:
            handed_on = number
        with suppress(CannotTrace):  # killed meanwhile
            _request(SYSCALL, thread, handed_on)


def _number(thread: int) -> int:
    registers = (ctypes.c_ulong * NUM_REGISTERS)()
    _ptrace(GETREGS, thread, None, ctypes.addressof(registers))
    return int(registers[ORIG_RAX])


def _request(request: int, thread: int, data: int = 0) -> None:
    if _ptrace(request, thread, None, data) < 0:
        raise CannotTrace(f"ptrace: {os.strerror(ctypes.get_errno())}")
