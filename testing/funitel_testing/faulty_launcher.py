"""The real launcher over shards that go wrong as a test says (`faulty_shard`): takes the launcher's own flags.

FUNITEL_TEST_FAULTS=faults.json python -m funitel_testing.faulty_launcher --model-id MODEL
"""

import os
import sys

import typer

from funitel.launcher.__main__ import configure_logs, serve
from funitel.launcher.commands import Commands
from funitel.launcher.settings import LauncherSettings
from funitel.proto.settings import as_command, run_app

COMMANDS = Commands(model_server=(sys.executable, "-m", "funitel_testing.faulty_shard"))

if __name__ == "__main__":
    app = typer.Typer()
    app.command()(
        as_command(
            LauncherSettings,
            lambda settings: serve(settings, dict(os.environ), COMMANDS),
            program="launcher",
            set_up=configure_logs,
        )
    )
    run_app(app)
