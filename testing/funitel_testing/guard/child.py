"""The other end of `counted`: a process that counts, and what it has counted."""

import asyncio
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from funitel.model_server.cpu.compiler import CannotBuild, find_compiler, run_compiler
from funitel_testing.guard.counted import (
    ALLOCATIONS,
    ANSWERED,
    BLOCKS,
    FIRST_OF_THREADS,
    LOOK,
    MODULES,
    NUM_SLOTS,
    STOP_PROFILE,
)
from funitel_testing.guard.system_calls import Tracer

SOURCE = Path(__file__).parent / "allocations.cpp"
STILL_SECONDS = 0.02  # without a change, all threads asleep: nothing is under way
MAX_SECONDS = 60.0


async def typical(take: Callable[[], float], work: Callable[[], Awaitable[object]], times: int = 5) -> float:
    """What a piece of work adds to a count, the median of several: now and then a clock adds to one of them."""
    counts = [await asyncio.to_thread(take)]
    for _ in range(times):
        await work()
        counts.append(await asyncio.to_thread(take))
    return median(after - before for before, after in pairwise(counts))


@dataclass(frozen=True)
class Reading:
    """Counts of a process since its start."""

    calls: int
    allocations: int
    blocks: int
    modules: int


class CountedProcess:
    """A process that counts."""

    def __init__(self, process: subprocess.Popen[bytes], slots: memoryview) -> None:
        self.process = process
        self._slots = slots

    def read(self) -> Reading:
        """What it has counted, once it waits for something from outside."""
        self.wait_still()
        calls, allocations = sum(self._slots[FIRST_OF_THREADS:]), self._slots[ALLOCATIONS]
        self.ask(LOOK)
        return Reading(calls, allocations, self._slots[BLOCKS], self._slots[MODULES])

    def stop_profile(self) -> None:
        """Count no more calls, which costs allocations: each thread stops at its next call."""
        self.ask(STOP_PROFILE)

    def wait_still(self) -> None:
        """Wait until all threads sleep and nothing has been counted for a while."""
        deadline = time.monotonic() + MAX_SECONDS
        seen, since = self._state(), time.monotonic()
        while time.monotonic() - since < STILL_SECONDS:
            time.sleep(0.002)
            now = self._state()
            if now != seen or not now[0]:
                seen, since = now, time.monotonic()
            if time.monotonic() > deadline:
                raise TimeoutError("the process does not come to rest")

    def _state(self) -> tuple[bool, int, int, int]:
        task = Path(f"/proc/{self.process.pid}/task")
        threads = [(each / "stat").read_text().rpartition(")")[2].split() for each in task.iterdir()]
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in threads)
        is_asleep = all(fields[0] in "St" for fields in threads)
        return is_asleep, ticks, sum(self._slots[FIRST_OF_THREADS:]), self._slots[ALLOCATIONS]

    def ask(self, what: bytes) -> None:
        """Have it do one of the things that `counted` knows, and wait until it has."""
        answered = self._slots[ANSWERED]
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), what)
        deadline = time.monotonic() + MAX_SECONDS
        while self._slots[ANSWERED] == answered:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.process.args!r} does not answer")
            time.sleep(0.002)

    @contextmanager
    def system_calls(self) -> Iterator[Callable[[], int]]:
        """Trace it; what is given says how many system calls there have been."""
        with Tracer(self.process.pid) as tracer:
            self.wait_still()
            yield lambda: tracer.count


@contextmanager
def counted(folder: Path, name: str, arguments: Sequence[str]) -> Iterator[CountedProcess]:
    """Run a module with its arguments in a process that counts."""
    path = folder / f"{name}.counts"
    path.write_bytes(bytes(8 * NUM_SLOTS))
    with path.open("r+b") as file:
        slots = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "funitel_testing.guard.counted", str(path), _library(folder), *arguments]
    environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr, env=environ
        )
    try:
        yield CountedProcess(process, slots)
    except BaseException as error:
        error.add_note(log.read_text(errors="replace")[-2000:])
        raise
    finally:
        process.kill()  # what it does to end is not counted, and waits for clocks that are stopped
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _library(folder: Path) -> str:
    """Path of `allocations.cpp` compiled; empty where there is no compiler."""
    path = folder / "allocations.so"
    if not path.exists():
        try:
            run_compiler([find_compiler(), "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(path)])
        except CannotBuild:
            return ""
    return str(path)
