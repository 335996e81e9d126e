"""The table of models: which one a request means, and which service serves it. Event loop only."""

import asyncio
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from funitel.proto.errors import FunitelError, ModelNotFound, NotReady, ShuttingDown
from funitel.proto.printable import shortened
from funitel.router.core.drain import SHUTTING_DOWN, Drain
from funitel.router.core.request import DEFAULT_MODEL
from funitel.router.encoder.engine import EncoderEngine
from funitel.router.engine.interface import Inference
from funitel.router.fleet.history import ModelHistory
from funitel.router.fleet.snapshot import GENERATE, READY, FleetModel, FleetSnapshot
from funitel.router.middleware.operation import ModelUse
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.serving.service import Service
from funitel.router.settings import MEDIA_PAYLOAD_LIMIT, RouterSettings
from funitel.router.telemetry.metrics import Metrics

MAX_LISTED = 50  # names in an error
MAX_NAME = 200  # characters of a name in an error
UNKNOWN = "starting: waiting for the control plane"
NONE_LAUNCHED = "no model is launched: launch one with `funitel launch MODEL` or POST /v1/models"


class ConnectReplicas(Protocol):
    """Makes the engine of a model over some replicas, and scales the metrics to its limits."""

    def __call__(
        self, settings: RouterSettings, metrics: Metrics, replicas: Sequence[ReplicaAddress] | None = None
    ) -> Awaitable[Inference | EncoderEngine]:
        """Connect to the replicas; raises StartupError."""


class ServedModel:
    """One model of the table.

    Attributes:
        entry: what the control plane said last.
        service: takes its requests; None while it is not attached.
        waiting: of requests that wait until it is.
        num_requests: that have come since this process began.
        last_active: instant at which the last request ended, by the monotonic clock.
    """

    def __init__(self, entry: FleetModel, service: Service | None = None) -> None:
        self.entry = entry
        self.service = service
        self.is_gone = False
        self.waiting: set[asyncio.Future[None]] = set()
        self.num_requests = 0
        self._num_working = 0
        self.last_active = time.monotonic()

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.entry.name

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request of the router's own model while the block runs; the drain of its service counts all."""
        self._num_working += 1
        try:
            yield
        finally:
            self._num_working -= 1

    def num_running(self, own: Service) -> int:
        """Requests that it works on, those in the background too; `own` is the service of the router's own model."""
        service = self.service
        if service is None:
            return 0
        return max(self._num_working if service is own else service.drain.num_running, len(service.running))

    @property
    def is_encoder(self) -> bool:
        """Whether it is an encoder; False where that is not known."""
        if self.service is not None and self.service.is_started:
            return self.service.is_encoder
        return self.entry.task not in (None, GENERATE)

    def suits(self, use: ModelUse) -> bool:
        """Whether it does what a route needs a model for."""
        is_transcriber = self.service is not None and self.service.is_transcriber
        if use is ModelUse.ANY or is_transcriber or use is ModelUse.TRANSCRIBES:
            return use is ModelUse.ANY or is_transcriber is (use is ModelUse.TRANSCRIBES)
        return self.is_encoder is (use is ModelUse.ENCODES)

    def attach(self, service: Service) -> None:
        """Let a service take its requests, first those that wait."""
        self.service = service
        for waiting in self.waiting:
            if not waiting.done():
                waiting.set_result(None)

    def fail_waiting(self, error: type[FunitelError], *given: Any) -> None:
        """End the requests that wait; each gets an error of its own."""
        for waiting in self.waiting:
            if not waiting.done():
                waiting.set_exception(error(*given))


