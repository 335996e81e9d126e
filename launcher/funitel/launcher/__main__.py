"""Entry point `funitel`: serve a model, or run the command that the first word names."""

import os

from funitel.launcher.cli.program import program
from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import ParsedCommandLine
from funitel.launcher.processes.pid_one import end_at_early_sigterm, is_pid_one
from funitel.launcher.settings import LauncherSettings
from funitel.proto.process import logs
from funitel.proto.process.standard_streams import open_standard_streams
from funitel.proto.settings.fields import run_app


def serve(given: ParsedCommandLine, commands: Commands | None = None) -> None:
    """Serve the model of a command line; see `funitel.launcher.serve.run`."""
    from funitel.launcher.serve import run  # asyncio, gRPC: time that --help and completions do without

    run(given, commands)


def configure_logs(settings: LauncherSettings) -> None:
    """Configure logging of the launcher."""
    logs.configure("launcher", json_output=settings.json_output, level=settings.log_level)


def main() -> None:
    """Run the launcher (`funitel ...` or `funitel serve ...`), or the command that `funitel NAME ...` names."""
    open_standard_streams()
    if is_pid_one():
        end_at_early_sigterm()
    run_app(program(os.environ, serve, configure_logs))


if __name__ == "__main__":
    main()
