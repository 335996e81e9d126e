"""Tell the control plane what holds of each replica: whether it is attached, failed to be, or is released."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from funitel.proto.errors import NotReady
from funitel.router.core.background_tasks import Tasks
from funitel.router.fleet.control import ControlSocket

TELL_SECONDS = 0.2  # between two attempts to tell the control plane


class Told:
    """Tells the control plane, once it answers, what is true of each replica by then."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control
        self._tasks = Tasks()
        self._latest: dict[tuple[str, int], asyncio.Task[None]] = {}  # what is yet to be said, by model and replica

    def say(self, target: str, content: dict[str, Any]) -> None:
        """Say one thing of a replica, in the background, instead of what has not been said of it yet."""
        about = content["model"], content["replica"]
        if about in self._latest:
            self._latest[about].cancel()
        task = self._latest[about] = self._tasks.start(self._say(target, content))
        task.add_done_callback(partial(self._forget, about))

    def _forget(self, about: tuple[str, int], task: "asyncio.Task[None]") -> None:
        if self._latest.get(about) is task:
            del self._latest[about]

    async def _say(self, target: str, content: dict[str, Any]) -> None:
        while True:
            with suppress(NotReady):
                await self._control.tell(target, content)
                return
            await asyncio.sleep(TELL_SECONDS)

    async def close(self) -> None:
        """Say nothing more."""
        await self._tasks.cancel()
