"""The inside of a process that tries inputs one after the other, and says what became of each.

Usage: python -m MODULE FOLDER_WITH_FILES_JSON. A line of JSON once all is ready, and one for each input. An input is
made of its kind, the seed and its number, so that it can be tried again.
"""

import asyncio
import json
import random
import resource
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

Try = Callable[[random.Random], Awaitable[str]]  # tries an input; returns what is wrong with what became of it, or ""
Prepared = AbstractAsyncContextManager[Mapping[str, Try]]

PASSED = "passed"


def rss_mib(pid: int | str = "self") -> int:
    """Memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


def run(
    prepare: Callable[[Path], Prepared], held_mib: Callable[[], int] = rss_mib, headroom: int | None = None
) -> None:
    """Try the inputs of the job in the folder that the command line names.

    Args:
        prepare: makes, for the length of the job, what tries the inputs of each kind.
        held_mib: what is held in memory after an input.
        headroom: bytes of addresses that inputs may take beside what is taken once all is ready.
    """
    asyncio.run(_run(prepare, held_mib, headroom))


async def _run(prepare: Callable[[Path], Prepared], held_mib: Callable[[], int], headroom: int | None) -> None:
    work = Path(sys.argv[1])
    job = json.loads((work / "files.json").read_text())
    async with prepare(work) as tries:
        if headroom is not None:
            _limit(headroom)
        print(json.dumps({"ready": True}), flush=True)
        for kind, number in job["files"]:
            result = await _result(tries[kind], random.Random(f"{kind} {job['seed']} {number}"))
            print(json.dumps({"kind": kind, "number": number, "mib": 0, "held": held_mib(), **result}), flush=True)


def _limit(headroom: int) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + headroom
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


async def _result(attempt: Try, rng: random.Random) -> dict[str, object]:
    began, message = time.monotonic(), ""
    try:
        problem = await attempt(rng)
    except Exception as error:  # what was tried should have dealt with it
        message, problem = traceback.format_exc(limit=-6), type(error).__name__
    outcome, _, words = problem.partition(": ")
    seconds = round(time.monotonic() - began, 3)
    return {"outcome": outcome or PASSED, "message": (message or words)[:3000], "seconds": seconds}
