"""The two threads of an `LLM`: one runs the engine's event loop, one computes. Knows no models.

Both are daemons that are told to end and waited for. The pools of `concurrent.futures` would not do: they take no more
work once the main thread has ended, while other threads may still want answers.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from funitel.proto.errors import NotReady

T = TypeVar("T")

POLL_SECONDS = 0.1  # between two looks at the progress of a call
CANCEL_SECONDS = 60.0  # for a cancelled call to leave; only a thread that hangs needs longer

CLOSED = "this LLM is closed"

_Calls = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class ComputeThread:
    """Runs calls one after the other, in the order they were made."""

    def __init__(self) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=_compute, args=(self._calls,), name="funitel-compute", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call; once begun it cannot be cancelled."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Let the thread end after the calls made so far."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait until it has ended; not from within."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _compute(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        _call(*item)
        del item  # an idle thread keeps nothing alive


def _call(call: Callable[[], T], future: "Future[T]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class LoopThread:
    """An event loop in a thread of its own; other threads run coroutines on it and wait for them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        self._lock = threading.Lock()  # between closing and what must come before
        self._is_closed = False
        self._thread = threading.Thread(target=_turn, args=(self._loop,), name="funitel-engine", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run `work` to its end and call `meanwhile` now and then. An interrupt cancels `work` before it goes on.

        Raises:
            NotReady: the thread was closed, before or meanwhile.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                work.close()
                raise NotReady(CLOSED)
            self._loop.call_soon_threadsafe(self._begin, work, done)
        try:
            while not wait([done], timeout=POLL_SECONDS).done:
                meanwhile()
            meanwhile()
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel, done)
            wait([done], timeout=CANCEL_SECONDS)
            raise
        return done.result()

    def close(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Cancel whatever runs, then await `farewell`, then end."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end(farewell)))

    def join(self) -> None:
        """Wait until the thread has ended; not from within."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # On the loop

    def _begin(self, work: Coroutine[Any, Any, T], done: "Future[T]") -> None:
        def finish(task: "asyncio.Task[T]") -> None:
            del self._tasks[done]
            if task.cancelled():
                done.set_exception(NotReady("this LLM was closed before the answer was complete"))
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self._tasks[done] = self._loop.create_task(work)
        self._tasks[done].add_done_callback(finish)

    def _cancel(self, done: "Future[Any]") -> None:
        if done in self._tasks:
            self._tasks[done].cancel()

    async def _end(self, farewell: Callable[[], Awaitable[None]]) -> None:
        try:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await farewell()
        finally:
            self._loop.stop()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
