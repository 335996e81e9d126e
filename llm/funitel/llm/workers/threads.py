"""Run the two threads of an `LLM`: one for the engine's event loop, one for computing.

Both are daemon threads that are closed and joined. Executors of `concurrent.futures` are unsuitable: they accept no
work once the main thread has ended, while other threads may still make calls.
"""

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from funitel.proto.errors import NotReady

T = TypeVar("T")

POLL_SECONDS = 0.1  # between two progress updates of a call
CANCEL_SECONDS = 60.0  # timeout of a cancelled call; only a hung thread needs longer

CLOSED = "this LLM is closed"
CLOSED_EARLY = "this LLM was closed before the answer was complete"

_Calls = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class ComputeThread:
    """Runs calls one at a time, in the order in which they were made."""

    def __init__(self) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=_compute, args=(self._calls,), name="funitel-compute", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call; a running call cannot be cancelled."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """End the thread after the calls made so far."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait until it has ended, unless called on this thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _compute(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        _call(*item)
        del item  # an idle thread holds no references


def _call(call: Callable[[], T], future: "Future[T]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # the caller of `result` gets it
        future.set_exception(error)


class LoopThread:
    """An event loop in its own thread; other threads run coroutines on it and wait for them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[Future[Any], asyncio.Task[Any]] = {}
        self._lock = threading.Lock()  # serialises `close` and the start of calls
        self._is_closed = False
        self._thread = threading.Thread(target=_turn, args=(self._loop,), name="funitel-engine", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run `work` to its end and call `meanwhile` regularly. An interrupt cancels `work`.

        Raises:
            NotReady: the thread was closed before or during the call.
        """
        done: Future[T] = Future()
        with ExitStack() as undo:
            with self._lock:
                if self._is_closed:
                    work.close()
                    raise NotReady(CLOSED)
                undo.callback(self._give_up, work, done)  # before the start: an interrupt may come right behind it
                self._loop.call_soon_threadsafe(self._begin, work, done)
            while not wait([done], timeout=POLL_SECONDS).done:
                meanwhile()
            meanwhile()
            undo.pop_all()
        return done.result()

    def _give_up(self, work: Coroutine[Any, Any, T], done: "Future[T]") -> None:
        """Cancel work that was started, or is not going to be, and wait for its end."""
        self._loop.call_soon_threadsafe(self._cancel, work, done)
        wait([done], timeout=CANCEL_SECONDS)

    def post(self, call: Callable[[], None]) -> None:
        """Run a call on the loop soon; calls run in the order in which they were posted.

        Raises:
            NotReady: the thread was closed.
        """
        with self._lock:
            if self._is_closed:
                raise NotReady(CLOSED)
            self._loop.call_soon_threadsafe(call)

    def post_if_open(self, call: Callable[[], None]) -> None:
        """Run a call on the loop soon, unless the thread has ended; takes no lock, so that finalizers may call it."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    def close(self, shut_down: Callable[[], Awaitable[None]]) -> None:
        """Cancel running calls, then await `shut_down`, then end."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end(shut_down)))

    def join(self) -> None:
        """Wait until the thread has ended, unless called on this thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # On the loop

    def _begin(self, work: Coroutine[Any, Any, T], done: "Future[T]") -> None:
        def finish(task: "asyncio.Task[T]") -> None:
            del self._tasks[done]
            if task.cancelled():
                done.set_exception(NotReady(CLOSED_EARLY))
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self._tasks[done] = self._loop.create_task(work)
        self._tasks[done].add_done_callback(finish)

    def _cancel(self, work: Coroutine[Any, Any, T], done: "Future[T]") -> None:
        if done in self._tasks:
            self._tasks[done].cancel()
        elif done.cancel():  # it was not started
            work.close()
            done.set_running_or_notify_cancel()

    async def _end(self, shut_down: Callable[[], Awaitable[None]]) -> None:
        try:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await shut_down()
            await asyncio.sleep(0)  # transports that were closed give up their sockets
        finally:
            self._loop.stop()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
