"""One sandbox process, and the tasks that it was assigned. Event loop only.

Tasks and answers are frames: two lengths of four bytes, then as many bytes of JSON, and as many bytes of any content,
the attachment. Tasks may be written before earlier ones are answered; answers come in the same order, and all that have
arrived are read at once.
"""

import asyncio
import json
import os
import signal
import struct
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from funitel.proto.process.python import module_command

AHEAD_BYTES = 1 << 16  # of tasks assigned to a process at a time, unless one alone is larger: the capacity of a pipe
HEAD_BYTES = 8
_HEAD = struct.Struct(">II")
# Where Python and the C library find packages, and the local time.
KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TZ", "TZDIR")


class SandboxTask:
    """One task, and its answer with the attachment; cancelling `answer` withdraws it.

    `key` is the API key it is for, as a hash; `process` is the one it was assigned to last; `num_deaths` counts
    processes that the system killed while they worked on it.
    """

    __slots__ = ("answer", "frame", "key", "num_deaths", "process")

    def __init__(self, value: Any, key: bytes = b"", attached: bytes = b"") -> None:
        payload = json.dumps(value).encode()
        self.frame = b"".join([_HEAD.pack(len(payload), len(attached)), payload, attached])
        self.answer: asyncio.Future[tuple[Any, bytes]] = asyncio.get_running_loop().create_future()
        self.key = key
        self.process: SandboxProcess | None = None
        self.num_deaths = 0

    def fail(self, error: Exception) -> None:
        """Raise an error to the caller, if it still waits."""
        if not self.answer.done():
            self.answer.set_exception(error)


class SandboxProcess(asyncio.SubprocessProtocol):
    """Works on the first of its `tasks`, one after the other, until it ends.

    `on_answer` is called after answers have arrived, `on_exit` when the process has ended and its output was read.
    """

    def __init__(
        self,
        max_answer_bytes: int,
        on_answer: "Callable[[SandboxProcess], None]",
        on_exit: "Callable[[SandboxProcess], None]",
    ) -> None:
        self.tasks: deque[SandboxTask] = deque()
        self.num_bytes = 0  # of these
        self.keys: Counter[bytes] = Counter()  # of those that were assigned to no other process since
        self.head_since = 0.0  # when the first of them became the first, on the loop's clock
        self.is_ready = False  # to take tasks
        self.is_slow = False  # with the first task
        self.watch: asyncio.TimerHandle | None = None
        self._max_answer_bytes = max_answer_bytes
        self._on_answer = on_answer
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._ignores_output = False
        self._transport: asyncio.SubprocessTransport | None = None
        self._end = self._loop.create_future()

    async def start(self, module: str, limits: tuple[int, float, int], readable: Sequence[str]) -> None:
        """Run a module that calls `sandbox.worker.serve`. Raises OSError if it cannot be run.

        Args:
            module: its name.
            limits: bytes of address space, seconds of processor time for a task (0 for any), niceness.
            readable: files and folders.
        """
        await self._loop.subprocess_exec(
            lambda: self,
            *module_command(module),
            *(str(os.getpid()), *map(str, limits), *readable),
            env=environment(os.environ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        """Its id, once it has been started."""
        assert self._transport is not None
        return self._transport.get_pid()

    def takes(self, task: SandboxTask) -> bool:
        """Whether it may be assigned another task."""
        if not self.is_ready or not self.tasks:
            return self.is_ready
        return not self.is_slow and self.num_bytes + len(task.frame) <= AHEAD_BYTES

    def assign(self, task: SandboxTask) -> None:
        """Assign it a task, behind those it has."""
        if not self.tasks:
            self.head_since = self._loop.time()
        self.tasks.append(task)
        task.process = self
        self.keys[task.key] += 1
        self.num_bytes += len(task.frame)
        if not self._stdin.is_closing():  # else it is about to end
            self._stdin.write(task.frame)

    @property
    def was_killed(self) -> bool:
        """Whether the system killed it, for which its task may not be the reason."""
        assert self._transport is not None
        return self._transport.get_returncode() == -signal.SIGKILL

    @property
    def was_timed_out(self) -> bool:
        """Whether its task took more processor time than one may."""
        assert self._transport is not None
        return self._transport.get_returncode() == -signal.SIGPROF

    async def kill(self) -> None:
        """Kill it and wait until it has ended."""
        self.kill_soon()
        if self._transport is not None:
            await asyncio.shield(self._end)

    def kill_soon(self) -> None:
        """Kill it; its further output is ignored."""
        self.tasks.clear()
        self._end_by(signal.SIGKILL)

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that it runs."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take the complete answers."""
        if self._ignores_output:
            return
        received = self._received
        received += data
        begin = 0
        while self.tasks and len(received) >= (body := begin + HEAD_BYTES):
            size, attached = _HEAD.unpack_from(received, begin)
            if size + attached > self._max_answer_bytes:
                self._end_by(signal.SIGTERM)  # so that its task counts as the reason
                return
            begin_attached = body + size
            if len(received) < begin_attached + attached:
                break
            end = begin_attached + attached
            with memoryview(received) as view:  # an attachment may be large, and is copied once
                content = bytes(view[begin_attached:end])
            self._take(json.loads(received[body:begin_attached]), content)
            begin = end
        del received[:begin]
        if begin:
            self.head_since = self._loop.time()
            self.is_slow = False
            self._on_answer(self)

    def _take(self, answer: Any, attached: bytes) -> None:
        task = self.tasks.popleft()
        if task.process is self:
            self.keys[task.key] -= 1
        self.num_bytes -= len(task.frame)
        if not task.answer.done():
            task.answer.set_result((answer, attached))

    def _end_by(self, signum: int) -> None:
        """Send it a signal; its further output is read, so that its end is noticed, and ignored."""
        self.is_ready = False
        self._ignores_output = True
        self._received.clear()
        if self._transport is not None:
            with suppress(ProcessLookupError):
                self._transport.send_signal(signum)

    def connection_lost(self, error: Exception | None) -> None:
        """Note that it has ended, and all of its output was received."""
        self.is_ready = False
        assert self._transport is not None
        self._transport.close()
        self._end.set_result(None)
        self._on_exit(self)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a sandbox process: where it finds packages and the local time, nothing secret.

    Tokenizers start no threads: each process has one task at a time, and there are several.
    """
    kept = {name: environ[name] for name in KEPT_VARIABLES if name in environ}
    return kept | {"PYTHONPATH": os.pathsep.join(_search_path()), "TOKENIZERS_PARALLELISM": "false"}


def _search_path() -> list[str]:
    """Where this process imports from; not the working folder, unless funitel is imported from it."""
    folders = [os.path.abspath(folder) for folder in sys.path if folder]
    return [folder for folder in folders if folder != os.getcwd() or __file__.startswith(folder + os.sep)]
