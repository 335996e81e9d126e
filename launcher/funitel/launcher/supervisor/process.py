"""Run one child process: start it, forward its output line by line, stop it by SIGTERM and then SIGKILL."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from funitel.launcher.processes.pid_one import OWN_CHILDREN
from funitel.launcher.processes.relay import working_directory
from funitel.launcher.processes.watched import how_it_ended

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20  # longer lines are split
OUTPUT_SECONDS = 1.0  # for the last output of a child that has exited
STOP_AGAIN_SECONDS = 0.5


class Child:
    """A process in its own session, so that signals of the terminal reach only the launcher.

    `error` is its last line that began with `error:`, without that word; `last_line` is its last non-empty line.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
        *,
        stderr_through: bool = False,
        on_stderr_line: Callable[[str], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Describe the child; `start` starts it.

        Args:
            name: for messages, such as "shard rank 0".
            argv: command line.
            environ: its complete environment.
            on_line: called with each line of its output.
            stderr_through: let it inherit stderr instead of reading stderr together with stdout.
            on_stderr_line: called with each line of its stderr, which is then read apart from stdout.
            pass_fds: descriptors that it inherits under the same numbers.
        """
        self.name = name
        self.error = ""
        self.last_line = ""
        self._argv = argv
        self._environ = environ
        self._on_line = on_line
        self._stderr_through = stderr_through
        self._on_stderr_line = on_stderr_line
        self._pass_fds = pass_fds
        self._pid: int | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def exited(self) -> "asyncio.Task[int]":
        """Done, with the exit code, once the child has ended and its output was forwarded."""
        assert self._exited is not None, f"{self.name} was not started"
        return self._exited

    @property
    def has_exited(self) -> bool:
        """Whether it was started and has ended."""
        return self._exited is not None and self._exited.done()

    @property
    def pid(self) -> int | None:
        """Of the process; None before it was started."""
        return self._pid

    @property
    def has_started(self) -> bool:
        """Whether there was a process."""
        return self._pid is not None

    async def start(self) -> None:
        """Start the process; one that cannot be started has exited with code 1, with the reason as its last error."""
        # Not asyncio's own pipe: its `wait()` also waits for pipes, which a grandchild may keep open.
        pipes = [await _Pipe.opened(self._on_line)]
        stderr: int | None = None if self._stderr_through else asyncio.subprocess.STDOUT
        if self._on_stderr_line is not None:
            pipes.append(await _Pipe.opened(self._on_stderr_line))
            stderr = pipes[-1].write_end
        try:
            with OWN_CHILDREN.starting():
                process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    env=self._environ,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=pipes[0].write_end,
                    stderr=stderr,
                    start_new_session=True,
                    cwd=working_directory(),
                    pass_fds=self._pass_fds,
                )
                OWN_CHILDREN.pids.add(process.pid)
        except OSError as error:  # no process, memory or descriptor is left, for now perhaps
            self.error = f"cannot be started: {error.strerror}"
            self._exited = asyncio.create_task(_failed_start())
            return
        finally:
            for pipe in pipes:
                os.close(pipe.write_end)
        self._pid = process.pid
        self._exited = asyncio.create_task(self._forward_output(process, pipes))

    async def wait(self) -> int:
        """Wait for its end and return the exit code; cancelling the caller does not affect the child."""
        await asyncio.wait({self.exited})
        return self.exited.result()

    async def stop(self, grace_seconds: float) -> bool:
        """Send SIGTERM, then SIGKILL after `grace_seconds`; return whether SIGTERM was enough."""
        if self._exited is None or self._exited.done():
            return True
        self.request_stop()
        return await self._ended_within(grace_seconds)

    def request_stop(self) -> None:
        """Send SIGTERM."""
        self._signal(os.kill, signal.SIGTERM)

    def request_drain(self) -> None:
        """Send SIGUSR1: a router then finishes the requests it has accepted, accepts no more, and ends."""
        self._signal(os.kill, signal.SIGUSR1)

    async def stop_again(self, seconds: float) -> bool:
        """Repeat SIGTERM for some seconds, then send SIGKILL; return whether SIGTERM was enough.

        It is repeated because signals that arrive before the first is handled are merged.
        """
        repeating = asyncio.create_task(self._repeat_stop())
        try:
            return await self._ended_within(seconds)
        finally:
            repeating.cancel()

    async def _repeat_stop(self) -> None:
        while not self.has_exited:
            self.request_stop()
            await asyncio.sleep(STOP_AGAIN_SECONDS)

    async def _ended_within(self, seconds: float) -> bool:
        done, _ = await asyncio.wait({self.exited}, timeout=seconds)
        if not done:
            self.kill()
            await asyncio.wait({self.exited})
        return bool(done)

    def kill(self) -> None:
        """Send SIGKILL to the process and its whole process group."""
        if not self.has_exited:
            self._signal(os.killpg, signal.SIGKILL)

    def exit_reason(self) -> str:
        """Describe in one line how the process ended, with its last error or line."""
        how = how_it_ended(self.name, self.code)
        if self.error:
            return f"{how}: last error: {self.error}"
        return f"{how}: last line: {self.last_line}" if self.last_line else how

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended; None where it is not known."""
        return self.exited.result()

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                send(self._pid, number)

    async def _forward_output(self, process: asyncio.subprocess.Process, pipes: "Sequence[_Pipe]") -> int:
        reading = {asyncio.create_task(self._read(pipe)) for pipe in pipes}
        code = await process.wait()
        OWN_CHILDREN.pids.discard(process.pid)
        self._signal(os.killpg, signal.SIGKILL)  # processes that it left behind
        await asyncio.wait(reading, timeout=OUTPUT_SECONDS)
        for task in reading:
            task.cancel()
        return code

    async def _read(self, pipe: "_Pipe") -> None:
        async for line in _lines(pipe.reader):
            self._note(line)
            pipe.on_line(line)

    def _note(self, line: str) -> None:
        """Remember a line that may say why it ends."""
        if line.startswith("error: "):
            self.error = line.removeprefix("error: ")
        if line.strip():
            self.last_line = line


async def stop_child(child: Child, grace_seconds: float) -> None:
    """Stop a child; log a warning if it had to be killed."""
    if not await child.stop(grace_seconds):
        logger.warning("%s did not stop within %g s and was killed", child.name, grace_seconds)


async def _failed_start() -> int:
    return 1


@dataclass(frozen=True, slots=True)
class _Pipe:
    """A pipe from a child, and what its lines are for."""

    reader: asyncio.StreamReader
    write_end: int
    on_line: Callable[[str], None]

    @classmethod
    async def opened(cls, on_line: Callable[[str], None]) -> Self:
        read_end, write_end = os.pipe()
        return cls(await _open_reader(read_end), write_end, on_line)


async def _open_reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    rest = b""
    while chunk := await reader.read(1 << 16):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")
