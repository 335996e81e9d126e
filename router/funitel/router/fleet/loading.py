"""Loads on demand: a request that names a model which is not attached asks for its load, and waits for it.

All requests that wait for one model are one load. Event loop only.
"""

import asyncio
import time
from math import inf

from funitel.proto.errors import (
    DeadlineExceeded,
    FunitelError,
    ModelNotFound,
    ModelNotLoaded,
    NotReady,
    Overloaded,
    ShuttingDown,
)
from funitel.router.core.background_tasks import Tasks
from funitel.router.core.drain import SHUTTING_DOWN
from funitel.router.fleet.control import ControlAnswer, ControlSocket, LoadRefused
from funitel.router.fleet.models import ServedModel, ServedModels
from funitel.router.fleet.snapshot import FAILED, UNLOADED
from funitel.router.serving.service import Service

LOAD = "/v1/fleet/load"
RETRY_SECONDS = 0.5  # between two attempts to reach the control plane
REPEAT_SECONDS = 1.0  # after which a load that the control plane has forgotten is asked for again
ADMITTED_SECONDS = 30.0  # that a request waits at least which another router has admitted
STALE_SECONDS = 2.0  # that a model may be `failed` after its load was asked for again, before that counts


class _Load:
    """A load that requests wait for."""

    def __init__(self, model: ServedModel) -> None:
        self.asked = time.monotonic()
        self.accepted: float | None = None
        self.was_failed = model.entry.state == FAILED  # and nothing was heard of this load yet

    def has_failed(self, state: str) -> bool:
        """Whether the state is that of this load, and it has failed."""
        if state != FAILED:
            self.was_failed = False
            return False
        if not self.was_failed:
            return True
        return self.accepted is not None and time.monotonic() - self.accepted >= STALE_SECONDS


