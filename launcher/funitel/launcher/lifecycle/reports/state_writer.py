"""Write the state of models as they change, in the order of the changes, without having the event loop wait."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from funitel.launcher.control_plane.records import ModelEvent
from funitel.launcher.control_plane.store import StateStore, StateThread, StoredModel
from funitel.proto.errors import FunitelError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # after a write that has failed


class StateWriter:
    """A queue of what is to be written; a model that changes often is written once."""

    def __init__(self, state: StateThread) -> None:
        self._state = state
        self._models: dict[str, Callable[[], StoredModel] | None] = {}  # None: to be forgotten
        self._events: list[tuple[str, ModelEvent]] = []
        self._loads: list[tuple[str, float]] = []
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._run())

    def save(self, name: str, stored: Callable[[], StoredModel]) -> None:
        """Have a model written as it is then."""
        self._models[name] = stored
        self._wake()

    def forget(self, name: str) -> None:
        """Have a model removed."""
        self._models[name] = None
        self._wake()

    def add_event(self, name: str, event: ModelEvent) -> None:
        """Have an event written."""
        self._events.append((name, event))
        self._wake()

    def add_load(self, key: str, seconds: float) -> None:
        """Have the duration of a load written."""
        self._loads.append((key, seconds))
        self._wake()

    def _wake(self) -> None:
        self._idle.clear()
        self._wanted.set()

    async def flushed(self) -> None:
        """Wait until all is written."""
        await self._idle.wait()

    async def close(self) -> None:
        """Write what is left, and end; the state is not closed."""
        self._wake()
        await self.flushed()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            models, self._models = self._models, {}
            events, self._events = self._events, []
            loads, self._loads = self._loads, []
            for name, stored in models.items():
                if not await self._try(self._write(name, stored)) and name not in self._models:
                    self._models[name] = stored
                    asyncio.get_running_loop().call_later(RETRY_SECONDS, self._wanted.set)
            for name, event in events:
                await self._try(self._state(StateStore.add_event, name, event))
            for key, seconds in loads:
                await self._try(self._state(StateStore.add_load, key, seconds))
            if not self._wanted.is_set():
                self._idle.set()

    async def _write(self, name: str, stored: Callable[[], StoredModel] | None) -> None:
        if stored is None:
            await self._state(StateStore.forget_model, name)
            return
        model = stored()
        await self._state(StateStore.save_model, model.entry, model.request, is_wanted=model.is_wanted)

    async def _try(self, writing: Awaitable[None]) -> bool:
        """Return whether it was written."""
        try:
            await writing
        except FunitelError as error:  # such as a full disk: models go on
            logger.error("the state cannot be written: %s", error.message)
            return False
        return True
