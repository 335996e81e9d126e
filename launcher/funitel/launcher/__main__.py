"""Entry point `funitel`: read flags, variables and the environment once, then supervise."""

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from funitel.launcher.client.program import CLIENTS, KEYS, TORCH_COMMANDS, run_client
from funitel.launcher.commands import Commands
from funitel.launcher.resolve import decide_num_shard, listed_gpus, resolve, visible_gpus
from funitel.launcher.runtime import describe_runtime
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.sockets import claim, listen
from funitel.launcher.supervisor import Supervisor
from funitel.proto import logs
from funitel.proto.settings import as_command, run_app

logger = logging.getLogger(__name__)


def serve(settings: LauncherSettings, environ: Mapping[str, str], commands: Commands | None = None) -> None:
    """Serve the model until a signal or a failure.

    Raises:
        FunitelError: settings are wrong, or a child ended; the message says which and why.
        typer.Exit: the download failed and has said why.
    """
    if settings.env:
        logger.info("%s", describe_runtime())
    gpus = visible_gpus(settings.device, environ)
    if gpus is None and settings.num_replicas > 1 and settings.device != "cpu":
        gpus = listed_gpus()  # each replica must be told its own
    num_shard = decide_num_shard(settings, None if gpus is None else len(gpus))
    with claim(settings.shard_uds_path, num_shard, settings.num_replicas) as uds_path:
        resolved = resolve(settings, num_shard, uds_path, gpus or () if settings.num_replicas > 1 else ())
        with ExitStack() as stack:
            listeners = [stack.enter_context(listen(resolved.hostname, resolved.port))]
            if resolved.prometheus_port is not None:
                second = listen(resolved.hostname, resolved.prometheus_port, "--prometheus-port")
                listeners.append(stack.enter_context(second))
            asyncio.run(Supervisor(resolved, environ, listeners, commands).run())


def configure_logs(settings: LauncherSettings) -> None:
    """Log as the launcher."""
    logs.configure("launcher", json_output=settings.json_output, level=settings.log_level)


def main() -> None:
    """Run the launcher, `funitel serve ...` as `funitel ...`; or one of the clients that `funitel NAME ...` names."""
    if sys.argv[1:2] == ["serve"]:
        del sys.argv[1]
    elif sys.argv[1:2] and sys.argv[1] in (*CLIENTS, *TORCH_COMMANDS, KEYS):
        run_client()
    app = typer.Typer(add_completion=False)
    environ = dict(os.environ)
    command = as_command(
        LauncherSettings, lambda settings: serve(settings, environ), program="launcher", set_up=configure_logs
    )
    app.command()(_with_version(command))
    run_app(app)


def _with_version(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flag `--version`."""

    def run(*, version: bool, **values: Any) -> None:
        command(**values)

    option = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    parameter = inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=bool)
    signature = inspect.signature(command)
    parameters = [*signature.parameters.values(), parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = command.__doc__
    return run


def _version() -> str:
    try:
        return version("funitel")
    except PackageNotFoundError:
        return "(not installed)"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"funitel {_version()}")
        raise typer.Exit


if __name__ == "__main__":
    main()
