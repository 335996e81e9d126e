"""The wall clock jumps, for every process of a deployment and no other: their libc is given another clock."""

import asyncio
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

import httpx

from funitel_testing.faults.scenes import ALIKE, Launched, launching
from funitel_testing.faults.table import Cost, Fault
from funitel_testing.servers import wait_until

HOUR = 3600
JUMPS = (HOUR, -HOUR, 365 * 24 * HOUR, 0)  # seconds off the real time, one after the other
HEARD_SECONDS = 30.0  # for the server to say another time; it looks once a second

_SOURCE = Path(__file__).with_name("wall_clock.c")


class OffTime:
    """A deployment and the file its clock is moved by."""

    def __init__(self, deployment: Launched, offset: Path) -> None:
        self.deployment, self.offset = deployment, offset
        self.url = deployment.url

    def until_whole(self) -> None:
        """See `Scene`."""
        self.deployment.until_whole()

    def jump(self, seconds: int) -> None:
        """Move the clock so far off the real time."""
        with self.offset.open("r+b") as file:  # mapped by the processes: the file must stay the same
            file.write(struct.pack("=q", seconds))


@contextmanager
def _off_time(model: Path, folder: Path) -> Iterator[OffTime]:
    library, offset = folder / "wall_clock.so", folder / "offset"
    subprocess.run(("cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE)), check=True)
    offset.write_bytes(bytes(8))
    environ = {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(offset)}
    with launching(folder, model, *ALIKE, "--num-replicas", "2", **environ) as deployment:
        yield OffTime(deployment, offset)


async def _jump(scene: OffTime) -> None:
    for seconds in JUMPS:
        scene.jump(seconds)
        await asyncio.to_thread(wait_until, partial(_is_off_by, scene.url, seconds), HEARD_SECONDS)


def _is_off_by(url: str, seconds: int) -> bool:
    """Whether the server takes the time to be so far off the real one."""
    told = httpx.get(f"{url}/health/live", timeout=60).headers["date"]
    return abs(parsedate_to_datetime(told).timestamp() - time.time() - seconds) < HOUR / 2


FAULTS = (
    Fault(
        name="the wall clock jumps an hour ahead, two back, a year ahead, and home",
        cost=Cost.NOTHING,
        why="what waits and measures asks the monotonic clock",
        scene=_off_time,
        strike=_jump,
        obstacle=lambda: "" if shutil.which("cc") else "no C compiler",
    ),
)
