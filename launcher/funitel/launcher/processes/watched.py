"""Watch a process that may outlive the one that has started it: by pid and start time, through a pidfd. Linux only."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from funitel.launcher.processes.pid_one import OWN_CHILDREN
from funitel.launcher.processes.relay import working_directory
from funitel.proto.errors import FunitelError
from funitel.proto.process.start_times import start_of, state_and_start_of

Identity = Mapping[str, int]
"""`pid` and `started`, by which a process is found again: a later process with the same pid has another start."""


class WatchedProcess:
    """A process in a session of its own, watched until its end; it must be made within a running event loop.

    Attributes:
        name: for messages, such as "shard rank 0".
        pid: of the process.
        started: its start, in clock ticks since the boot of the machine.
        exited: the exit code, once it has ended; None for that of a process that another one has started.
    """

    def __init__(self, name: str, pid: int, pidfd: int, started: int, own: "subprocess.Popen[bytes] | None") -> None:
        """Watch a process; `started_as` and `found` make these."""
        self.name = name
        self.pid = pid
        self.started = started
        self._pidfd = pidfd
        self._own = own
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_end)

    @classmethod
    def started_as(
        cls, name: str, argv: Sequence[str], environ: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> Self:
        """Start a process; its output is appended to the file `log`.

        Raises:
            FunitelError: it cannot be started.
        """
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with OWN_CHILDREN.starting(), log.open("ab") as output:
                process = subprocess.Popen(
                    argv,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=working_directory(),
                    pass_fds=pass_fds,
                )
                OWN_CHILDREN.pids.add(process.pid)
            # It is a child that was not waited for, so its pid is its own, even if it has ended.
            return cls(
                name, process.pid, os.pidfd_open(process.pid), (state_and_start_of(process.pid) or ("", 0))[1], process
            )
        except OSError as error:
            raise FunitelError(f"{name} cannot be started: {error.strerror or error}") from error

    @classmethod
    def found(cls, name: str, identity: Mapping[str, Any]) -> Self | None:
        """Find a process that an earlier one has started; None where it has ended."""
        pid, started = identity["pid"], identity["started"]
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if start_of(pid) != started:  # asked after the pidfd was opened, which keeps the process that it is of
            os.close(pidfd)
            return None
        return cls(name, pid, pidfd, started, None)

    @property
    def identity(self) -> Identity:
        """What `found` needs."""
        return {"pid": self.pid, "started": self.started}

    @property
    def has_exited(self) -> bool:
        """Whether it has ended."""
        return self.exited.done()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if not self.has_exited:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL to the process and its whole process group."""
        if not self.has_exited:
            self._kill_group()

    async def stop(self, grace_seconds: float) -> bool:
        """Send SIGTERM, then SIGKILL after `grace_seconds`; return whether SIGTERM was enough."""
        self.send(signal.SIGTERM)
        done, _ = await asyncio.wait({self.exited}, timeout=grace_seconds)
        if not done:
            self.kill()
            await asyncio.wait({self.exited})
        return bool(done)

    def forget(self) -> None:
        """Watch it no more, and let it run."""
        if not self.has_exited:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self.exited.cancel()
            OWN_CHILDREN.pids.discard(self.pid)
            if self._own is not None:
                self._own.returncode = 0  # it is not waited for, which `subprocess` would warn of

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._kill_group()  # processes that it left behind; before it is waited for, which sets its pid free
        code = None if self._own is None else self._own.wait()  # it has ended, so this does not block
        os.close(self._pidfd)
        OWN_CHILDREN.pids.discard(self.pid)
        if not self.exited.done():
            self.exited.set_result(code)

    def _kill_group(self) -> None:
        there = state_and_start_of(self.pid)
        if there is not None and there[1] != self.started:
            return  # another process has the pid by now, and gets it only once nothing of this group is left
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def how_it_ended(name: str, code: int | None) -> str:
    """Describe the end of a process in a few words."""
    if code is None:
        return f"{name} has ended"
    return f"{name} exited with code {code}" + (f" (killed by {signal.Signals(-code).name})" if code < 0 else "")
