"""Serve a model until a signal or a failure: resolve what is open, claim addresses, run the supervisor."""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import ParsedCommandLine
from funitel.launcher.config.environment_report import describe_environment
from funitel.launcher.config.resolve import resolve, shards_and_gpus, share_of_cores
from funitel.launcher.config.sockets import claim
from funitel.launcher.config.task_limit import check_task_limit
from funitel.launcher.config.upgrade import next_settings
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.control_plane.state_folder import owning, run_folder
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.address_file import address_file
from funitel.launcher.supervisor.adoption import Ports, adoptable, lasting_files
from funitel.launcher.supervisor.keeper_process import usable_keeper
from funitel.launcher.supervisor.supervisor import NextDeployment, Supervisor, Surroundings
from funitel.proto.errors import SettingsError
from funitel.proto.extras import check_extra

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
    with claim(settings.shard_uds_path, num_shard, settings.num_replicas, settings.port) as uds_path:
        resolved = resolve(settings, num_shard, uds_path, gpus)

        def resolve_next(number: int) -> NextDeployment:
            fresh = given.reread()
            try:
                following = next_settings(given.settings, resolved, fresh.settings, fresh.environ, number)
                return NextDeployment(following, fresh.environ, fresh.located)
            except SettingsError as error:
                raise fresh.located(error.message) from error

        with ExitStack() as stack:
            leftovers, adopted = adoptable(
                uds_path, settings, NextDeployment(resolved, environ, given.located), resolve_next
            )
            resolved = dataclasses.replace(resolved, port=adopted.settings.port)
            ports = Ports(resolved, stack)
            if leftovers is None:
                ports.open()
            write_address = stack.enter_context(address_file(resolved))
            state = None if resolved.state_dir is None else stack.enter_context(owning(Path(resolved.state_dir)))
            folders = Folders(run=run_folder(state or Path(f"{uds_path}.models")), state=state)
            lasting, control = lasting_files(resolved, uds_path), folders.control_socket
            around = Surroundings(uds_path, ports.open, lasting, leftovers, control)
            supervisor = Supervisor(adopted.settings, adopted.environ, around, resolve_next, commands, write_address)
            asyncio.run(_serve(supervisor, settings, environ, folders, commands or Commands()))


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
