"""The real launcher over imitated children, for tests: takes the launcher's own flags."""

import os
import sys
from pathlib import Path

from funitel.launcher.__main__ import configure_logs, serve
from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import launcher_app
from funitel.proto.settings.fields import run_app

FAKE_CHILDREN = (sys.executable, str(Path(__file__).with_name("fake_children.py")))
COMMANDS = Commands(model_server=(*FAKE_CHILDREN, "model_server"), router=(*FAKE_CHILDREN, "router"))

if __name__ == "__main__":
    run_app(launcher_app(sys.argv[1:], os.environ, lambda given: serve(given, COMMANDS), configure_logs))