class Loads:
    """The loads that requests wait for.

    Args:
        models: the table.
        control: asked for loads.
        wait_seconds: that a request waits at most; 0 for not at all.
    """

    def __init__(self, models: ServedModels, control: ControlSocket, wait_seconds: float) -> None:
        self._models = models
        self._control = control
        self._wait_seconds = wait_seconds
        self._loads: dict[ServedModel, _Load] = {}
        self._asking: dict[ServedModel, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    async def attached(
        self, model: ServedModel, max_requests: int, deadline: float | None = None, *, was_admitted: bool = False
    ) -> Service:
        """Wait until a model takes requests, and return its service.

        Args:
            model: of the table.
            max_requests: that may wait for it at once.
            deadline: of the request, an instant of the monotonic clock.
            was_admitted: another router has admitted the request: it waits for a while, with however many others.

        Raises:
            ModelNotLoaded: it takes longer than a request waits, or loading failed.
            ModelNotFound: it was removed.
            LoadRefused: the control plane refuses, such as for want of memory.
            Overloaded: so many wait for it already.
            DeadlineExceeded: the deadline of the request has passed.
            ShuttingDown: the router drains.
        """
        began = time.monotonic()
        self._check(model, inf if was_admitted else max_requests)
        snapshot, seconds = self._models.snapshot, self._wait_seconds
        if was_admitted:
            seconds = max(seconds, ADMITTED_SECONDS)
        elif self._wait_seconds == 0 or (snapshot is not None and not snapshot.wait):
            try:
                await asyncio.shield(self._ask(model))
            finally:
                self._forget(model)
            raise _not_loaded(model, "is not loaded; its load has begun")
        end = min(began + seconds, began + seconds if deadline is None else deadline)
        while model.service is None:
            self._ask(model)
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            model.waiting.add(waiting)
            try:
                async with asyncio.timeout_at(_loop_time(end)):
                    await waiting
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise DeadlineExceeded("the model is still being loaded") from None
                raise _not_loaded(model, f"is not loaded after {seconds:g} s") from None
            finally:
                model.waiting.discard(waiting)
                self._forget(model)
        return model.service

    def _check(self, model: ServedModel, max_requests: float) -> None:
        """Raise for what says at once that waiting is of no use."""
        if self._models.drain.refuses:
            raise ShuttingDown(SHUTTING_DOWN)
        if model.is_gone:
            raise ModelNotFound(f"the model {model.name!r} was removed")
        entry = model.entry
        if entry.state == FAILED and entry.retry_after:
            raise ModelNotLoaded(_failure(model), entry.retry_after)
        if len(model.waiting) >= max_requests:
            raise Overloaded(f": at most {max_requests} requests wait for the model", reason="model_load")

    def _forget(self, model: ServedModel) -> None:
        """Forget a load that nothing waits for."""
        if not model.waiting:
            self._loads.pop(model, None)

    def _ask(self, model: ServedModel) -> "asyncio.Task[None]":
        """Ask for a load, unless that is under way; the task ends once the control plane has answered."""
        asking, is_known = self._asking.get(model), model in self._loads
        if not is_known:  # also where the one that asked has left before the answer
            self._loads[model] = _Load(model)
        if asking is None:
            if is_known:  # and was accepted
                return self._tasks.start(asyncio.sleep(0))
            asking = self._asking[model] = self._tasks.start(self._asked(model))
        return asking

    async def _asked(self, model: ServedModel) -> None:
        try:
            await self._post(model)
        finally:
            del self._asking[model]  # at once: a request that comes now asks anew

    async def _post(self, model: ServedModel) -> None:
        """Ask until the control plane answers.

        Raises:
            FunitelError: it refuses; those that wait get the same.
        """
        while True:
            try:
                answer = await self._control.tell(LOAD, {"model": model.name})
            except NotReady:
                if self._wait_seconds == 0 or not model.waiting:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
                continue
            break
        load = self._loads.get(model)
        if answer.status < 400:
            if load is not None:
                load.accepted = time.monotonic()
                asyncio.get_running_loop().call_later(STALE_SECONDS, self.look, model)
            return
        error = _refusal(model, answer)
        self._loads.pop(model, None)
        for waiting in model.waiting:
            if not waiting.done():
                waiting.set_exception(_refusal(model, answer))
        raise error

    def look(self, model: ServedModel) -> None:
        """Settle what waits for a model by what the control plane says of it now."""
        load = self._loads.get(model)
        if load is None or not model.waiting or model.service is not None:
            return
        entry = model.entry
        if load.has_failed(entry.state):
            self._loads.pop(model, None)
            model.fail_waiting(ModelNotLoaded, _failure(model), entry.retry_after)
        elif entry.state in UNLOADED and load.accepted is not None:
            if time.monotonic() - load.accepted >= REPEAT_SECONDS and model not in self._asking:
                del self._loads[model]
                self._ask(model)
            else:
                asyncio.get_running_loop().call_later(REPEAT_SECONDS, self.look, model)

    def look_all(self) -> None:
        """Do so for all models."""
        for model in tuple(self._loads):
            self.look(model)

    async def close(self) -> None:
        """Ask for nothing any more."""
        await self._tasks.cancel()


def _loop_time(instant: float) -> float:
    """An instant of the monotonic clock as one of the loop's."""
    return asyncio.get_running_loop().time() + instant - time.monotonic()


def _not_loaded(model: ServedModel, words: str) -> ModelNotLoaded:
    entry = model.entry
    wait = entry.expected_load_seconds if entry.retry_after is None else entry.retry_after
    return ModelNotLoaded(f"the model {model.name!r} {words}: it is {entry.state}", wait)


def _failure(model: ServedModel) -> str:
    return f"the model {model.name!r} could not be loaded: {model.entry.error or 'no reason is known'}"


def _refusal(model: ServedModel, answer: ControlAnswer) -> FunitelError:
    match answer.status:
        case 404:
            return ModelNotFound(f"no model is named {model.name!r}: it was removed")
        case 503:
            after = answer.headers.get(b"retry-after", b"")
            return ModelNotLoaded(answer.error, float(after) if after.isdigit() else None)
        case _:
            return LoadRefused(answer)
