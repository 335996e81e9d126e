"""The real agent over an imitated model server: takes the flags of `funitel worker`; FAKE_VERSION is its release."""

import asyncio
import os
import sys
from pathlib import Path

import typer

from funitel.launcher.worker.agent import Agent
from funitel.launcher.worker.settings import WorkerSettings
from funitel.proto.process import logs
from funitel.proto.settings.command import SettingsCommand
from funitel.proto.settings.fields import as_command, run_app

PROGRAM = (sys.executable, str(Path(__file__).with_name("fake_shard.py")))


def run(settings: WorkerSettings) -> None:
    logs.configure("worker", json_output=False, level="INFO")
    asyncio.run(Agent(settings, program=PROGRAM, own_version=os.environ.get("FAKE_VERSION")).run())


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command("worker", cls=SettingsCommand)(as_command(WorkerSettings, run))
    run_app(app)
