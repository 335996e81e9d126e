"""Connect to the shards of every replica, and start what serves over them: a replica set or an encoder engine."""

import asyncio

from funitel.router.encoder.engine import EncoderEngine, start_encoder
from funitel.router.engine.interface import Inference
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.replica_set.slot import ReplicaSlot, check_alike
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics


async def connect(settings: RouterSettings, metrics: Metrics) -> Inference | EncoderEngine:
    """Connect to the shards of every replica, warm them up and start an engine for each; one for all of an encoder.

    Raises:
        StartupError: a shard does not answer, replicas differ, or settings, model and memory do not fit together.
    """
    addresses = (settings.master_url, *settings.replica_address)
    timeout = settings.shard_connect_timeout
    found = await asyncio.gather(*(Shards.connect(address, timeout, settings.shard_tls) for address in addresses))
    if any(info.encoder is not None for shards in found for info in shards.infos):
        return start_encoder(found, settings, metrics)
    check_alike(addresses, [shards.infos[-1] for shards in found])
    first_ranks = [sum(len(shards.infos) for shards in found[:index]) for index in range(len(found))]
    slots = [ReplicaSlot.of(index, metrics.child(first_rank), settings) for index, first_rank in enumerate(first_ranks)]
    members = await asyncio.gather(*(slot.start(shards, settings) for slot, shards in zip(slots, found, strict=True)))
    return ReplicaSet(members, settings, metrics)
