"""Background tasks: kept while they run, cancelled together. Event loop only."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from funitel.proto.errors import FunitelError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Tasks:
    """A set of running tasks. Their exceptions are logged, except a FunitelError, which their caller handles."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run `work`, and keep a reference to it meanwhile."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, FunitelError):
            logger.error("a task failed", exc_info=error)

    async def ended(self) -> None:
        """Return once none runs."""
        while self._running:
            await asyncio.wait(tuple(self._running))

    async def cancel(self) -> None:
        """Cancel all that run, and wait for them."""
        for task in tuple(self._running):
            task.cancel()
        await self.ended()