class ServedModels:
    """All models of a router: the one of its own settings, if it has one, and those of the control plane.

    Attributes:
        own: the service of the router's settings; with `--no-model` it serves nothing.
        only: the one model there is; None where there are several, or none.
        only_name: its name, for which an API key must be, whatever name a request gives; None without `only`.
        is_alone: whether there is no model but the router's own one.
        ending: services that take no requests any more, while their last ones run.
        num_snapshots: that the control plane has sent.
        replayed: journals of requests that an earlier router has left; None as long as they are not known.
        history: the last hour of each, while its `run` runs.
        drained: set once the router drains.
    """

    def __init__(self, own: Service) -> None:
        self.own = own
        self.has_own = not own.settings.no_model
        self.snapshot: FleetSnapshot | None = None
        self.num_snapshots = 0
        self.replayed: frozenset[str] | None = None
        self.ending: list[Service] = []
        self._changed = asyncio.Event()
        self.drained = asyncio.Event()
        self._models: dict[str, ServedModel] = {}
        self._by_model_id: dict[str, ServedModel] = {}
        self.history = ModelHistory(self)
        self.only: ServedModel | None = None
        self.only_name: str | None = None
        self.is_alone = False
        self._take([self._own_entry()] if self.has_own else [])
        own.drain.on_end(self._end)

    @property
    def payload_limit(self) -> int:
        """Bytes that the body of a request may have before its model is known: as many as for any of them.

        A model that is not loaded may take images.
        """
        given = self.own.settings.payload_limit
        services = [model.service for model in self._models.values()]
        limits = (MEDIA_PAYLOAD_LIMIT if service is None else service.payload_limit for service in services)
        return given or max(limits, default=self.own.payload_limit)

    def _own_entry(self) -> FleetModel:
        """The router's own model, where the control plane does not list it."""
        name = self.own.model_id
        return FleetModel(name=name, model_id=name, state=READY, is_static=True, is_default=True)

    # What the server needs of a service -----------------------------------------------------------------------------

    @property
    def drain(self) -> Drain:
        """That of all requests of the router."""
        return self.own.drain

    @property
    def metrics(self) -> Metrics:
        """Those of the router itself: its connections, answers and API keys."""
        return self.own.metrics

    @property
    def is_started(self) -> bool:
        """Whether it has come to serve: its own model, or what the control plane names."""
        return self.own.is_started if self.has_own else self.snapshot is not None

    async def check_ready(self) -> None:
        """Raise NotReady, with the reason, unless requests can be answered: without a model of its own, loaded."""
        if self.has_own:
            await self.own.check_ready()
        elif self.drain.has_begun:
            raise NotReady(SHUTTING_DOWN)
        elif self.snapshot is None:
            raise NotReady(UNKNOWN)

    def replays_begun(self, journals: Collection[str]) -> None:
        """Requests of these journals are replayed from now on, by whichever model they are for."""
        self.replayed = frozenset(journals)
        for service in self.services:
            service.replays_begun(self.replayed)

    def fail_all(self, error: FunitelError) -> None:
        """End whatever runs or waits; clients get the error."""
        for service in self.services:
            service.fail_all(error)
        for model in self:
            model.fail_waiting(type(error), error.message)

    def _end(self) -> None:
        """Let paused requests go on, and none wait for a model any more once the drain has begun."""
        for service in self.services:
            if service is not self.own:
                service.resume_paused()
        if self.drain.has_begun:
            self.drained.set()
            for model in self:
                model.fail_waiting(ShuttingDown, SHUTTING_DOWN)

    # The table ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    @property
    def services(self) -> list[Service]:
        """All that serve, and those that end; the router's own first."""
        found = [model.service for model in self._models.values() if model.service not in (None, self.own)]
        own = [self.own] if self.has_own else []
        return [*own, *(service for service in found if service is not None), *self.ending]

    def apply(self, snapshot: FleetSnapshot) -> list[ServedModel]:
        """Take what the control plane says; return the models that are gone."""
        self.snapshot = snapshot
        self.num_snapshots += 1
        entries = list(snapshot.models)
        if self.has_own and not any(entry.is_static for entry in entries):
            entries.insert(0, self._own_entry())
        gone = self._take(entries)
        self.metrics.models.set({} if self.is_alone else {entry.name: entry.state for entry in entries})
        for model in self:
            if model.service is not None and model.entry.load_seconds is not None:
                model.service.metrics.set_load_seconds(model.entry.load_seconds)
        self._changed.set()
        self._changed = asyncio.Event()
        return gone

    def _take(self, entries: list[FleetModel]) -> list[ServedModel]:
        old, self._models = self._models, {}
        for entry in entries:
            known = old.pop(entry.name, None)
            if known is None:
                known = ServedModel(entry, self.own if self.has_own and entry.is_static else None)
            known.entry = entry
            self._models[entry.name] = known
        self._by_model_id = {}
        for model in self._models.values():
            self._by_model_id.setdefault(model.entry.model_id, model)
        self.only = next(iter(self._models.values())) if len(self._models) == 1 else None
        self.only_name = None if self.only is None else self.only.name
        self.is_alone = self.only is not None and self.only.service is self.own
        for model in old.values():
            model.is_gone = True
            model.fail_waiting(ModelNotFound, f"the model {shortened(model.name, MAX_NAME)!r} was removed")
        return list(old.values())

    async def changed(self, since: int, seconds: float) -> None:
        """Wait until the control plane has sent a snapshot after the one with the number `since`, but not longer."""
        if self.num_snapshots == since:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()

    # Which one is meant ---------------------------------------------------------------------------------------------

    def get(self, name: str) -> ServedModel | None:
        """The model of a name, of the id of a model, or of an adapter."""
        found = self._models.get(name) or self._by_model_id.get(name)
        if found is not None:
            return found
        return next((model for model in self._models.values() if _has_adapter(model, name)), None)

    def latest(self, model: ServedModel) -> ServedModel:
        """The model that has the name of one by now, which may be gone."""
        return self._models.get(model.name, model)

    def named(self, name: str) -> ServedModel:
        """The same; raises ModelNotFound, with the names there are."""
        found = self.get(name)
        if found is None:
            raise self._unknown(name)
        return found

    def choose(self, asked: object, use: ModelUse) -> ServedModel:
        """The model that a request means.

        Args:
            asked: what its body names; any name means the only model, and none the default.
            use: what the route needs a model for.

        Raises:
            ModelNotFound: there is none of that name.
            NotReady: there is no model at all, or the control plane has not said yet what there is.
        """
        if self.only is not None:
            return self.only
        if isinstance(asked, str) and (asked in self._models or asked not in ("", DEFAULT_MODEL)):
            if not self._models and self.snapshot is None:
                raise NotReady(UNKNOWN)
            return self.named(asked)
        return self.default(use)

    def default(self, use: ModelUse = ModelUse.ANY) -> ServedModel:
        """The model of requests that name none: the default if it suits, else the first that does; raises NotReady."""
        models = list(self._models.values())
        if not models:
            raise NotReady(UNKNOWN if self.snapshot is None else NONE_LAUNCHED)
        name = None if self.snapshot is None else self.snapshot.default
        default = self._models.get(name or "") or next((each for each in models if each.entry.is_default), models[0])
        if default.suits(use):
            return default
        return next((model for model in models if model.suits(use)), default)

    def _unknown(self, name: str) -> FunitelError:
        asked = shortened(name, MAX_NAME)
        if not self._models:
            return ModelNotFound(f"no model is named {asked!r}; {NONE_LAUNCHED}")
        names = list(self._models)
        names += [name for model in self._models.values() for name in _adapters_of(model)]
        if len(names) == 1:
            return ModelNotFound(f"no model is named {asked!r}; the one here is {names[0]!r}")
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        listed = ", ".join(map(repr, names[:MAX_LISTED]))
        return ModelNotFound(f"no model is named {asked!r}; those here are {listed}{more}")


def _has_adapter(model: ServedModel, name: str) -> bool:
    if model.service is None:
        return name in model.entry.listed_adapters
    return model.service.adapters.get(name) is not None


def _adapters_of(model: ServedModel) -> list[str]:
    if model.service is None:
        return list(model.entry.listed_adapters)
    return [known.adapter.name for known in model.service.adapters.known]
