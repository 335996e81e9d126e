"""One child process: start it, hand on its output line by line, stop it politely and then firmly.

Knows nothing of shards or routers; the supervisor and the download are its callers.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress

LONGEST_LINE = 1 << 20  # bytes; a child that never ends its line is cut here
OUTPUT_SECONDS = 1.0  # for the last output of a child that has exited


class Child:
    """A process in a session of its own, so that signals of the terminal reach only the launcher.

    `error` is its last line that began with `error:`, without that word; `last_line` the last of any form.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
        *,
        stderr_through: bool = False,
    ) -> None:
        """Describe the child; `start` makes it.

        Args:
            name: for people, such as "shard rank 0".
            argv: command line.
            environ: its whole environment.
            on_line: called with each line of its output.
            stderr_through: leave stderr to the launcher's own instead of reading it together with stdout.
        """
        self.name = name
        self.error = ""
        self.last_line = ""
        self._argv = argv
        self._environ = environ
        self._on_line = on_line
        self._stderr_through = stderr_through
        self._pid: int | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def exited(self) -> "asyncio.Task[int]":
        """Done, with the exit code, once the child has ended and its output was handed on."""
        assert self._exited is not None, f"{self.name} was not started"
        return self._exited

    @property
    def has_exited(self) -> bool:
        """Whether it was started and has ended."""
        return self._exited is not None and self._exited.done()

    async def start(self) -> None:
        """Start the process."""
        # A pipe of our own: asyncio's `wait()` also waits for its pipes, which a grandchild may keep open.
        read_end, write_end = os.pipe()
        reader = await _open_reader(read_end)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=None if self._stderr_through else asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        self._pid = process.pid
        self._exited = asyncio.create_task(self._attend(process, reader))

    async def wait(self) -> int:
        """Wait for its end and return the exit code; a caller that is cancelled leaves the child alone."""
        await asyncio.wait({self.exited})
        return self.exited.result()

    async def stop(self, grace_seconds: float) -> bool:
        """Ask the process to end, insist after `grace_seconds`; return whether asking was enough."""
        if self._exited is None:
            return True
        self._signal(os.kill, signal.SIGTERM)
        done, _ = await asyncio.wait({self._exited}, timeout=grace_seconds)
        if not done:
            self.kill()
            await asyncio.wait({self._exited})
        return bool(done)

    def kill(self) -> None:
        """End the process, and whatever it started, at once."""
        if not self.has_exited:
            self._signal(os.killpg, signal.SIGKILL)

    def epitaph(self) -> str:
        """Say in one line how the process ended, and its last words."""
        code = self.exited.result()
        how = f"{self.name} exited with code {code}"
        if code < 0:
            how += f" (killed by {signal.Signals(-code).name})"
        if self.error:
            return f"{how}: last error: {self.error}"
        return f"{how}: last line: {self.last_line}" if self.last_line else how

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                send(self._pid, number)

    async def _attend(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> int:
        reading = asyncio.create_task(self._read(reader))
        code = await process.wait()
        self._signal(os.killpg, signal.SIGKILL)  # what it started and left behind
        await asyncio.wait({reading}, timeout=OUTPUT_SECONDS)
        reading.cancel()
        return code

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for line in _lines(reader):
            if line.startswith("error: "):
                self.error = line.removeprefix("error: ")
            if line.strip():
                self.last_line = line
            self._on_line(line)


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
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")


def relay(process: str, *, json_output: bool) -> Callable[[str], None]:
    """Make the function that writes a child's lines on stderr, for people or as JSON events.

    Args:
        process: what the child is called there, such as "shard 0".
        json_output: pass JSON lines as they are and wrap any other in an event.
    """
    if json_output:
        return lambda line: _write(line if _is_event(line) else _event(process, line))
    return lambda line: _write(f"{process} | {line}")


def _is_event(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _event(process: str, line: str) -> str:
    level = "ERROR" if line.startswith("error: ") else "INFO"
    event = {
        "timestamp": round(time.time(), 3),
        "level": level,
        "process": process.replace(" ", "-"),
        "target": "output",
        "message": line,
    }
    return json.dumps(event, ensure_ascii=False)


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
