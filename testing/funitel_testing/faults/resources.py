"""Faults of what a machine gives: memory that runs out, disks that are full."""

import asyncio
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from funitel_testing.faults.scenes import ALIKE, PAIR, Launched, launching
from funitel_testing.faults.table import Cost, Fault
from funitel_testing.servers import alive, wait_until

# Where memory cgroups are, and the file that limits one: version 1 and version 2 of the kernel's interface.
CGROUPS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))
BYTES_LEFT = 64 << 10  # beyond what a process has, until the kernel kills it
DISK_BYTES = 8 << 20
FULL_SECONDS = 5.0

# Memory -------------------------------------------------------------------------------------------------------------


class Cage:
    """A memory cgroup that grants next to nothing."""

    def __init__(self, name: str) -> None:
        """Make it. Raises OSError where that is not possible."""
        root, limit = next((root, limit) for root, limit in CGROUPS if root.exists())
        self._folder = root / f"funitel-{name}"
        self._folder.mkdir()
        try:
            (self._folder / limit).write_text(str(BYTES_LEFT))
        except OSError:
            self._folder.rmdir()
            raise

    def take(self, pid: int) -> None:
        """Put a process in; what it has stays where it was counted."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove it once it has no processes."""
        wait_until(lambda: _is_removed(self._folder), 10, "the cgroup still has processes")


@cache
def _no_cgroup() -> str:
    try:
        Cage("probe").remove()
    except (OSError, StopIteration):
        return "no memory cgroup can be made here"
    return ""


async def _kill_for_memory(scene: Launched) -> None:
    """Let the kernel kill a shard when it next asks for memory."""
    pid = scene.server.shard_pids()[0]
    cage = Cage(str(pid))
    try:
        cage.take(pid)
        await asyncio.to_thread(wait_until, lambda: not alive({pid}), 60, "the shard needs no more memory")
    finally:
        await asyncio.to_thread(cage.remove)


def _is_removed(folder: Path) -> bool:
    with suppress(OSError):  # its process is about to end
        folder.rmdir()
    return not folder.exists()


async def _refuse_memory(scene: Launched) -> None:
    """Let a shard have no more address space than it has."""
    pid = scene.server.shard_pids()[0]
    resource.prlimit(pid, resource.RLIMIT_AS, (_address_space(pid), resource.RLIM_INFINITY))
    await asyncio.sleep(FULL_SECONDS)
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _address_space(pid: int) -> int:
    """Bytes a process has mapped. Source: proc_pid_statm(5)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


# Disks --------------------------------------------------------------------------------------------------------------


class SmallDisk:
    """A file system of a few MiB, mounted on a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        folder.mkdir(exist_ok=True)
        mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "funitel-test", str(folder))
        subprocess.run(mount, check=True, capture_output=True)

    def fill(self) -> None:
        """Leave not one byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass
        with suppress(OSError), (self.folder / "one more").open("wb", buffering=0) as file:
            assert not file.write(b"!"), "the disk is not full"

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink()

    def unmount(self) -> None:
        """Remove it, even if a process still writes to it."""
        subprocess.run(("umount", "--lazy", str(self.folder)), check=True)


@cache
def no_mount() -> str:
    """Why there is no `SmallDisk` on this machine; empty where there is."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            SmallDisk(Path(folder)).unmount()
        except (OSError, subprocess.CalledProcessError):
            return "no file system can be mounted here"
    return ""


class OnSmallDisk:
    """A deployment and the disk under a part of what it writes."""

    def __init__(self, deployment: Launched, disk: SmallDisk) -> None:
        self.deployment, self.disk = deployment, disk
        self.url = deployment.url

    def until_whole(self) -> None:
        """See `Scene`."""
        self.deployment.until_whole()


@contextmanager
def _logs_on_small_disk(model: Path, folder: Path) -> Iterator[OnSmallDisk]:
    disk = SmallDisk(folder / "small")
    try:
        with launching(disk.folder, model, *ALIKE, "--num-replicas", "2", "--log-level", "debug") as deployment:
            yield OnSmallDisk(deployment, disk)
    finally:
        disk.unmount()


@contextmanager
def _scratch_on_small_disk(model: Path, folder: Path) -> Iterator[OnSmallDisk]:
    disk = SmallDisk(folder / "small")
    try:
        with launching(folder, model, *ALIKE, "--num-replicas", "2", TMPDIR=str(disk.folder)) as deployment:
            yield OnSmallDisk(deployment, disk)
    finally:
        disk.unmount()


async def _fill_and_kill(scene: OnSmallDisk) -> None:
    """Fill the disk, and have the deployment say and do more than usual: a shard dies."""
    scene.disk.fill()
    os.kill(scene.deployment.server.shard_pids()[0], signal.SIGKILL)
    await asyncio.sleep(FULL_SECONDS)
    scene.disk.free()


FAULTS = (
    Fault(
        name="a shard killed by the kernel for memory",
        cost=Cost.NOTHING,
        why="as kill -9",
        scene=PAIR,
        strike=_kill_for_memory,
        obstacle=_no_cgroup,
        is_wearing=True,
    ),
    Fault(
        name="no more memory for a shard, which goes on (RLIMIT_AS)",
        cost=Cost.NOTHING,
        why="a step that fails for memory is tried again, here or elsewhere",
        scene=PAIR,
        strike=_refuse_memory,
        is_wearing=True,
        is_brief=False,
    ),
    Fault(
        name="a full disk under the logs, and a shard killed",
        cost=Cost.NOTHING,
        why="what cannot be written is not",
        scene=_logs_on_small_disk,
        strike=_fill_and_kill,
        obstacle=no_mount,
        is_wearing=True,
    ),
    Fault(
        name="a full disk under temporary files, and a shard killed",
        cost=Cost.NOTHING,
        why="serving writes nothing there",
        scene=_scratch_on_small_disk,
        strike=_fill_and_kill,
        obstacle=no_mount,
        is_wearing=True,
        is_brief=False,
    ),
)
