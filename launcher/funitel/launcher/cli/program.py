"""Command lines of the clients, and their handling of signals and closed pipes."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import typer

from funitel.launcher.bench.command import bench
from funitel.launcher.bench.settings import BenchSettings
from funitel.launcher.cli.chat import chat
from funitel.launcher.cli.generate import generate
from funitel.launcher.cli.keys import KEY_COMMANDS
from funitel.launcher.cli.settings import ChatSettings, GenerateSettings, TopSettings
from funitel.launcher.cli.top import top
from funitel.proto.process.python import module_command
from funitel.proto.settings.command import SettingsCommand
from funitel.proto.settings.fields import as_command, run_app

T = TypeVar("T")

TORCH_COMMANDS = ("models", "spec")
KEYS = "key"  # the group of commands about keys
PROMPT_HELP = "What to complete; - reads it from stdin."


def run_client() -> NoReturn:
    """Run the client that the first word of the command line names.

    `bench kernels` and `TORCH_COMMANDS` need torch: the model server replaces this process.
    """
    if sys.argv[1:3] == ["bench", "kernels"]:
        os.execv(sys.executable, [*module_command("funitel.model_server"), "bench-kernels", *sys.argv[3:]])
    if sys.argv[1] in TORCH_COMMANDS:
        os.execv(sys.executable, [*module_command("funitel.model_server"), *sys.argv[1:]])
    app = typer.Typer(add_completion=False)
    app.callback()(lambda: None)  # without it, typer would take no name for a single command
    for name, command in CLIENTS.items():
        app.command(name, cls=SettingsCommand)(command)
    keys = typer.Typer(help="Create, list and revoke the API keys of a file.")
    for name, command in KEY_COMMANDS.items():
        keys.command(name, cls=SettingsCommand)(command)
    app.add_typer(keys, name=KEYS)
    run_app(app)


def _until_signalled(run: Callable[[T], None]) -> Callable[[T], None]:
    """Exit by an exception on SIGTERM and SIGHUP, so that a started server is stopped; a closed pipe is no error."""

    def run_client_command(settings: T) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        try:
            run(settings)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the buffered rest
            sys.exit(128 + signal.SIGPIPE)

    return run_client_command


CLIENTS: Mapping[str, Callable[..., Any]] = {
    "bench": as_command(BenchSettings, _until_signalled(bench)),
    "chat": as_command(ChatSettings, _until_signalled(chat)),
    "generate": as_command(GenerateSettings, _until_signalled(generate), {"prompt": PROMPT_HELP}),
    "top": as_command(TopSettings, _until_signalled(top)),
}
