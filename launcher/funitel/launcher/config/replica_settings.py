"""What each replica of a deployment gets for itself: sockets, a port, cores, GPUs, a share of the memory."""

import dataclasses
from collections.abc import Mapping

from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.config.sockets import path_of_replica, socket_of


def settings_of_replica(settings: ResolvedSettings, replica: int) -> ResolvedSettings:
    """The settings of one replica's shards; those of an only replica are the deployment's.

    Replicas without GPUs of their own size their KV pools on one host, without knowing of each other: each takes an
    equal part of what the deployment may take.
    """
    fraction = settings.cuda_memory_fraction
    first = replica * settings.num_shard
    return dataclasses.replace(
        settings,
        num_replicas=1,
        shard_uds_path=path_of_replica(settings.shard_uds_path, replica),
        master_port=settings.master_ports[replica],
        places=settings.places[first : first + settings.num_shard],
        cuda_memory_fraction=fraction if settings.gpus else fraction / settings.num_replicas,
    )


def environ_of_replica(settings: ResolvedSettings, environ: Mapping[str, str], replica: int) -> dict[str, str]:
    """The launcher's environment as one replica's shards inherit it: each replica sees its own GPUs only."""
    if settings.num_replicas == 1 or not settings.gpus:
        return dict(environ)
    first = replica * settings.num_shard
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(settings.gpus[first : first + settings.num_shard])}


def further_addresses(settings: ResolvedSettings) -> tuple[str, ...]:
    """Where rank 0 of every replica but the first listens, as the router is told."""
    bases = (path_of_replica(settings.shard_uds_path, replica) for replica in range(1, settings.num_replicas))
    return tuple(f"unix://{socket_of(base, 0)}" for base in bases)
