"""Resolve the settings of the next deployment for an upgrade, and refuse changes that need a restart.

Pure but for queries of the machine by `resolve`.
"""

import dataclasses
import logging
from collections.abc import Mapping

from funitel.launcher.config.resolve import ResolvedSettings, resolve, shards_and_gpus
from funitel.launcher.config.sockets import path_of_deployment
from funitel.launcher.settings import LauncherSettings
from funitel.proto.settings.fields import require
from funitel.proto.settings.options import flag_of

logger = logging.getLogger(__name__)

ADDRESS = ("hostname", "default_hostname")
# Settings of the launcher and its open sockets, which all deployments share.
FIXED = (
    *("port", "prometheus_port", "shard_uds_path", "master_port", "address_file"),
    *("state_dir", "database", "memory_budget", "keeper", "adopt_timeout"),
)


def next_settings(
    given: LauncherSettings, first: ResolvedSettings, fresh: LauncherSettings, environ: Mapping[str, str], number: int
) -> ResolvedSettings:
    """Resolve the settings of another deployment, with Unix sockets and ports of its own.

    Args:
        given: the settings of the first deployment as they were given.
        first: the same, resolved.
        fresh: those given now.
        environ: the launcher's environment now.
        number: of the deployment; the first has 0.

    Raises:
        SettingsError: they are invalid, or change a setting that needs a restart.
    """
    for name in FIXED:
        _check_kept(name, getattr(given, name), getattr(fresh, name))
    num_shard, gpus = shards_and_gpus(fresh, environ)
    path = path_of_deployment(first.shard_uds_path, number)
    resolved = resolve(dataclasses.replace(fresh, port=first.port, master_port=None), num_shard, path, gpus)
    return _at_the_address_of(first, resolved, given, fresh)


def _check_kept(name: str, before: object, now: object) -> None:
    names = (_shown(before), _shown(now))
    require(before == now, f"{flag_of(name)} cannot change from {names[0]} to {names[1]} before a restart")


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _at_the_address_of(
    first: ResolvedSettings, resolved: ResolvedSettings, given: LauncherSettings, fresh: LauncherSettings
) -> ResolvedSettings:
    """The settings with the address of the open port; refused where another was asked for or would be safer."""
    if resolved.hostname == first.hostname:
        return resolved
    for name in ADDRESS:
        _check_kept(name, getattr(given, name), getattr(fresh, name))
    require(  # only keys and certificates can have changed
        not resolved.is_local_by_default,
        f"--api-key, --api-key-file or --tls-client-ca must stay: without them --hostname would be "
        f"{resolved.hostname}, and it cannot change from {first.hostname} before a restart",
    )
    logger.info("--hostname stays %s, and could be %s after a restart", first.hostname, resolved.hostname)
    return dataclasses.replace(resolved, hostname=first.hostname)
