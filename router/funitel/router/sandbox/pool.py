"""Work on what others wrote, in processes that may be killed: it ends within a time and a memory, or they do.

Knows neither grammars nor templates: a module that runs `killable_worker.serve` does the work. Questions are handed to
the processes ahead of their turns, so that many are answered for each turn of a busy event loop. Event loop only.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from funitel.router.sandbox.process import SandboxProcess, SandboxTask

START_LIMIT_SECONDS = 60.0
MOST_START_DEATHS = 8  # in a row, of processes that somebody else killed before they were ready
START_PAUSE_SECONDS = 0.05  # after the first of these, and twice as long after each further one
MOST_DEATHS = 3  # of processes in a row that somebody else killed, until the question is thought to be the reason
SLOW_SECONDS = 0.1  # for one question, after which those behind it are asked elsewhere; most take less than 0.001


class Killed(Exception):
    """A question was not answered within the limits; says which one, as in "it takes more than 5 s"."""


class WorkerUnavailable(Exception):
    """A process does not start; or it says why it is of no use, which is `is_final`."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class SandboxPool:
    """Asks processes of one module, a few at a time; each is kept for the next questions unless it was killed."""

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
            time_limit: seconds for a question, from when nothing is before it in its process.
            memory_limit: bytes of addresses that a process may have.
            most_answer_bytes: a process that answers with more is killed.
        """
        self.time_limit = time_limit
        self._module = module
        self._setup = setup
        self._most = most
        self._memory_limit = memory_limit
        self._most_answer_bytes = most_answer_bytes
        self._waiting: OrderedDict[SandboxTask, None] = OrderedDict()  # in their order
        self._processes: set[SandboxProcess] = set()  # those too that start, or that are ending
        self._starting: set[asyncio.Task[WorkerUnavailable | None]] = set()

    async def ask(self, value: Any) -> Any:
        """Have a question answered.

        A caller that is cancelled while it waits for its turn leaves nothing behind; later, the answer is awaited all
        the same: to kill a process for each client that leaves would be dear.

        Raises:
            Killed: it takes too much time or memory.
            WorkerUnavailable: there is no process to ask.
        """
        question = SandboxTask(value)
        self._waiting[question] = None
        self._hand_out()
        try:
            return await question.answer
        finally:
            self._waiting.pop(question, None)

    async def warm_up(self) -> None:
        """Have one process ready. Raises WorkerUnavailable if there cannot be one."""
        failure = await self._start()
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """End the processes, whatever they do; whoever still asks is cancelled."""
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for question in (*self._waiting, *(each for process in self._processes for each in process.asked)):
            question.answer.cancel()
        self._waiting.clear()
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()

    def _start(self) -> "asyncio.Task[WorkerUnavailable | None]":
        task = asyncio.create_task(self._prepare(self._new()))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return task

    def _new(self) -> SandboxProcess:
        process = SandboxProcess(self._most_answer_bytes, self._has_answered, self._has_ended)
        self._processes.add(process)
        return process

    async def _prepare(self, process: SandboxProcess) -> WorkerUnavailable | None:
        """Make a process ready, or say why it cannot be: that is for all who wait, unless there is another one."""
        for num_deaths in range(1, MOST_START_DEATHS + 1):
            try:
                problem = await self._introduce(process)
            except (TimeoutError, OSError, Killed) as error:
                if isinstance(error, Killed) and process.was_killed and num_deaths < MOST_START_DEATHS:
                    process = self._new()
                    await asyncio.sleep(START_PAUSE_SECONDS * 2 ** (num_deaths - 1))
                    continue
                failure = WorkerUnavailable(f"the process {self._module} does not start", is_final=False)
            else:
                if problem is None:
                    process.is_ready = True
                    self._hand_out()
                    return None
                failure = WorkerUnavailable(problem, is_final=True)
            break
        await process.kill()
        self._processes.discard(process)
        if not any(other.is_ready for other in self._processes):
            for question in self._waiting:
                question.fail(failure)
            self._waiting.clear()
        return failure

    async def _introduce(self, process: SandboxProcess) -> Any:
        """Run a process and tell it the setup; returns what it has against that. Raises Killed when it has ended."""
        setup = SandboxTask(self._setup)
        setup.num_deaths = MOST_DEATHS  # it is asked nowhere else
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                await process.start(self._module, self._memory_limit)
                process.give(setup)
                return await setup.answer
        except asyncio.CancelledError:
            process.kill_soon()
            raise

    def _hand_out(self) -> None:
        """Give the processes as many of the waiting questions as they take, and start one if some have to wait."""
        while self._waiting:
            question = next(iter(self._waiting))
            process = min((each for each in self._processes if each.takes(question)), key=_load, default=None)
            if process is None:
                break
            del self._waiting[question]
            self._give(question, process)
        num_waiting = len(self._waiting) + sum(len(each.asked) - 1 for each in self._processes if each.asked)
        if num_waiting > len(self._starting) and len(self._processes) < self._most:
            self._start()

    def _give(self, question: SandboxTask, process: SandboxProcess) -> None:
        if question.answer.done():  # it was taken back too late, or nobody asks any more
            return
        process.give(question)
        if len(process.asked) == 1:
            self._watch(process)

    def _take_back(self, questions: Iterable[SandboxTask], process: SandboxProcess) -> None:
        """Have questions that are with a process asked elsewhere, before all that came after them."""
        for question in reversed(list(questions)):
            if question.process is process and not question.answer.done():
                question.process = None
                self._waiting[question] = None
                self._waiting.move_to_end(question, last=False)

    def _watch(self, process: SandboxProcess) -> None:
        """Look at a process again when its first question is slow, and then when it is late."""
        if process.watch is not None:
            process.watch.cancel()
            process.watch = None
        if process.asked:
            seconds = self.time_limit if process.is_slow else min(SLOW_SECONDS, self.time_limit)
            process.watch = asyncio.get_running_loop().call_at(
                process.head_since + seconds, self._wait_no_more, process
            )

    def _wait_no_more(self, process: SandboxProcess) -> None:
        head, *behind = process.asked
        is_late = process.is_slow or self.time_limit <= SLOW_SECONDS
        if is_late or self._most > 1:
            self._take_back(behind, process)
        if is_late:
            head.fail(Killed(f"it takes more than {self.time_limit:g} s"))
            process.kill_soon()
        process.is_slow = True
        self._watch(process)
        self._hand_out()

    def _has_answered(self, process: SandboxProcess) -> None:
        self._watch(process)
        self._hand_out()

    def _has_ended(self, process: SandboxProcess) -> None:
        """Blame what a process was answering, unless somebody else has killed it; the rest is asked elsewhere."""
        self._processes.discard(process)
        if process.asked:
            head = process.asked[0]
            head.num_deaths += 1
            if not process.was_killed or head.num_deaths >= MOST_DEATHS:
                head.fail(Killed(f"it takes more than {self._memory_limit >> 20} MiB"))
            self._take_back(process.asked, process)
            process.asked.clear()
        self._watch(process)
        self._hand_out()


def _load(process: SandboxProcess) -> int:
    return process.num_bytes
