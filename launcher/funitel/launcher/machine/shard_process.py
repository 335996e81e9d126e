"""One rank as a process of this machine, which ends with the process that started it; its lines go to our stderr."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from funitel.proto.errors import StartupError
from funitel.proto.printable import printable

MAX_LINE_BYTES = 1 << 20
OUTPUT_SECONDS = 1.0  # for the last output of a process that has ended
ERROR = "error: "


class ShardProcess:
    """A process in its own session."""

    def __init__(
        self, name: str, argv: Sequence[str], environ: Mapping[str, str], on_error_line: Callable[[str], None]
    ) -> None:
        """Describe it; `start` starts it.

        Args:
            name: for messages, such as "shard rank 0 of my-llama".
            argv: command line.
            environ: its complete environment.
            on_error_line: called with each line that begins with `error:`, without that word.
        """
        self.name = name
        self.pid = 0
        self._argv = argv
        self._environ = environ
        self._on_error_line = on_error_line
        self._error = self._last_line = ""
        self._exited: asyncio.Task[str] | None = None

    @property
    def exited(self) -> "asyncio.Task[str]":
        """Done, with the reason in one line, once it has ended."""
        assert self._exited is not None, f"{self.name} was not started"
        return self._exited

    async def start(self) -> None:
        """Start it; raises StartupError when there can be no process."""
        # A pipe of our own: asyncio's `wait()` also waits for pipes, which a grandchild may keep open.
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"{self.name} cannot be started: {error.strerror}") from error
        finally:
            os.close(write_end)
        self.pid = process.pid
        self._exited = asyncio.create_task(self._watch(process, reader))

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_seconds`."""
        if self._exited is None or self._exited.done():
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        await asyncio.wait({self._exited}, timeout=grace_seconds)
        self.kill()
        await asyncio.wait({self._exited})

    def kill(self) -> None:
        """Send SIGKILL to it and all that it has started."""
        if self._exited is not None and not self._exited.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _watch(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> str:
        reading = asyncio.create_task(self._read(reader))
        code = await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it left behind
        await asyncio.wait({reading}, timeout=OUTPUT_SECONDS)
        reading.cancel()
        how = f"{self.name} exited with code {code}"
        how += f" (killed by {signal.Signals(-code).name})" if code < 0 else ""
        if self._error:
            return f"{how}: last error: {self._error}"
        return f"{how}: last line: {self._last_line}" if self._last_line else how

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                line = (await reader.readline()).decode(errors="replace")
            except ValueError:  # longer than the limit; what was read of it is dropped
                continue
            if not line:
                return
            self._take(line.rstrip("\r\n"))

    def _take(self, line: str) -> None:
        if line.startswith(ERROR):
            self._error = line.removeprefix(ERROR)
            self._on_error_line(self._error)
        if line.strip():
            self._last_line = line
        with suppress(OSError):  # a full disk or a closed pipe: the line is lost, but the process does not block
            print(printable(f"{self.name} | {line}"), file=sys.stderr, flush=True)
