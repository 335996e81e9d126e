"""Attach the replicas of a model to the router: make its service, let replicas join and leave it, close it.

What the control plane says of a model is what is aimed at: one task for each model takes one step after the other
towards it, and begins anew when it changes. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, cast

from funitel.proto.errors import FunitelError, ShardFailed
from funitel.router.core.background_tasks import Tasks
from funitel.router.fleet.control import ControlSocket
from funitel.router.fleet.model_settings import settings_of
from funitel.router.fleet.models import ConnectReplicas, ServedModel, ServedModels
from funitel.router.fleet.snapshot import DRAINING, FleetReplica
from funitel.router.fleet.told import Told
from funitel.router.replica_set.membership import Membership
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.serving.service import Service

logger = logging.getLogger(__name__)

ATTACHED, RELEASED = "/v1/fleet/attached", "/v1/fleet/released"
RETRY_SECONDS = 5.0  # before a replica that could not be attached is tried again
LOOK_SECONDS = 0.02  # between two looks whether the last request of a service has ended
HEALTH_SECONDS = 0.5  # between two looks whether a service that ends still has shards
UNLOADED = "the model was unloaded before this answer was whole"


class Attachment:
    """The service of one model, and the replicas that are attached to it."""

    def __init__(
        self,
        model: ServedModel,
        models: ServedModels,
        told: Told,
        connect: ConnectReplicas,
        runs: Tasks,
        endings: Tasks,
    ) -> None:
        self.model = model
        self._models = models
        self._told = told
        self._connect = connect
        self._runs = runs
        self._endings = endings
        self._wake = asyncio.Event()
        self._attached: dict[int, FleetReplica] = {}
        self._back: set[int] = set()  # attached ones that were lost, as the control plane says
        self._failed: dict[int, float] = {}  # when a replica could not be attached
        self._leaving: set[str] = set()  # addresses of replicas that requests still use
        self._released: set[int] = set()  # that drain and were said to be released
        self._refused_weights: dict[int, float] = {}
        self._has_served = False  # a service was made since this router began

    def look(self) -> None:
        """Take note of a snapshot, also while a step is under way that takes long."""
        draining = {replica.id for replica in self.model.entry.replicas if replica.state == DRAINING}
        self._released &= draining
        self._note_returns()
        self.wake()

    def wake(self) -> None:
        """Look again at what is wanted."""
        self._wake.set()

    def say_again(self) -> None:
        """Tell a control plane that has begun anew what is attached, and what is released."""
        for replica_id in self._attached:
            self._say_attached(replica_id, 0.0)
        self._released.clear()
        self.wake()

    async def run(self) -> None:
        """Do what is wanted, until the model is gone."""
        while not self.model.is_gone or self._attached:
            self._wake.clear()
            if not await self._step():
                await self._wake.wait()

    # What is wanted -------------------------------------------------------------------------------------------------

    @property
    def _replicas(self) -> dict[int, FleetReplica]:
        """Those that may be attached, or stay so."""
        if self.model.is_gone:
            return {}
        return {replica.id: replica for replica in self.model.entry.replicas if replica.may_stay}

    def _is_wanted(self, replica: FleetReplica) -> bool:
        """Whether an attached replica is to stay."""
        found = self._replicas.get(replica.id)
        return found is not None and found.address == replica.address

    def _is_joinable(self, replica: FleetReplica) -> bool:
        """Whether a replica is to be attached."""
        return self._is_wanted(replica) and self._replicas[replica.id].is_ready

    def _next(self) -> FleetReplica | None:
        """A replica to attach."""
        now = time.monotonic()
        for replica in self._replicas.values():
            if not replica.is_ready or self._is_attached(replica) or replica.address in self._leaving:
                continue
            if now - self._failed.get(replica.id, -RETRY_SECONDS) >= RETRY_SECONDS:
                return replica
        return None

    def _unwanted(self) -> list[FleetReplica]:
        """Those that are attached, and are to leave."""
        return [replica for replica in self._attached.values() if not self._is_wanted(replica)]

    def _is_attached(self, replica: FleetReplica) -> bool:
        known = self._attached.get(replica.id)
        return known is not None and known.address == replica.address

    async def _step(self) -> bool:
        """Take one step; False where nothing is to be done."""
        self._release_unused()
        leaving = self._unwanted()
        joining = self._next()
        if joining is not None and joining.id not in self._attached:
            await self._join(joining)
            return True
        if leaving and len(leaving) == len(self._attached):
            self._end()
            return True
        for replica in leaving:
            self._leave(replica)
        self._set_weights()
        return bool(leaving)

    def _note_returns(self) -> None:
        """Say `attached` again of a replica that was lost, once it answers where it was."""
        for replica_id, replica in self._replicas.items():
            if not self._is_attached(replica):
                continue
            if not replica.is_ready:
                self._back.add(replica_id)
            elif replica_id in self._back:
                self._back.discard(replica_id)
                self._runs.start(self._say_returned(replica_id))

    def _release_unused(self) -> None:
        """Say `released` of what drains and was not attached."""
        for replica in self.model.entry.replicas:
            is_used = replica.id in self._attached or replica.address in self._leaving
            if replica.state == DRAINING and not is_used and replica.id not in self._released:
                self._say_released(replica)

    async def _say_returned(self, replica_id: int) -> None:
        began = time.monotonic()
        while replica_id in self._attached and self.model.service is not None:
            with suppress(FunitelError):
                await self.model.service.check_ready()
                self._say_attached(replica_id, time.monotonic() - began)
                return
            await asyncio.sleep(HEALTH_SECONDS)

    # Steps ----------------------------------------------------------------------------------------------------------

    async def _join(self, replica: FleetReplica) -> None:
        began, service = time.monotonic(), self.model.service
        try:
            if service is None:
                await self._unless_unwanted(self._start(replica), replica)
            else:
                await self._unless_unwanted(self._add(service, replica), replica)
        except FunitelError as error:
            self._note_failure(replica, error)
            return
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            return  # it is not wanted any more
        self._failed.pop(replica.id, None)
        self._attached[replica.id] = replica
        self._say_attached(replica.id, time.monotonic() - began)

    async def _unless_unwanted(self, work: Coroutine[Any, Any, None], replica: FleetReplica) -> None:
        """Do some work, and give it up when the replica is not wanted any more.

        Raises:
            CancelledError: it was given up.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                waking = asyncio.ensure_future(self._wake.wait())
                await asyncio.wait([task, waking], return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                self._wake.clear()
                if not self._is_joinable(replica):
                    task.cancel()
                    break
                leaving = self._unwanted()
                if len(leaving) < len(self._attached):  # others serve meanwhile
                    for each in leaving:
                        self._leave(each)
                self._set_weights()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._wake.set()
        await task

    async def _start(self, replica: FleetReplica) -> None:
        """Make the service of the model over its first replica, and over all that an earlier router may have used.

        Sequences of that router are on any of them: a replica that joined later would have to drop them.
        """
        began, others = time.monotonic(), self._left_by_another(replica)
        try:
            service = await self._service_over([replica, *others])
        except FunitelError as error:
            if not others:
                raise
            logger.warning("model %s: its replicas are attached one by one: %s", self.model.name, error.message)
            service, others = await self._service_over([replica]), []
        if self._models.replayed is not None:
            service.replays_begun(self._models.replayed)
        for each in others:
            self._failed.pop(each.id, None)
            self._attached[each.id] = each
            self._say_attached(each.id, time.monotonic() - began)
        self.model.attach(service)

    def _left_by_another(self, first: FleetReplica) -> list[FleetReplica]:
        """The other replicas that an earlier router may have used; none where this one has served the model before."""
        if self._models.own.settings.keeper is None or self._has_served:
            return []
        self._has_served = True
        return [each for each in self._replicas.values() if each.id != first.id and self._is_joinable(each)]

    async def _service_over(self, replicas: list[FleetReplica]) -> Service:
        """Make a service of the model over some replicas."""
        settings = settings_of(self._models.own.settings, self.model.entry, replicas[0].address)
        places = [ReplicaAddress(each.id, each.address, each.weight) for each in replicas]
        failures: list[FunitelError] = []
        async with AsyncExitStack() as undo:
            service = Service(settings)
            undo.push_async_callback(service.close)
            await service.start(partial(self._connect, replicas=places), failures.append)
            if failures:
                raise failures[0]
            undo.pop_all()
        return service

    async def _add(self, service: Service, replica: FleetReplica) -> None:
        live = _live(service)
        taken = {each.replica_id for each in live.replicas}
        replica_id = replica.id if replica.id not in taken else max(taken) + 1
        await live.add(replica_id, replica.address, replica.weight)

    def _note_failure(self, replica: FleetReplica, error: FunitelError) -> None:
        logger.error("model %s: replica %d cannot be attached: %s", self.model.name, replica.id, error.message)
        self._failed[replica.id] = time.monotonic()
        asyncio.get_running_loop().call_later(RETRY_SECONDS * 1.01, self.wake)
        content = {"model": self.model.name, "replica": replica.id, "error": error.message}
        self._told.say(ATTACHED, content)

    def _say_attached(self, replica_id: int, seconds: float) -> None:
        content = {"model": self.model.name, "replica": replica_id, "seconds": round(seconds, 3)}
        self._told.say(ATTACHED, content)

    def _leave(self, replica: FleetReplica) -> None:
        """Let one of several replicas go."""
        del self._attached[replica.id]
        self._back.discard(replica.id)
        service = self.model.service
        if service is not None:
            self._leaving.add(replica.address)
            self._endings.start(self._drain(service, replica))

    async def _drain(self, service: Service, replica: FleetReplica) -> None:
        live = _live(service)
        try:
            for found in live.replicas:
                if found.address == replica.address:
                    await live.drain(found.replica_id)
        finally:
            self._release(replica)

    def _say_released(self, replica: FleetReplica) -> None:
        self._released.add(replica.id)
        self._told.say(RELEASED, {"model": self.model.name, "replica": replica.id})

    def _release(self, replica: FleetReplica) -> None:
        """Say that nothing uses a replica, unless another one has its number meanwhile, also of a later model."""
        self._leaving.discard(replica.address)
        latest = self._models.latest(self.model)
        if latest.is_gone or all(each.id != replica.id or not each.may_stay for each in latest.entry.replicas):
            self._say_released(replica)
        self.wake()

    def _set_weights(self) -> None:
        """Take over the weights of the replicas that are attached."""
        found = self._replicas
        changed = {
            replica_id: found[replica_id].weight
            for replica_id, known in self._attached.items()
            if replica_id in found and found[replica_id].weight != known.weight
        }
        service = self.model.service
        if changed and service is not None:
            live = _live(service)
            by_address = {each.address: each.replica_id for each in live.replicas}
            weights = {by_address.get(found[replica_id].address, -1): weight for replica_id, weight in changed.items()}
            try:
                live.set_weights(weights)
            except FunitelError as error:  # such as zeros only, until a replica joins that has another weight
                if weights != self._refused_weights:
                    logger.warning("model %s: the weights stay as they are: %s", self.model.name, error.message)
                self._refused_weights = weights
                return
            self._attached |= {replica_id: found[replica_id] for replica_id in changed}

    # The end --------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Take no more requests for the model; what runs may finish."""
        service, replicas = self.model.service, list(self._attached.values())
        self._attached.clear()
        self._back.clear()
        self.model.service = None
        if service is not None:
            service.drain.begin()
            self._leaving |= {replica.address for replica in replicas}
            self._models.ending.append(service)
            self._endings.start(self._close(service, replicas))

    async def _close(self, service: Service, replicas: list[FleetReplica]) -> None:
        checking = asyncio.ensure_future(self._end_without_shards(service))
        try:
            while service.drain.num_running or len(service.running):  # noqa: ASYNC110 - they tell of nothing
                await asyncio.sleep(LOOK_SECONDS)
            await service.close()
        finally:
            checking.cancel()
            self._models.ending.remove(service)
        logger.info("model %s has drained", self.model.name)
        for replica in replicas:
            self._release(replica)

    async def _end_without_shards(self, service: Service) -> None:
        """End the last requests of a service where the shards have not waited for them."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                await service.check_shards()
            except FunitelError:
                service.fail_all(ShardFailed(UNLOADED))

    async def close(self) -> None:
        """Close the service, which is not the router's own."""
        service, self.model.service = self.model.service, None
        if service is not None:
            await service.close()


class Attachments:
    """Those of all models.

    Args:
        models: the table.
        control: is told what is attached and what is not used any more.
        connect: makes the engine of a model.
    """

    def __init__(self, models: ServedModels, control: ControlSocket, connect: ConnectReplicas) -> None:
        self._models = models
        self._told = Told(control)
        self._make = partial(Attachment, models=models, told=self._told, connect=connect)
        self._endings = Tasks()
        self._runs = Tasks()
        self._attachments: dict[ServedModel, Attachment] = {}

    def look(self) -> None:
        """Take note of a snapshot that the table has."""
        for model in self._models:
            if model not in self._attachments and model.service is not self._models.own:
                attachment = self._attachments[model] = self._make(model, runs=self._runs, endings=self._endings)
                task = self._runs.start(attachment.run())
                task.add_done_callback(partial(self._forget, model))
        for attachment in self._attachments.values():
            attachment.look()

    def _forget(self, model: ServedModel, _: "asyncio.Task[None]") -> None:
        self._attachments.pop(model, None)

    def say_again(self) -> None:
        """Tell a control plane that has begun anew what is attached."""
        for attachment in self._attachments.values():
            attachment.say_again()

    async def close(self) -> None:
        """Close the services of all models, but the router's own; their requests may finish."""
        attachments = list(self._attachments.values())
        await self._runs.cancel()
        await asyncio.gather(*(attachment.close() for attachment in attachments), self._endings.ended())
        await self._told.close()


def _live(service: Service) -> Membership[Any]:
    """The replicas of a service, of a model of either kind."""
    return cast("Membership[Any]", service.encoder.engine if service.is_encoder else service.engine)


def _is_cancelled() -> bool:
    """Whether the current task was cancelled, and not one that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
