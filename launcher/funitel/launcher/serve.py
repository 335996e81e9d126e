"""Serve a model until a signal or a failure: resolve what is open, claim addresses, run the supervisor."""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from socket import socket
from threading import Thread
from typing import Any

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import ParsedCommandLine
from funitel.launcher.config.environment_report import describe_environment
from funitel.launcher.config.resolve import ResolvedSettings, resolve, shards_and_gpus, share_of_cores
from funitel.launcher.config.sockets import claim, listen, logs_folder, remove_beside, remove_sockets
from funitel.launcher.config.task_limit import check_task_limit
from funitel.launcher.config.upgrade import next_settings
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.control_plane.state_folder import owning, run_folder
from funitel.launcher.processes.pid_one import is_pid_one
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.address_file import address_file
from funitel.launcher.supervisor.keeper_process import usable_keeper
from funitel.launcher.supervisor.lasting_child import LastingFiles
from funitel.launcher.supervisor.leftovers import Leftovers
from funitel.launcher.supervisor.supervisor import NextDeployment, ResolveNext, Supervisor, Surroundings
from funitel.proto.errors import SettingsError
from funitel.proto.extras import check_extra
from funitel.proto.process.deployment_file import file_of

logger = logging.getLogger(__name__)


def run(given: ParsedCommandLine, commands: Commands | None = None) -> None:
    """Serve the model of a command line.

    Args:
        given: the command line.
        commands: of the children; those of this program when not given.

    Raises:
        FunitelError: settings are wrong, or a child ended; the message names it and the reason.
        typer.Exit: the download failed and has logged the reason.
    """
    settings, environ = given.settings, given.environ
    check_extra("server", "serving a model")
    if settings.otlp_endpoint is not None:
        check_extra("otlp", "--otlp-endpoint")
    if settings.env:
        logger.info("%s", describe_environment())
    settings = usable_keeper(settings)
    num_shard, gpus = shards_and_gpus(settings, environ)
    num_shards = num_shard * settings.num_replicas
    check_task_limit(num_shards, settings.num_threads or share_of_cores(settings.device, num_shards) or 1)
    with claim(settings.shard_uds_path, num_shard, settings.num_replicas) as uds_path:
        resolved = resolve(settings, num_shard, uds_path, gpus)

        def resolve_next(number: int) -> NextDeployment:
            fresh = given.reread()
            try:
                following = next_settings(given.settings, resolved, fresh.settings, fresh.environ, number)
                return NextDeployment(following, fresh.environ, fresh.located)
            except SettingsError as error:
                raise fresh.located(error.message) from error

        with ExitStack() as stack:
            leftovers, adopted = _adoptable(uds_path, settings, NextDeployment(resolved, environ, given.located), resolve_next)
            resolved = dataclasses.replace(resolved, port=adopted.settings.port)
            ports = _Ports(resolved, stack)
            if leftovers is None:
                ports.open()
            write_address = stack.enter_context(address_file(resolved))
            state = None if resolved.state_dir is None else stack.enter_context(owning(Path(resolved.state_dir)))
            folders = Folders(run=run_folder(state or Path(f"{uds_path}.models")), state=state)
            around = Surroundings(uds_path, ports.open, _lasting(resolved, uds_path), leftovers, folders.control_socket)
            supervisor = Supervisor(
                adopted.settings, adopted.environ, around, resolve_next, commands, write_address
            )
            asyncio.run(_serve(supervisor, settings, environ, folders, commands or Commands()))


class _Ports:
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


def _lasting(settings: ResolvedSettings, uds_path: str) -> LastingFiles | None:
    """The files of children that outlive this process; None where they are to end with it."""
    if not settings.keeper or not settings.adopt_timeout or is_pid_one():
        return None
    files = LastingFiles(logs_folder(uds_path), file_of(uds_path))
    try:
        files.prepare()
    except OSError as error:
        logger.warning("no other launcher can adopt this one's processes: %s", error)
        return None
    return files


def _adoptable(
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
    lasts = _lasting(fresh.settings, uds_path) is not None
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


async def _serve(
    supervisor: Supervisor, settings: LauncherSettings, environ: Mapping[str, str], folders: Folders, commands: Commands
) -> None:
    """Run the supervisor, and once it serves, a control plane beside it for further models."""
    managing = asyncio.create_task(_manage(supervisor, settings, environ, folders, commands))
    try:
        await supervisor.run()
    finally:
        managing.cancel()
        await asyncio.gather(managing, return_exceptions=True)


async def _manage(
    supervisor: Supervisor, settings: LauncherSettings, environ: Mapping[str, str], folders: Folders, commands: Commands
) -> None:
    await supervisor.ready.wait()
    beside = await _imported("funitel.launcher.beside")  # a database, a server: the first model does not wait for them
    await beside.manage_models(supervisor, settings, environ, folders, commands)


async def _imported(name: str) -> Any:
    """Import a module in a thread of its own: it takes a second or more, in which signals are to be handled.

    Nothing waits for the thread at the end of the program.
    """
    loop = asyncio.get_running_loop()
    imported: asyncio.Future[Any] = loop.create_future()

    def tell(module: Any) -> None:
        if not imported.done():
            imported.set_result(module)

    def work() -> None:
        module = import_module(name)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, module)

    Thread(target=work, name="import", daemon=True).start()
    return await imported
