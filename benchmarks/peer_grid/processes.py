"""Start a server, wait until it answers, account for the memory and CPU time of all its processes, and end it."""

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from funitel.proto.errors import FunitelError

from .recipes import Command

READY_SECONDS, END_SECONDS = 900.0, 30.0
POLL_SECONDS = 0.1
OF_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class DoesNotStart(FunitelError):
    """A server ended or did not answer in time; the message has its last line."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What all processes of a server hold and have used; memory in bytes, CPU time in seconds.

    `proportional_bytes` counts a page that several processes share once, `resident_bytes` for each of them.
    """

    resident_bytes: int
    proportional_bytes: int
    cpu_seconds: float


class RunningServer:
    """A server on a port of this machine."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self._process, self.port, self.log = process, port, log

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self, timeout: float = READY_SECONDS) -> None:
        """Wait until GET /health is answered with 200.

        Raises:
            DoesNotStart: it ended, or has not answered in time.
        """
        deadline = time.monotonic() + timeout
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise DoesNotStart(f"it ended with {self._process.returncode}: {self._last_line()}: see {self.log}")
            if time.monotonic() > deadline:
                raise DoesNotStart(f"no answer within {timeout:.0f} s: see {self.log}")
            time.sleep(POLL_SECONDS)

    def usage(self) -> Usage:
        """Memory and CPU time of the process and all below it; CPU time without that of children that ended."""
        resident = proportional = 0
        seconds = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                memory, times = process.memory_full_info(), process.cpu_times()
                resident += memory.rss
                proportional += memory.pss
                seconds += times.user + times.system
        return Usage(resident, proportional, seconds)

    def end(self) -> None:
        """End it and everything that it started."""
        tree = self._tree()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(tree, END_SECONDS)

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "without a word"


@contextmanager
def running(command: Command, port: int, log: Path, *, is_ours: bool) -> Iterator[RunningServer]:
    """A server that answers, until the end of the block.

    Raises:
        DoesNotStart: it ended, or has not answered in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        output.write(f"$ {' '.join(command.arguments)}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(command.variables, is_ours=is_ours),
            )
        except OSError as error:
            raise DoesNotStart(f"{command.arguments[0]}: {error.strerror}") from error
        server = RunningServer(process, port, log)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.end()


def environment(variables: Mapping[str, str], *, is_ours: bool) -> dict[str, str]:
    """This process's, without what would make the Python of a peer import this project's packages."""
    kept = {name: value for name, value in os.environ.items() if is_ours or name not in OF_PYTHON}
    return kept | dict(variables)


def free_port() -> int:
    """A port that nothing listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
