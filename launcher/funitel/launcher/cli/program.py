"""The program `funitel`: its commands, each imported when it is asked for; without one it serves a model."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand
from typer.main import get_command

from funitel.launcher.cli.fleet.commands import FLEET_COMMANDS, TITLE
from funitel.launcher.config.command_line import LauncherCommand, ParsedCommandLine, launcher_app
from funitel.launcher.settings import LauncherSettings
from funitel.model_server.settings import ARGUMENTS
from funitel.model_server.settings.catalogue import CATALOGUE
from funitel.proto.process.python import module_command
from funitel.proto.settings.command import CommandGroup, SettingsCommand
from funitel.proto.settings.fields import as_command
from funitel.proto.settings.tgi_flags import Program

T = TypeVar("T")

SERVE, HELP = "serve", "help"
SHELLS = ("bash", "zsh", "fish")
_TGI_FORM = ""  # of a command line without a command; no word of a command line


@dataclass(frozen=True)
class ClientCommand:
    """A command of this package.

    Attributes:
        summary: one line for the list of commands.
        settings: its dataclass, as `module:name` in the launcher.
        run: its function.
        arguments: its positional arguments, with their help.
    """

    summary: str
    settings: str
    run: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    def make(self, words: str) -> Any:
        """The typer command."""
        run = _until_signalled(_loaded(self.run))
        return _command(words, as_command(_loaded(self.settings), run, dict(self.arguments)))


@dataclass(frozen=True)
class KeyCommands:
    """A group of commands: `commands` is a mapping of them, as `module:name` in the launcher."""

    summary: str
    commands: str

    def make(self, words: str) -> Any:
        """The typer group."""
        app = typer.Typer(cls=CommandGroup, help=self.summary, add_completion=False)
        for name, function in _loaded(self.commands).items():
            app.command(name, cls=SettingsCommand)(function)
        return get_command(app)


@dataclass(frozen=True)
class ServerCommand:
    """A command of the model server, which replaces this process once the command line is right.

    Attributes:
        settings: its dataclass, of `model_server.settings`.
        name: its name there.
    """

    summary: str
    settings: str
    name: str
    program: Program | None = None

    def make(self, words: str) -> Any:
        """The typer command."""
        settings = getattr(import_module("funitel.model_server.settings"), self.settings)
        rest = 1 + len(words.split())

        def replace_process(_: Any) -> None:
            os.execv(sys.executable, [*module_command("funitel.model_server"), self.name, *sys.argv[rest:]])

        # Before the first log line: the model server writes them.
        parsed = as_command(settings, lambda _: None, ARGUMENTS[settings], program=self.program, set_up=replace_process)
        return _command(words, parsed)


@dataclass(frozen=True)
class ManyModelsCommand:
    """A command about a server of many models; `maker` is the function that makes it, `module:name` in the launcher."""

    summary: str
    maker: str

    def make(self, words: str) -> Any:
        """The typer command."""
        return _loaded(self.maker)(words)


COMMANDS: Mapping[str, ClientCommand | KeyCommands | ServerCommand | ManyModelsCommand] = {
    "up": ManyModelsCommand("Serve many models, which are launched while it runs.", "up.program:make_up"),
    "down": ManyModelsCommand("Stop a server of many models.", "up.program:make_down"),
    "chat": ClientCommand(
        "Chat with a model in the terminal.",
        "cli.settings:ChatSettings",
        "cli.chat:chat",
        {"model_id": "Model to chat with, as --model-id."},
    ),
    "generate": ClientCommand(
        "Complete a prompt.",
        "cli.settings:GenerateSettings",
        "cli.generate:generate",
        {"prompt": "What to complete; - reads it from stdin. The model is --model-id."},
    ),
    "bench": ClientCommand(
        "Measure latency and throughput of servers; `bench kernels` measures this CPU.",
        "bench.settings:BenchSettings",
        "bench.command:bench",
        {"model_id": "Model name in requests, as --model-id."},
    ),
    "bench kernels": ServerCommand("", "KernelSettings", "bench-kernels"),
    "top": ClientCommand("Show what a server is doing.", "cli.settings:TopSettings", "cli.top:top"),
    "worker": ClientCommand(
        "Offer this machine to a control plane.", "worker.settings:WorkerSettings", "worker.command:run_worker"
    ),
    "models": ServerCommand("List what can be served, or what a model needs.", "ModelsSettings", "models"),
    "spec": ServerCommand("Show or check the description of a model.", "SpecSettings", "spec"),
    "download-weights": ServerCommand(
        "Fetch or convert a model before it is served.", "DownloadSettings", "download-weights", "download"
    ),
    "quantize": ServerCommand("Write a model with smaller weights.", "QuantizeSettings", "quantize", "quantize"),
    "perplexity": ServerCommand("Measure how well a model predicts.", "PerplexitySettings", "perplexity"),
    "key": KeyCommands("Manage the API keys of a file.", "cli.keys:KEY_COMMANDS"),
    "user": KeyCommands(
        "Add, list and change the users of a server, and their keys.", "cli.tenants.commands:USER_COMMANDS"
    ),
    "usage": ClientCommand(
        "Show what the users of a server have used.", "cli.tenants.settings:UsageSettings", "cli.tenants.commands:usage"
    ),
    "audit": ClientCommand(
        "Show who has changed what on a server.", "cli.tenants.settings:AuditSettings", "cli.tenants.commands:audit"
    ),
    **{
        name: ClientCommand(each.summary, each.settings_path, each.run_path, each.arguments)
        for name, each in FLEET_COMMANDS.items()
    },
}
OF_USERS = ("user", "usage", "audit")
SUMMARIES: Mapping[str, str] = {
    SERVE: "Serve a model; also done without a command.",
    **{name: entry.summary for name, entry in COMMANDS.items() if entry.summary},
    HELP: "Show the help of a command, a group of flags or a word.",
}


class ServeCommand(LauncherCommand):
    """`funitel serve MODEL`."""

    arguments: Mapping[str, str] = {"model_id": "Model to serve, as --model-id."}

    def surplus(self, ctx: Any, extra: Sequence[str]) -> str:
        """Say that there is one model."""
        return f"unexpected argument {extra[0]!r}: funitel serve takes one MODEL"


class TgiForm(LauncherCommand):
    """`funitel FLAGS`, as text-generation-launcher is called."""

    commands = tuple((name, summary) for name, summary in SUMMARIES.items() if name not in (*FLEET_COMMANDS, *OF_USERS))
    further = ((TITLE, (*FLEET_COMMANDS, *OF_USERS)),)

    def about(self) -> str:
        """What the program does, and what it does without a command."""
        return (
            f"{self.help}\n\nWithout a command it serves the model of --model-id. The flags below are those of serve."
        )

    def surplus(self, ctx: Any, extra: Sequence[str]) -> str:
        """Say where a command or a model belongs."""
        if extra[0] in SUMMARIES:
            return f"{extra[0]} comes before the flags: funitel {extra[0]} ..."
        return f"unexpected argument {extra[0]!r}: to serve a model, run funitel serve {extra[0]}, or give --model-id"


class _StandIn(TyperCommand):
    """A command in a list of commands."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return self.help or ""


