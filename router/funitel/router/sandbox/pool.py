"""A sandbox pool: run tasks on untrusted input in processes that are killed past a time or memory limit.

It knows neither grammars nor templates: a module that runs `sandbox.worker.serve` does the work. Tasks are written to
the processes ahead of their turns, so that many are answered in one iteration of a busy event loop. Event loop only.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from funitel.router.sandbox.process import SandboxProcess, SandboxTask
from funitel.router.sandbox.task_queue import TaskQueue

logger = logging.getLogger(__name__)

START_LIMIT_SECONDS = 60.0
MAX_START_DEATHS = 8  # in a row, of processes that the system killed before they were ready
START_PAUSE_SECONDS = 0.05  # after the first of these, doubled after each further one
MAX_DEATHS = 3  # in a row, of processes that the system killed, until the task counts as the reason
SLOW_SECONDS = 0.1  # for one task, after which those behind it move elsewhere; typical ones take less than 0.001


class Killed(Exception):
    """A task exceeded a limit; the message says which one, as in "it takes more than 5 s"."""


class WorkerUnavailable(Exception):
    """A process does not start, or refuses its setup; the latter is final."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class SandboxPool:
    """A few processes of one module; each is kept for further tasks unless it was killed."""

    def __init__(
        self,
        module: str,
        setup: Any,
        *,
        most: int,
        time_limit: float,
        memory_limit: int,
        max_answer_bytes: int = 1 << 20,
        readable: Sequence[str] = (),
        cpu_limit: float | None = None,
        niceness: int = 0,
        has_several_keys: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            module: run as a process; it is sent `setup`, and then the tasks. All of these are JSON.
            most: maximum of processes; with more than one, a slow task does not block the others.
            time_limit: seconds for a task, from when it is the first in its process.
            memory_limit: bytes of address space of a process.
            max_answer_bytes: a process that answers with more, attachment included, is killed.
            readable: files and folders that a process may read, beside those from which Python imports.
            cpu_limit: seconds of processor time for a task; None for no bound but `time_limit`.
            niceness: added to that of the router.
            has_several_keys: whether one API key must leave a process to others.
        """
        self.time_limit = time_limit
        self._cpu_limit = cpu_limit
        self._niceness = niceness
        self._module = module
        self._setup = setup
        self._most = most
        self._memory_limit = memory_limit
        self._max_answer_bytes = max_answer_bytes
        self._readable = readable
        self._missing: list[str] = []  # layers of confinement, as the last process reported
        self._most_of_a_key = max(1, most - 1) if has_several_keys else most
        self._waiting = TaskQueue()
        self._processes: set[SandboxProcess] = set()  # including those that start or end
        self._starting: set[asyncio.Task[WorkerUnavailable | None]] = set()

    async def run(self, value: Any, key: bytes = b"") -> Any:
        """Run a task of an API key and return its answer; see `run_attached`."""
        answer, _ = await self.run_attached(value, b"", key)
        return answer

    async def run_attached(self, value: Any, attached: bytes, key: bytes = b"") -> tuple[Any, bytes]:
        """Run a task of an API key with bytes of any content and return its answer, with the bytes that come with it.

        The keys of waiting tasks take turns.

        A caller that is cancelled while the task waits removes it; a task that a process has keeps running, since
        killing a process for each client that leaves would cost too much.

        Raises:
            Killed: it takes too much time or memory.
            WorkerUnavailable: no process can be started.
        """
        task = SandboxTask(value, key, attached)
        self._waiting.append(task)
        self._dispatch()
        try:
            return await task.answer
        finally:
            self._waiting.discard(task)

    async def warm_up(self) -> None:
        """Start one process. Raises WorkerUnavailable if that fails."""
        failure = await self._start()
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Kill the processes; callers that still wait are cancelled."""
        starting = list(self._starting)
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for task in (*self._waiting, *(each for process in self._processes for each in process.tasks)):
            task.answer.cancel()
        self._waiting.clear()
        await asyncio.gather(*(process.kill() for process in self._processes))
        self._processes.clear()

    def _start(self) -> "asyncio.Task[WorkerUnavailable | None]":
        task = asyncio.create_task(self._prepare(self._new()))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return task

    def _new(self) -> SandboxProcess:
        process = SandboxProcess(self._max_answer_bytes, self._on_answer, self._on_exit)
        self._processes.add(process)
        return process

    async def _prepare(self, process: SandboxProcess) -> WorkerUnavailable | None:
        """Set up a process, or return the failure; all waiting tasks fail with it unless another process is ready."""
        for num_deaths in range(1, MAX_START_DEATHS + 1):
            try:
                problem = await self._set_up(process)
            except (TimeoutError, OSError, Killed) as error:
                if isinstance(error, Killed) and process.was_killed and num_deaths < MAX_START_DEATHS:
                    process = self._new()
                    await asyncio.sleep(START_PAUSE_SECONDS * 2 ** (num_deaths - 1))
                    continue
                failure = WorkerUnavailable(f"the process {self._module} does not start", is_final=False)
            else:
                if problem is None:
                    process.is_ready = True
                    self._dispatch()
                    return None
                failure = WorkerUnavailable(problem, is_final=True)
            break
        await process.kill()
        self._processes.discard(process)
        if not any(other.is_ready for other in self._processes):
            for task in self._waiting:
                task.fail(failure)
            self._waiting.clear()
        return failure

    async def _set_up(self, process: SandboxProcess) -> Any:
        """Start a process and send it the setup; return what is wrong with that. Raises Killed if it has ended."""
        setup = SandboxTask(self._setup)
        setup.num_deaths = MAX_DEATHS  # it is not moved to another process
        try:
            async with asyncio.timeout(START_LIMIT_SECONDS):
                limits = (self._memory_limit, self._cpu_limit or 0.0, self._niceness)
                await process.start(self._module, limits, self._readable)
                process.assign(setup)
                (problem, missing), _ = await setup.answer
        except asyncio.CancelledError:
            process.kill_soon()
            raise
        if missing != self._missing:
            logger.debug("the sandbox of %s goes without %s", self._module, " and ".join(missing))
            self._missing = missing
        return problem

    def _dispatch(self) -> None:
        """Assign waiting tasks to processes, and start a process if some have to wait."""
        passed_over: set[bytes] = set()
        while (task := self._waiting.first(passed_over)) is not None:
            taking = [each for each in self._processes if each.takes(task)]
            if not taking:
                break
            process = min((each for each in taking if self._may_use(each, task.key)), key=_load, default=None)
            if process is None:
                passed_over.add(task.key)
                continue
            self._waiting.take(task)
            self._give(task, process)
        num_waiting = len(self._waiting) + sum(len(each.tasks) - 1 for each in self._processes if each.tasks)
        if num_waiting > len(self._starting) and len(self._processes) < self._most:
            self._start()

    def _may_use(self, process: SandboxProcess, key: bytes) -> bool:
        """Whether a key may use a process without more of them than a key may have."""
        return process.keys[key] > 0 or sum(each.keys[key] > 0 for each in self._processes) < self._most_of_a_key

    def _give(self, task: SandboxTask, process: SandboxProcess) -> None:
        if task.answer.done():  # answered meanwhile, or its caller was cancelled
            return
        process.assign(task)
        if len(process.tasks) == 1:
            self._watch(process)

    def _requeue(self, tasks: Iterable[SandboxTask], process: SandboxProcess) -> None:
        """Put tasks of a process back at the head of the queue."""
        for task in reversed(list(tasks)):
            if task.process is process and not task.answer.done():
                task.process = None
                process.keys[task.key] -= 1
                self._waiting.put_back(task)

    def _watch(self, process: SandboxProcess) -> None:
        """Set the timer of a process for when its first task is slow, and then for when it times out."""
        if process.watch is not None:
            process.watch.cancel()
            process.watch = None
        if process.tasks:
            seconds = self.time_limit if process.is_slow else min(SLOW_SECONDS, self.time_limit)
            process.watch = asyncio.get_running_loop().call_at(process.head_since + seconds, self._on_timeout, process)

    def _on_timeout(self, process: SandboxProcess) -> None:
        head, *behind = process.tasks
        is_late = process.is_slow or self.time_limit <= SLOW_SECONDS
        if is_late or self._most > 1:
            self._requeue(behind, process)
        if is_late:
            head.fail(Killed(f"it takes more than {self.time_limit:g} s"))
            process.kill_soon()
        process.is_slow = True
        self._watch(process)
        self._dispatch()

    def _exceeded(self, process: SandboxProcess) -> str:
        """The limit that ended a process."""
        return (
            f"{self._cpu_limit:g} s of processor time" if process.was_timed_out else f"{self._memory_limit >> 20} MiB"
        )

    def _on_answer(self, process: SandboxProcess) -> None:
        self._watch(process)
        self._dispatch()

    def _on_exit(self, process: SandboxProcess) -> None:
        """Fail the first task of a process that has ended, unless the system killed it; requeue the others."""
        self._processes.discard(process)
        if process.tasks:
            head = process.tasks[0]
            head.num_deaths += 1
            if not process.was_killed or head.num_deaths >= MAX_DEATHS:
                head.fail(Killed(f"it takes more than {self._exceeded(process)}"))
            self._requeue(process.tasks, process)
            process.tasks.clear()
        self._watch(process)
        self._dispatch()


def _load(process: SandboxProcess) -> int:
    return process.num_bytes
