"""One process that `killable` asks, and the questions that are with it. Event loop only.

Questions and answers are frames, each a length in four bytes and as many bytes of JSON. Questions may be written before
others are answered: the answers come in the same order, and as many as have come are read in one go.
"""

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

AHEAD_BYTES = 1 << 16  # of questions that are with a process at a time, unless one alone is larger: what a pipe holds
HEAD_BYTES = 4


class SandboxTask:
    """What somebody wants to know. Cancelling `answer` is to want it no more.

    `process` is the one it was given to last; `num_deaths` counts those that somebody else killed as they answered it.
    """

    __slots__ = ("answer", "frame", "num_deaths", "process")

    def __init__(self, value: Any) -> None:
        payload = json.dumps(value).encode()
        self.frame = len(payload).to_bytes(HEAD_BYTES, "big") + payload
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.process: SandboxProcess | None = None
        self.num_deaths = 0

    def fail(self, error: Exception) -> None:
        """Tell whoever still asks."""
        if not self.answer.done():
            self.answer.set_exception(error)


class SandboxProcess(asyncio.SubprocessProtocol):
    """Answers one question after the other, the `asked`, until it ends. Only the first of them is being worked on.

    `has_answered` is called after answers have come, `has_ended` when the process and all it has written are gone.
    """

    def __init__(
        self,
        most_answer_bytes: int,
        has_answered: "Callable[[SandboxProcess], None]",
        has_ended: "Callable[[SandboxProcess], None]",
    ) -> None:
        self.asked: deque[SandboxTask] = deque()
        self.num_bytes = 0  # of these
        self.head_since = 0.0  # when the first of them was begun, on the loop's clock, as far as is known here
        self.is_ready = False  # to take questions
        self.is_slow = False  # with the first question
        self.watch: asyncio.TimerHandle | None = None
        self._most_answer_bytes = most_answer_bytes
        self._has_answered = has_answered
        self._has_ended = has_ended
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._is_deaf = False
        self._transport: asyncio.SubprocessTransport | None = None
        self._end = self._loop.create_future()

    async def start(self, module: str, memory_limit: int) -> None:
        """Run a module that serves as `killable_worker` does. Raises OSError if it cannot be run."""
        await self._loop.subprocess_exec(
            lambda: self,
            *(sys.executable, "-m", module, str(memory_limit), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        """Its id, once it has been started."""
        assert self._transport is not None
        return self._transport.get_pid()

    def takes(self, question: SandboxTask) -> bool:
        """Whether a question may be given to it, behind those it has."""
        if not self.is_ready or not self.asked:
            return self.is_ready
        return not self.is_slow and self.num_bytes + len(question.frame) <= AHEAD_BYTES

    def give(self, question: SandboxTask) -> None:
        """Ask it a question, behind those it has."""
        if not self.asked:
            self.head_since = self._loop.time()
        self.asked.append(question)
        question.process = self
        self.num_bytes += len(question.frame)
        if not self._stdin.is_closing():  # else it is about to end
            self._stdin.write(question.frame)

    @property
    def was_killed(self) -> bool:
        """Whether it died of somebody else: that says nothing about what it was asked."""
        assert self._transport is not None
        return self._transport.get_returncode() == -signal.SIGKILL

    async def kill(self) -> None:
        """End it, whatever it does, and wait for that."""
        self.kill_soon()
        if self._transport is not None:
            await asyncio.shield(self._end)

    def kill_soon(self) -> None:
        """End it, whatever it does; nothing that it still says counts."""
        self.asked.clear()
        self._end_by(signal.SIGKILL)

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It runs."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take the answers that are whole."""
        if self._is_deaf:
            return
        received = self._received
        received += data
        begin = 0
        while self.asked and len(received) >= (body := begin + HEAD_BYTES):
            size = int.from_bytes(received[begin:body], "big")
            if size > self._most_answer_bytes:
                self._end_by(signal.SIGTERM)  # and so by what it was asked
                return
            if len(received) < body + size:
                break
            self._take(json.loads(received[body : body + size]))
            begin = body + size
        del received[:begin]
        if begin:
            self.head_since = self._loop.time()
            self.is_slow = False
            self._has_answered(self)

    def _take(self, answer: Any) -> None:
        question = self.asked.popleft()
        self.num_bytes -= len(question.frame)
        if not question.answer.done():
            question.answer.set_result(answer)

    def _end_by(self, signum: int) -> None:
        """Send it a signal, and listen no more; what it still writes is read, else its end would not be noticed."""
        self.is_ready = False
        self._is_deaf = True
        self._received.clear()
        if self._transport is not None:
            with suppress(ProcessLookupError):
                self._transport.send_signal(signum)

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended, and all it has written was received."""
        self.is_ready = False
        assert self._transport is not None
        self._transport.close()
        self._end.set_result(None)
        self._has_ended(self)
