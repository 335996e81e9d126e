"""Run the jobs of calls on a compute thread: the event loop's own (inline) or another (threaded).

On a CPU the model needs every core it is given. A second thread that reads, describes and sends takes one away, and on
a crowded core an answer waits until the kernel lets that thread run. So an event loop runs on the compute thread
(`ComputeLoop`): a call is read, computed and answered without a hand-over. The compute thread of a GPU launches the
next step while the device computes the last, and a third thread waits for the result of that.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor as ThreadExecutor
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

import uvloop

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Runs jobs one by one in order of arrival; used on one event loop, where it reports their results."""

    def run(
        self,
        job: Callable[[], T],
        finish: Callable[[T], R],
        done: Callable[[R], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """Run `job` after earlier jobs, then `finish` on its result, after earlier ones are finished.

        Then call `done` with the result, or `failed` with the exception of either.
        """


def attempt(work: Callable[[], T], done: Callable[[T], object], failed: Callable[[Exception], object]) -> None:
    """Call `done` with what `work` returns, or `failed` with what it raises."""
    try:
        result = work()
    except Exception as error:  # any failure of a call is its reply, and the shard goes on
        failed(error)
    else:
        done(result)


async def drained(runner: Runner) -> None:
    """Wait until every job of `runner` so far is done and its result reported."""
    is_last = asyncio.Event()
    runner.run(lambda: None, lambda _: None, lambda _: is_last.set(), lambda _: is_last.set())
    await is_last.wait()


class ThreadedRunner:
    """Jobs run on the one thread of `compute`, and are finished on that of `answers`, which may wait for a device.

    The next job is at hand before the last has ended, and runs while the last is finished.
    """

    def __init__(self, compute: ThreadExecutor, answers: ThreadExecutor) -> None:
        self._compute = compute
        self._answers = answers

    def run(
        self,
        job: Callable[[], T],
        finish: Callable[[T], R],
        done: Callable[[R], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """See `Runner`."""
        loop = asyncio.get_running_loop()

        def tell_done(result: R) -> None:
            loop.call_soon_threadsafe(done, result)

        def tell_failed(error: Exception) -> None:
            loop.call_soon_threadsafe(failed, error)

        def answer(computed: T) -> None:
            self._answers.submit(attempt, partial(finish, computed), tell_done, tell_failed)

        def fail(error: Exception) -> None:
            self._answers.submit(tell_failed, error)

        self._compute.submit(attempt, job, answer, fail)


class InlineRunner:
    """Jobs run on the event loop's thread, one a turn: what one has answered is sent before the next begins."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()

    def run(
        self,
        job: Callable[[], T],
        finish: Callable[[T], R],
        done: Callable[[R], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """See `Runner`."""

        self._jobs.append(partial(attempt, lambda: finish(job()), done, failed))
        if len(self._jobs) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        try:
            self._jobs[0]()
        finally:
            self._jobs.popleft()
            if self._jobs:
                asyncio.get_running_loop().call_soon(self._turn)


class ComputeLoop:
    """An event loop that turns on the one thread of `compute` from `start` to `stop`."""

    def __init__(self, compute: ThreadExecutor) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._compute = compute
        self._ended: Future[None] | None = None

    def start(self) -> None:
        """Begin to turn, after what was submitted to the thread before."""
        self._ended = self._compute.submit(self._turn)

    def _turn(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there; awaited on another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def stop(self) -> None:
        """End it after the current turn, with what still waits: jobs of a runner, or bytes to be sent."""
        if self._ended is None:
            self.loop.close()
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.wrap_future(self._ended)
