"""What the launcher does as PID 1 of a container: it reaps orphans, and ends at a SIGTERM that comes early.

A process that outlives its parent becomes a child of PID 1. When it ends it stays as a zombie unless that waits for it.
A signal without a handler does not end PID 1.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

INIT = 1
RETRY_SECONDS = 0.1  # for asyncio to wait for a child of ours
EXITED_BY_SIGNAL = 128


class OwnChildren:
    """Process ids of the children that asyncio waits for; taken from it, their exit codes would be lost."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.num_starting = 0  # their ids are not known yet

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of a child, until its id has been added."""
        self.num_starting += 1
        try:
            yield
        finally:
            self.num_starting -= 1


OWN_CHILDREN = OwnChildren()


async def output_of(
    argv: Sequence[str], environ: Mapping[str, str], max_seconds: float | None = None
) -> tuple[int, bytes, bytes]:
    """Run a program to its end; its exit code, stdout and stderr. It is killed where the call is cancelled.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it takes longer than `max_seconds`.
    """
    with OWN_CHILDREN.starting():
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=environ,
            cwd="/",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        OWN_CHILDREN.pids.add(process.pid)
    try:
        async with asyncio.timeout(max_seconds):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await asyncio.shield(process.wait())
        OWN_CHILDREN.pids.discard(process.pid)
    assert process.returncode is not None, "it has ended"
    return process.returncode, output, errors


def is_pid_one() -> bool:
    """Whether this process is the first of its PID namespace."""
    return os.getpid() == INIT


def end_at_early_sigterm() -> None:
    """End at a SIGTERM that comes before the event loop handles signals, with the code of that signal."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(EXITED_BY_SIGNAL + number)

    signal.signal(signal.SIGTERM, end)


class OrphanReaper:
    """Waits for every child that is not one of `own`, in the running event loop, at each SIGCHLD."""

    def __init__(self, own: OwnChildren) -> None:
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def reap(self) -> None:
        """Reap what has ended; again a moment later while a child of ours may hide others."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if not self._reap_all():
            self._retry = self._loop.call_later(RETRY_SECONDS, self.reap)

    def _reap_all(self) -> bool:
        """Reap orphans; return whether none can be left."""
        while not self._own.num_starting:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            if ended is None:
                return True
            if ended.si_pid in self._own.pids:
                return False
            os.waitpid(ended.si_pid, 0)
            logger.debug("reaped orphan pid=%d", ended.si_pid)
        return False
