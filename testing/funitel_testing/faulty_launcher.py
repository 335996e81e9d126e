"""The real launcher over shards that go wrong as a test says (`faulty_shard`): takes the launcher's own flags.

FUNITEL_TEST_FAULTS=faults.json python -m funitel_testing.faulty_launcher --model-id MODEL
"""

import os
import sys

from funitel.launcher.__main__ import configure_logs, serve
from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.command_line import launcher_app
from funitel.proto.settings.fields import run_app

COMMANDS = Commands(model_server=(sys.executable, "-m", "funitel_testing.faulty_shard"))

if __name__ == "__main__":
    run_app(launcher_app(sys.argv[1:], os.environ, lambda given: serve(given, COMMANDS), configure_logs))
