"""Work on what others wrote, in processes that may be killed: it ends within a time and a memory, or they do.

Knows neither grammars nor templates: a module that runs `killable_worker.serve` does the work. Event loop only.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

START_LIMIT_SECONDS = 60.0
MOST_DEATHS = 3  # of processes in a row that somebody else killed, until the question is thought to be the reason


class Killed(Exception):
    """A question was not answered within the limits; says which one, as in "it takes more than 5 s"."""


class CannotWork(Exception):
    """A process does not start; or it says why it is of no use, which is `is_final`."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class KillablePool:
    """Asks processes of one module, a few at a time; each is kept for the next question unless it was killed."""

    def __init__(
        self,
        module: str,
        setup: Any,
        *,
        most: int,
        time_limit: float,
        memory_limit: int,
        most_answer_bytes: int = 1 << 20,
    ) -> None:
        """Start nothing yet.

        Args:
            module: run as a process; it is told `setup`, and then the questions. All of these are JSON.
            most: processes at the same time, so that one bomb does not make others wait for its end.
            time_limit: seconds for a question.
            memory_limit: bytes of addresses that a process may have.
            most_answer_bytes: a process that answers with more is killed.
        """
        self.time_limit = time_limit
        self._module = module
        self._setup = json.dumps(setup).encode()
        self._memory_limit = memory_limit
        self._most_answer_bytes = most_answer_bytes
        self._slots = asyncio.Semaphore(most)
        self._idle: list[_Process] = []
        self._asking: set[asyncio.Task[Any]] = set()

    async def ask(self, question: Any) -> Any:
        """Have a question answered.

        A caller that is cancelled while it waits for its turn leaves nothing behind; later, the answer is awaited all
        the same: to kill a process for each client that leaves would be dear.

        Raises:
            Killed: it takes too much time or memory.
            CannotWork: there is no process to ask.
        """
        payload = json.dumps(question).encode()
        await self._slots.acquire()
        asking = asyncio.create_task(self._ask(payload))
        self._asking.add(asking)
        asking.add_done_callback(self._asked)
        return await asyncio.shield(asking)

    def _asked(self, asking: "asyncio.Task[Any]") -> None:
        self._asking.discard(asking)
        self._slots.release()

    async def _ask(self, payload: bytes) -> Any:
        for _ in range(MOST_DEATHS):
            async with self._lent() as process:
                try:
                    async with asyncio.timeout(self.time_limit):
                        return await process.ask(payload)
                except TimeoutError:
                    raise Killed(f"it takes more than {self.time_limit:g} s") from None
                except (OSError, EOFError):
                    if not await process.was_killed():
                        break
        raise Killed(f"it takes more than {self._memory_limit >> 20} MiB")

    async def warm_up(self) -> None:
        """Have one process ready. Raises CannotWork if there cannot be one."""
        async with self._slots, self._lent():
            pass

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator["_Process"]:
        """Lend a process, a fresh one if need be; whatever goes wrong with it is its end."""
        self._idle = [process for process in self._idle if process.is_alive]
        process = self._idle.pop() if self._idle else await self._start()
        try:
            yield process
        except BaseException:
            await process.kill()
            raise
        self._idle.append(process)

    async def _start(self) -> "_Process":
        failure = CannotWork(f"the process {self._module} does not start", is_final=False)
        try:
            process = await _Process.start(self._module, self._memory_limit, self._most_answer_bytes)
        except OSError:
            raise failure from None
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                problem = await process.ask(self._setup)
            if problem is not None:
                raise CannotWork(problem, is_final=True)
        except (TimeoutError, OSError, EOFError):
            await process.kill()
            raise failure from None
        except BaseException:
            await process.kill()
            raise
        return process

    async def close(self) -> None:
        """End the processes, whatever they do."""
        for asking in list(self._asking):
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        while self._idle:
            await self._idle.pop().kill()


class _Process:
    """One process and the frames to and from it: each a length in four bytes and as many bytes of JSON."""

    def __init__(self, process: asyncio.subprocess.Process, most_answer_bytes: int) -> None:
        self._process = process
        self._most_answer_bytes = most_answer_bytes

    @classmethod
    async def start(cls, module: str, memory_limit: int, most_answer_bytes: int) -> "_Process":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(memory_limit), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return cls(process, most_answer_bytes)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, payload: bytes) -> Any:
        """Send one frame and read one. Raises OSError or EOFError when the process ends, or answers with too much."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(len(payload).to_bytes(4, "big") + payload)
        await stdin.drain()
        size = int.from_bytes(await stdout.readexactly(4), "big")
        if size > self._most_answer_bytes:
            self._process.terminate()
            raise EOFError
        return json.loads(await stdout.readexactly(size))

    async def was_killed(self) -> bool:
        """Whether it died, after it has hung up, of somebody else: that says nothing about what it was asked."""
        return await self._end() == -signal.SIGKILL

    async def kill(self) -> None:
        if self.is_alive:
            self._process.kill()
        await self._end()

    async def _end(self) -> int:
        """Wait for its end, behind all that it has written: with a pipe that nobody reads it would not be noticed."""
        assert self._process.stdout is not None
        with suppress(OSError):
            while await self._process.stdout.read(1 << 20):
                pass
        return await self._process.wait()
