"""One child process: start it, hand on its output line by line, stop it politely and then firmly.

Knows nothing of shards or routers; the supervisor and the download are its callers.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from funitel.proto.printable import printable
from funitel.proto.process.logs import json_event

logger = logging.getLogger(__name__)

LONGEST_LINE = 1 << 20  # bytes; a child that never ends its line is cut here
OUTPUT_SECONDS = 1.0  # for the last output of a child that has exited
HURRY_AGAIN_SECONDS = 0.5


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
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Describe the child; `start` makes it.

        Args:
            name: for people, such as "shard rank 0".
            argv: command line.
            environ: its whole environment.
            on_line: called with each line of its output.
            stderr_through: leave stderr to the launcher's own instead of reading it together with stdout.
            pass_fds: descriptors that it gets, under the same numbers.
        """
        self.name = name
        self.error = ""
        self.last_line = ""
        self._argv = argv
        self._environ = environ
        self._on_line = on_line
        self._stderr_through = stderr_through
        self._pass_fds = pass_fds
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
                pass_fds=self._pass_fds,
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
        if self._exited is None or self._exited.done():
            return True
        self.ask_to_stop()
        return await self._ended_within(grace_seconds)

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        self._signal(os.kill, signal.SIGTERM)

    def ask_to_hand_over(self) -> None:
        """Send SIGUSR1, which a router takes as: serve what has reached you, and end; others take what comes."""
        self._signal(os.kill, signal.SIGUSR1)

    async def hurry(self, seconds: float) -> bool:
        """Ask again a process that was asked to end, and insist after so many seconds; return whether that was enough.

        It is asked more than once: a signal that comes before the first was taken is none.
        """
        asking = asyncio.create_task(self._keep_asking())
        try:
            return await self._ended_within(seconds)
        finally:
            asking.cancel()

    async def _keep_asking(self) -> None:
        while not self.has_exited:
            self.ask_to_stop()
            await asyncio.sleep(HURRY_AGAIN_SECONDS)

    async def _ended_within(self, seconds: float) -> bool:
        done, _ = await asyncio.wait({self.exited}, timeout=seconds)
        if not done:
            self.kill()
            await asyncio.wait({self.exited})
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


async def stop_child(child: Child, grace_seconds: float) -> None:
    """Stop a child; if it had to be killed a line says so."""
    if not await child.stop(grace_seconds):
        logger.warning("%s did not stop within %g s and was killed", child.name, grace_seconds)


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
        json_output: rewrite the events of shards as our own, pass those of the router as they are, and wrap any
            other line in one.
    """
    if json_output:
        return lambda line: _write(_event(process.replace(" ", "-"), line))
    return lambda line: _write(f"{process} | {line}")


def parse_record(line: str) -> dict[str, Any] | None:
    """The record of a line that a shard or download logged as JSON, in loguru's form; None for any other line."""
    event = _parse(line)
    record = event.get("record") if event else None
    return record if isinstance(record, dict) and {"level", "message", "time", "name"} <= record.keys() else None


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _event(process: str, line: str) -> str:
    record = parse_record(line)
    if record is not None:
        level, seconds = logging.getLevelName(record["level"]["name"]), record["time"]["timestamp"]
        more = dict(record["extra"]) if isinstance(record.get("extra"), dict) else {}
        more |= {"exception": record["exception"]} if record.get("exception") else {}
        return json_event(seconds, level, process, record["name"], record["message"], **more)
    if _parse(line) is not None:
        return line
    level = logging.ERROR if line.startswith("error: ") else logging.INFO
    return json_event(time.time(), level, process, "output", line)


def _write(line: str) -> None:
    with suppress(OSError):  # a full disk, or a reader that left: the line is lost, but the child must not wait for it
        print(printable(line), file=sys.stderr, flush=True)
