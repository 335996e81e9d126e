"""Derive the settings of each replica: its sockets, port, cores, GPUs and share of the memory."""

import dataclasses
from collections.abc import Mapping

from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.config.sockets import path_of_replica, socket_of


def settings_of_replica(settings: ResolvedSettings, replica: int) -> ResolvedSettings:
    """The settings of one replica's shards; those of a single replica are the deployment's.

    Replicas without GPUs size their KV pools on one host independently of each other, so each is told of the others.
    """
    first = replica * settings.num_shard
    return dataclasses.replace(
        settings,
        num_replicas=1,
        replicas_on_host=settings.num_replicas,
        shard_uds_path=path_of_replica(settings.shard_uds_path, replica),
        master_port=settings.master_ports[replica],
        core_assignments=settings.core_assignments[first : first + settings.num_shard],
    )


def environ_of_replica(settings: ResolvedSettings, environ: Mapping[str, str], replica: int) -> dict[str, str]:
    """The environment of one replica's shards: the launcher's, with only the replica's own GPUs visible."""
    if settings.num_replicas == 1 or not settings.gpus:
        return dict(environ)
    first = replica * settings.num_shard
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(settings.gpus[first : first + settings.num_shard])}


def further_addresses(settings: ResolvedSettings) -> tuple[str, ...]:
    """Addresses of rank 0 of every replica but the first, for the router."""
    bases = (path_of_replica(settings.shard_uds_path, replica) for replica in range(1, settings.num_replicas))
    return tuple(f"unix://{socket_of(base, 0)}" for base in bases)
