"""The real `funitel up` over imitated shards and an imitated router, for tests: takes the flags of `up`."""

import sys

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.processes import restart_policy
from funitel.launcher.up.program import make_up
from funitel.proto.settings.fields import run_app
from funitel_testing import fake_model_server, fake_router

if __name__ == "__main__":
    restart_policy.FIRST_DELAY_SECONDS = 0.1
    commands = Commands(
        model_server=(sys.executable, str(fake_model_server.__file__)),
        router=(sys.executable, str(fake_router.__file__)),
    )
    run_app(make_up("up", commands))
