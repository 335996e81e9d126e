"""Entry point `funitel`: read flags and environment variables, then run the supervisor or a client."""

import asyncio
import logging
import os
import sys
from contextlib import ExitStack

from funitel.launcher.cli.program import CLIENTS, KEYS, TORCH_COMMANDS, run_client
from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import ParsedCommandLine, launcher_app
from funitel.launcher.config.environment_report import describe_environment
from funitel.launcher.config.resolve import resolve, shards_and_gpus, share_of_cores
from funitel.launcher.config.sockets import claim, listen
from funitel.launcher.config.task_limit import check_task_limit
from funitel.launcher.config.upgrade import next_settings
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.address_file import address_file
from funitel.launcher.supervisor.pid_one import end_at_early_sigterm, is_pid_one
from funitel.launcher.supervisor.supervisor import NextDeployment, Supervisor
from funitel.proto.errors import SettingsError
from funitel.proto.process import logs
from funitel.proto.process.standard_streams import open_standard_streams
from funitel.proto.settings.fields import run_app

logger = logging.getLogger(__name__)


def serve(given: ParsedCommandLine, commands: Commands | None = None) -> None:
    """Serve the model until a signal or a failure.

    Raises:
        FunitelError: settings are wrong, or a child ended; the message names it and the reason.
        typer.Exit: the download failed and has logged the reason.
    """
    settings, environ = given.settings, given.environ
    if settings.env:
        logger.info("%s", describe_environment())
    num_shard, gpus = shards_and_gpus(settings, environ)
    num_shards = num_shard * settings.num_replicas
    check_task_limit(num_shards, settings.num_threads or share_of_cores(settings.device, num_shards) or 1)
    with claim(settings.shard_uds_path, num_shard, settings.num_replicas) as uds_path:
        resolved = resolve(settings, num_shard, uds_path, gpus)

        def resolve_next(number: int) -> NextDeployment:
            fresh = given.reread()
            try:
                following = next_settings(settings, resolved, fresh.settings, fresh.environ, number)
                return NextDeployment(following, fresh.environ, fresh.located)
            except SettingsError as error:
                raise fresh.located(error.message) from error

        with ExitStack() as stack:
            listeners = [stack.enter_context(listen(resolved.hostname, resolved.port))]
            if resolved.prometheus_port is not None:
                second = listen(resolved.hostname, resolved.prometheus_port, "--prometheus-port")
                listeners.append(stack.enter_context(second))
            stack.enter_context(address_file(resolved))
            asyncio.run(Supervisor(resolved, environ, listeners, resolve_next, commands).run())


def configure_logs(settings: LauncherSettings) -> None:
    """Configure logging of the launcher."""
    logs.configure("launcher", json_output=settings.json_output, level=settings.log_level)


def main() -> None:
    """Run the launcher (`funitel ...` or `funitel serve ...`), or the client that `funitel NAME ...` names."""
    open_standard_streams()
    if sys.argv[1:2] == ["serve"]:
        del sys.argv[1]
    elif sys.argv[1:2] and sys.argv[1] in (*CLIENTS, *TORCH_COMMANDS, KEYS):
        run_client()
    if is_pid_one():
        end_at_early_sigterm()
    app = launcher_app(sys.argv[1:], os.environ, serve, configure_logs)
    run_app(app)


if __name__ == "__main__":
    main()
