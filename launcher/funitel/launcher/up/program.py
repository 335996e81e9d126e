"""The commands `funitel up` and `funitel down`: their flags, the folders that they take, and what is refused."""

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.resolve import check_files
from funitel.launcher.config.sockets import free_port
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.control_plane.state_folder import default_state_folder, owning, run_folder
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.keeper_process import usable_keeper
from funitel.launcher.up.config_file import UpConfig, read_config
from funitel.launcher.up.down import stop_server
from funitel.launcher.up.server import ManyModelServer
from funitel.launcher.up.settings import CONFIG, DownSettings, UpSettings, launcher_settings
from funitel.proto.extras import check_extra
from funitel.proto.process import logs
from funitel.proto.settings.command import SettingsCommand
from funitel.proto.settings.fields import as_command
from funitel.proto.settings.listen_address import is_local_by_default, listen_address
from funitel.proto.settings.variables import overlaid
from funitel.router.settings import local_only, opens_port

logger = logging.getLogger(__name__)


class UpCommand(SettingsCommand):
    """`funitel up`, which reads flags from a file too; its context's object is a list for the file."""

    def parse_settings(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the flags of the file for what neither a flag nor the environment sets."""
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        option = next(each for each in self.get_params(ctx) if each.name == CONFIG)
        path: str | None = option.consume_value(ctx, given)[0]
        config = UpConfig() if path is None or any(each.is_eager for each in order) else read_config(path)
        ctx.obj.append(config)
        with overlaid(os.environ, config.additions(os.environ)):
            return super().parse_settings(ctx, args)


def make_up(words: str, commands: Commands | None = None) -> Any:
    """The typer command `up`; `commands` are those of this program when not given."""
    began, read = time.monotonic(), list[UpConfig]()
    environ = dict(os.environ)

    def run(settings: Any) -> None:
        serve_models(launcher_settings(settings), read[-1], environ, commands or Commands(), began=began)

    def set_up(settings: Any) -> None:
        logs.configure("launcher", json_output=settings.json_output, level=settings.log_level)

    app = typer.Typer(add_completion=False)
    function = as_command(UpSettings, run, program="launcher", set_up=set_up)
    app.command(words, cls=UpCommand, context_settings={"obj": read})(function)
    return get_command(app)


def make_down(words: str) -> Any:
    """The typer command `down`."""
    environ = dict(os.environ)

    def run(settings: DownSettings) -> None:
        stop_server(settings, environ)

    def set_up(settings: DownSettings) -> None:
        logs.configure("launcher", json_output=False, level=settings.log_level)

    app = typer.Typer(add_completion=False)
    app.command(words, cls=SettingsCommand)(as_command(DownSettings, run, set_up=set_up))
    return get_command(app)


def serve_models(
    settings: LauncherSettings, config: UpConfig, environ: Mapping[str, str], commands: Commands, *, began: float
) -> None:
    """Serve many models until a signal.

    Raises:
        FunitelError: settings are wrong, another process has the port or the state, or the router cannot be kept.
    """
    check_extra("server", "serving models")
    if settings.otlp_endpoint is not None:
        check_extra("otlp", "--otlp-endpoint")
    check_files(settings)
    asked = (settings.hostname, settings.default_hostname)
    hostname = listen_address(*asked, is_guarded=opens_port(settings))
    if is_local_by_default(*asked, is_guarded=opens_port(settings)):
        logger.info(local_only(settings))
    settings = dataclasses.replace(usable_keeper(settings), port=settings.port or free_port())
    given = settings.state_dir
    folder = default_state_folder(settings.port, environ) if given is None else Path(given).absolute()
    with owning(folder):
        folders = Folders(run=run_folder(folder), state=folder)
        asyncio.run(_run(settings, hostname, environ, folders, commands, config, began))


async def _run(
    settings: LauncherSettings,
    hostname: str,
    environ: Mapping[str, str],
    folders: Folders,
    commands: Commands,
    config: UpConfig,
    began: float,
) -> None:
    await ManyModelServer(settings, hostname, environ, folders, commands).run(config.models, began=began)
