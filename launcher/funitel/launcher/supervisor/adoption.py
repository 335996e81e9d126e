"""Decide whether a launcher adopts what an earlier one has left, and what of its own is to outlive it."""

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from socket import socket

from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.config.sockets import listen, remove_beside, remove_sockets
from funitel.launcher.processes.pid_one import is_pid_one
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.lasting_child import LastingFiles
from funitel.launcher.supervisor.leftovers import Leftovers
from funitel.launcher.supervisor.supervisor import NextDeployment, ResolveNext
from funitel.proto.process.deployment_file import file_of, logs_of

logger = logging.getLogger(__name__)


class Ports:
    """The listening sockets, which `stack` closes."""

    def __init__(self, settings: ResolvedSettings, stack: ExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._listeners: list[socket] = []

    def open(self) -> Sequence[socket]:
        """Listen on the ports, unless they are open; raises SettingsError where one is in use."""
        if not self._listeners:
            host, second = self._settings.hostname, self._settings.prometheus_port
            listeners = [self._stack.enter_context(listen(host, self._settings.port))]
            if second is not None:
                listeners.append(self._stack.enter_context(listen(host, second, "--prometheus-port")))
            self._listeners = listeners
        return self._listeners


def lasting_files(settings: ResolvedSettings, uds_path: str) -> LastingFiles | None:
    """The files of children that outlive this process; None where they are to end with it."""
    if not settings.keeper or not settings.adopt_timeout or is_pid_one():
        return None
    files = LastingFiles(Path(logs_of(uds_path)), file_of(uds_path))
    try:
        files.prepare()
    except OSError as error:
        logger.warning("no other launcher can adopt this one's processes: %s", error)
        return None
    return files


def adoptable(
    uds_path: str, given: LauncherSettings, fresh: NextDeployment, resolve_next: ResolveNext
) -> tuple[Leftovers | None, NextDeployment]:
    """What a launcher that has died has left for this one to adopt, if anything; and with what settings.

    Anything else that it has left is ended.
    """
    leftovers = Leftovers.at(uds_path)
    if leftovers is None:
        remove_sockets(uds_path, fresh.settings.num_shard, fresh.settings.num_replicas)
        remove_beside(uds_path)
        return None, fresh
    adopted = fresh if leftovers.number == 0 else resolve_next(leftovers.number)
    lasts = lasting_files(fresh.settings, uds_path) is not None
    why = leftovers.reason_against(adopted.settings, given.port) if lasts else "its processes are to end with it"
    if not why:
        settings = dataclasses.replace(adopted.settings, port=leftovers.port)
        return leftovers, dataclasses.replace(adopted, settings=settings)
    pids = ", ".join(map(str, leftovers.pids))
    logger.warning("an earlier launcher has left processes, which are ended, since %s: %s", why, pids)
    leftovers.end()
    remove_sockets(uds_path, fresh.settings.num_shard, fresh.settings.num_replicas)
    remove_beside(uds_path)
    return None, fresh
