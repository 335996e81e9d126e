"""The real launcher over imitated children, for tests: takes the launcher's own flags.

`launcher` of the variable FAKE has constants of the launcher, by module and name, that are other than `CONSTANTS`.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from funitel.launcher.__main__ import configure_logs, serve
from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import launcher_app
from funitel.proto.settings.fields import run_app

FAKE_CHILDREN = (sys.executable, str(Path(__file__).with_name("fake_children.py")))
COMMANDS = Commands(
    model_server=(*FAKE_CHILDREN, "model_server"),
    router=(*FAKE_CHILDREN, "router"),
    keeper=(*FAKE_CHILDREN, "keeper"),
)

# Shorter than in service: what these seconds are for happens at once here.
CONSTANTS = {"supervisor.replica.SETTLE_SECONDS": 0.2, "processes.restart_policy.FIRST_DELAY_SECONDS": 0.1}


def set_constants() -> None:
    for path, value in (CONSTANTS | json.loads(os.environ["FAKE"]).get("launcher", {})).items():
        module, name = path.rsplit(".", 1)
        owner = import_module(f"funitel.launcher.{module}")
        assert hasattr(owner, name), path
        setattr(owner, name, value)


if __name__ == "__main__":
    set_constants()
    run_app(launcher_app(sys.argv[1:], os.environ, lambda given: serve(given, COMMANDS), configure_logs))