class _Program(CommandGroup):
    """The commands above, and TGI's form where the first word is none."""

    load: Callable[[str], Any]

    def list_commands(self, ctx: Any) -> list[str]:
        return [*SUMMARIES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in for a list; `resolve_command` gives the command itself."""
        return _StandIn(cmd_name, help=SUMMARIES[cmd_name]) if cmd_name in SUMMARIES else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = "bench kernels" if args[:2] == ["bench", "kernels"] else args[0]
        if words != _TGI_FORM and words not in (*SUMMARIES, *COMMANDS) and not ctx.resilient_parsing:
            ctx.fail(self.unknown(ctx, words))
        known = words == _TGI_FORM or words in SUMMARIES or words in COMMANDS
        return words, self.load(words) if known else None, args[max(1, len(words.split())) :]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing and args == [HELP]:
            return super().parse_args(ctx, [])
        if args[:1] == [HELP]:
            words = [word for word in args[1:] if word != HELP]
            args = [*words, "--help"] if not words or words[0] in SUMMARIES else [f"--help={words[0]}"]
        own: dict[str, Any] = {name: option for option in self.params for name in option.opts}
        if args[:1] == [""]:
            ctx.fail("the first argument is empty: it must be a command or a flag")
        if not args and ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        if len(args) > 1 and args[0] in own:  # of completion, which takes a shell
            if args[1] not in SHELLS:
                ctx.fail(f"{args[0]} takes {', '.join(SHELLS)} or nothing, given {args[1]!r}")
            own[args[0]].callback(ctx, own[args[0]], args[1])
        if not args or (args[0].startswith("-") and args[0] not in own):
            args = [_TGI_FORM, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        flags = self.load(_TGI_FORM).shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return [*super().shell_complete(ctx, incomplete), *flags]

    def unknown(self, ctx: Any, word: str) -> str:
        if word in CATALOGUE or "/" in word or Path(word).exists():
            return f"{ctx.command_path} has no command {word!r}: to serve that model, run funitel serve {word}"
        flags = {name for option in self.load(_TGI_FORM).params for name in option.opts}
        if f"--{word}" in flags:
            return f"{ctx.command_path} has no command {word!r}: did you mean --{word}?"
        return super().unknown(ctx, word)


def program(
    variables: MutableMapping[str, str],
    serve: Callable[[ParsedCommandLine], None],
    set_up: Callable[[LauncherSettings], None],
) -> typer.Typer:
    """Make the program.

    Args:
        variables: the environment as typer reads it.
        serve: run by `serve` and without a command.
        set_up: called before it.
    """

    def load(words: str) -> Any:
        if words in (SERVE, _TGI_FORM):
            form, argv = (ServeCommand, sys.argv[2:]) if words == SERVE else (TgiForm, sys.argv[1:])
            return get_command(launcher_app(argv, variables, serve, set_up, form))
        return COMMANDS[words].make(words)

    class _Loaded(_Program):
        """The program with its loader."""

    _Loaded.load = staticmethod(load)
    app = typer.Typer(cls=_Loaded, rich_markup_mode=None)
    app.callback()(lambda: None)
    return app


def _command(words: str, function: Callable[..., None]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(words, cls=SettingsCommand)(function)
    return get_command(app)


def _loaded(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(f"funitel.launcher.{module}"), name)


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
