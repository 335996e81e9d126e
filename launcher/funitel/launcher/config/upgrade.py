"""What the settings of the next generation are, by those that were given anew: a few cannot change while others serve.

Pure but for what `resolve` asks of the machine.
"""

import dataclasses
import logging
from collections.abc import Mapping

from funitel.launcher.config.resolve import ResolvedSettings, resolve, shards_and_gpus
from funitel.launcher.config.sockets import path_of_generation
from funitel.launcher.settings import LauncherSettings
from funitel.proto.settings.fields import require
from funitel.proto.settings.options import flag_of

logger = logging.getLogger(__name__)

ADDRESS = ("hostname", "default_hostname")
# What belongs to the launcher and the sockets it has opened, not to one generation.
FIXED = ("port", "prometheus_port", "shard_uds_path", "master_port")


def next_settings(
    given: LauncherSettings, first: ResolvedSettings, fresh: LauncherSettings, environ: Mapping[str, str], number: int
) -> ResolvedSettings:
    """Resolve the settings of a further generation, with Unix sockets and ports of its own.

    Args:
        given: the settings of the first generation as they were given.
        first: the same, resolved.
        fresh: those given now.
        environ: the launcher's own, now.
        number: of the generation; the first has 0.

    Raises:
        SettingsError: they are wrong, or change what cannot change before a restart.
    """
    for name in FIXED:
        _check_kept(name, getattr(given, name), getattr(fresh, name))
    num_shard, gpus = shards_and_gpus(fresh, environ)
    path = path_of_generation(first.shard_uds_path, number)
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
    """The settings with the address that the port was opened on, unless another was asked for or is safer."""
    if resolved.hostname == first.hostname:
        return resolved
    for name in ADDRESS:
        _check_kept(name, getattr(given, name), getattr(fresh, name))
    require(  # only keys and certificates have changed
        not resolved.is_local_by_default,
        f"--api-key, --api-key-file or --tls-client-ca must stay: without them --hostname would be "
        f"{resolved.hostname}, and it cannot change from {first.hostname} before a restart",
    )
    logger.info("--hostname stays %s, and could be %s after a restart", first.hostname, resolved.hostname)
    return dataclasses.replace(resolved, hostname=first.hostname)
