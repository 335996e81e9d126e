"""The real launcher over imitated children, for tests: takes the launcher's own flags."""

import os
import sys
from pathlib import Path

import typer

from funitel.launcher.__main__ import configure_logs, serve
from funitel.launcher.commands import Commands
from funitel.launcher.settings import LauncherSettings
from funitel.proto.settings import as_command, run_app

FAKE_CHILDREN = (sys.executable, str(Path(__file__).with_name("fake_children.py")))
COMMANDS = Commands(model_server=(*FAKE_CHILDREN, "model_server"), router=(*FAKE_CHILDREN, "router"))

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
