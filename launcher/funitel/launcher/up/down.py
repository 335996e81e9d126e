"""Stop a server that `funitel up` has started: by its control plane, or by its state where that is dead."""

import asyncio
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.control_plane.state_folder import LOCK, default_state_folder, owning, run_folder
from funitel.launcher.lifecycle.composition import ControlPlane
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.up.router_process import RouterProcess
from funitel.launcher.up.settings import DownSettings
from funitel.proto.errors import FunitelError, SettingsError

POLL_SECONDS = 0.1
MORE_SECONDS = 30.0  # than two grace periods, for a control plane to end


def stop_server(settings: DownSettings, environ: Mapping[str, str]) -> None:
    """Stop everything of a state folder, and say what was stopped.

    Raises:
        SettingsError: there is no such folder.
        FunitelError: the control plane does not end.
    """
    given = settings.state_dir
    folder = default_state_folder(settings.port, environ) if given is None else Path(given).absolute()
    if not folder.is_dir():
        flag = "--port" if given is None else "--state-dir"
        raise SettingsError(f"there is no state in {folder}: give the {flag} of a server that was started")
    owner = _owner_of(folder)
    if owner is not None:
        _stop_control_plane(owner, folder, settings.graceful_termination_timeout)
        print(f"stopped the server of {folder}: process {owner} has ended, with its router and its models")
        return
    with owning(folder):
        num_stopped = asyncio.run(_stop_what_runs(settings, environ, Folders(run=run_folder(folder), state=folder)))
    print(f"stopped {num_stopped} processes of {folder}" if num_stopped else f"nothing of {folder} runs")


def _owner_of(folder: Path) -> int | None:
    """The process id of the control plane of a folder; None where none runs."""
    try:
        with (folder / LOCK).open("r+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read())
    except (OSError, ValueError):
        return None
    return None


def _stop_control_plane(pid: int, folder: Path, grace_seconds: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + 2 * grace_seconds + MORE_SECONDS
    while _owner_of(folder) == pid:
        if time.monotonic() > end:
            raise FunitelError(f"the control plane of {folder}, process {pid}, does not end: kill it, and try again")
        time.sleep(POLL_SECONDS)


async def _stop_what_runs(settings: DownSettings, environ: Mapping[str, str], folders: Folders) -> int:
    """Adopt what an earlier control plane has left, and stop it; returns the number of processes."""
    grace = settings.graceful_termination_timeout
    server = LauncherSettings(device="cpu", database=settings.database, graceful_termination_timeout=grace)
    commands = Commands()
    router = RouterProcess(replace(server, port=settings.port), "127.0.0.1", environ, folders, commands)
    router.adopt()
    num_routers = router.num_processes
    plane = ControlPlane(server, environ, folders, commands, outlives=True)
    await plane.service.adopt()
    pids = [pid for entry in plane.fleet.models() for replica in entry.replicas for pid in replica.pids]
    await router.stop(float(grace))
    await plane.stop()
    await asyncio.to_thread(shutil.rmtree, folders.run, ignore_errors=True)
    return num_routers + len(pids)
