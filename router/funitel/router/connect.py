"""Connect to the shards of every replica, and start what serves over them: a replica set or an encoder engine."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from funitel.proto.takeover.state import SequenceOutputs, join_outputs
from funitel.router.encoder.engine import EncoderEngine, start_encoder
from funitel.router.engine.interface import Inference
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.replica_set.slot import ReplicaSlot, ServingReplica, check_alike
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

T = TypeVar("T")


def listed_replicas(settings: RouterSettings) -> tuple[ReplicaAddress, ...]:
    """Return the replicas that the settings list; their ids are 0, 1 and so on."""
    addresses = (settings.master_url, *settings.replica_address)
    return tuple(ReplicaAddress(replica_id, address) for replica_id, address in enumerate(addresses))


async def connect(
    settings: RouterSettings, metrics: Metrics, replicas: Sequence[ReplicaAddress] | None = None
) -> Inference | EncoderEngine:
    """Connect to the shards of every replica, warm them up and start an engine for each; one for all of an encoder.

    Args:
        settings: the router's.
        metrics: those of the model.
        replicas: one or more; by default those that the settings list. Others may join later.

    Raises:
        StartupError: a shard does not answer, replicas differ, or settings, model and memory do not fit together.
            Nothing stays connected.
    """
    began = time.monotonic()
    places = listed_replicas(settings) if replicas is None else replicas
    async with AsyncExitStack() as undo:
        present = await _with_work(places, settings)
        found = await _connect_all(present, settings, undo)
        if any(info.encoder is not None for shards in found for info in shards.infos):
            engine: Inference | EncoderEngine = start_encoder(list(zip(present, found, strict=True)), settings, metrics)
        else:
            members = await _start_all(present, found, settings, metrics, undo)
            engine = ReplicaSet(members, settings, metrics, await _kept_outputs(found, settings))
            for place in places:
                if place not in present:
                    engine.add_when_it_answers(place)
        undo.pop_all()
    seconds = time.monotonic() - began
    metrics.observe_attach(seconds)
    metrics.set_load_seconds(seconds)
    return engine


async def _with_work(places: Sequence[ReplicaAddress], settings: RouterSettings) -> Sequence[ReplicaAddress]:
    """The replicas to begin with: all, unless sequences of an earlier router would wait for one that is lost."""
    if settings.keeper is None or len(places) == 1:
        return places
    calls = (Shards.connect(place.address, tls=settings.shard_tls, keeps=True) for place in places)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    found = {place: shards for place, shards in zip(places, answers, strict=True) if isinstance(shards, Shards)}
    try:
        if len(found) == len(places) or not any(await _all_of([shards.outputs() for shards in found.values()])):
            return places
    finally:
        await asyncio.gather(*(shards.close() for shards in found.values()))
    return list(found)


async def _connect_all(
    places: Sequence[ReplicaAddress], settings: RouterSettings, undo: AsyncExitStack
) -> list[Shards]:
    """Connect to every replica; `undo` closes those that were reached."""

    async def reach(place: ReplicaAddress) -> Shards:
        timeout, keeps = settings.shard_connect_timeout, settings.keeper is not None
        shards = await Shards.connect(place.address, timeout, settings.shard_tls, keeps=keeps)
        undo.push_async_callback(shards.close)
        return shards

    return await _all_of([reach(place) for place in places])


async def _start_all(
    places: Sequence[ReplicaAddress],
    found: Sequence[Shards],
    settings: RouterSettings,
    metrics: Metrics,
    undo: AsyncExitStack,
) -> list[ServingReplica]:
    """Warm every replica up and start its engine; `undo` closes those that were started."""
    check_alike([place.address for place in places], [shards.infos[-1] for shards in found])

    async def begin(slot: ReplicaSlot, shards: Shards) -> ServingReplica:
        member = await slot.start(shards, settings, takes_over=settings.keeper is not None)
        undo.push_async_callback(member.close)
        return member

    slots = [ReplicaSlot.of(place, shards, settings, metrics) for place, shards in zip(places, found, strict=True)]
    for slot in slots:
        undo.callback(slot.metrics.remove)
    return await _all_of([begin(slot, shards) for slot, shards in zip(slots, found, strict=True)])


async def _kept_outputs(found: Sequence[Shards], settings: RouterSettings) -> dict[str, SequenceOutputs]:
    """The outputs of sequences of an earlier router, by output key; no step is made meanwhile."""
    if settings.keeper is None:
        return {}
    return join_outputs([each for outputs in await _all_of([shards.outputs() for shards in found]) for each in outputs])


async def _all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls; if one fails, or this is cancelled, none runs any more."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
