"""Entry point `funitel`: read flags, variables and the environment once, then supervise."""

import asyncio
import logging
import os
import sys
from contextlib import ExitStack

from funitel.launcher.cli.program import CLIENTS, KEYS, TORCH_COMMANDS, run_client
from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import Given, launcher_app
from funitel.launcher.config.environment_report import describe_runtime
from funitel.launcher.config.resolve import resolve, shards_and_gpus
from funitel.launcher.config.sockets import claim, listen
from funitel.launcher.config.upgrade import next_settings
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.supervisor import Anew, Supervisor
from funitel.proto.errors import SettingsError
from funitel.proto.process import logs
from funitel.proto.settings.fields import run_app

logger = logging.getLogger(__name__)


def serve(given: Given, commands: Commands | None = None) -> None:
    """Serve the model until a signal or a failure.

    Raises:
        FunitelError: settings are wrong, or a child ended; the message says which and why.
        typer.Exit: the download failed and has said why.
    """
    settings, environ = given.settings, given.environ
    if settings.env:
        logger.info("%s", describe_runtime())
    num_shard, gpus = shards_and_gpus(settings, environ)
    with claim(settings.shard_uds_path, num_shard, settings.num_replicas) as uds_path:
        resolved = resolve(settings, num_shard, uds_path, gpus)

        def again(number: int) -> Anew:
            fresh = given.again()
            try:
                anew = next_settings(settings, resolved, fresh.settings, fresh.environ, number)
                return Anew(anew, fresh.environ, fresh.blamed)
            except SettingsError as error:
                raise fresh.blamed(error.message) from error

        with ExitStack() as stack:
            listeners = [stack.enter_context(listen(resolved.hostname, resolved.port))]
            if resolved.prometheus_port is not None:
                second = listen(resolved.hostname, resolved.prometheus_port, "--prometheus-port")
                listeners.append(stack.enter_context(second))
            asyncio.run(Supervisor(resolved, environ, listeners, again, commands).run())


def configure_logs(settings: LauncherSettings) -> None:
    """Log as the launcher."""
    logs.configure("launcher", json_output=settings.json_output, level=settings.log_level)


def main() -> None:
    """Run the launcher, `funitel serve ...` as `funitel ...`; or one of the clients that `funitel NAME ...` names."""
    if sys.argv[1:2] == ["serve"]:
        del sys.argv[1]
    elif sys.argv[1:2] and sys.argv[1] in (*CLIENTS, *TORCH_COMMANDS, KEYS):
        run_client()
    app = launcher_app(sys.argv[1:], os.environ, serve, configure_logs)
    run_app(app)


if __name__ == "__main__":
    main()
