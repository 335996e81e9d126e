"""Parse the launcher's command line, and parse it again for a reload of the `--config` file.

Precedence: flag, environment variable, file, default that a container image sets (`FUNITEL_DEFAULT_...`), default.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer

from funitel.launcher.config.config_file import FLAGS, ConfigFile, read_config
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import SettingsError
from funitel.proto.process.version import version
from funitel.proto.settings.command import SettingsCommand
from funitel.proto.settings.fields import as_command
from funitel.proto.settings.options import usage_message
from funitel.proto.settings.variables import (
    DEFAULT_PREFIX,
    PREFIX,
    STRAY_KEY,
    first_set,
    image_default,
    names_of,
    overlaid,
)

logger = logging.getLogger(__name__)

CONFIG = "config"  # the setting that names the file
# The variables of settings, which children get as flags.
_OWN = frozenset(name for variable in FLAGS for name in (*names_of(variable), variable.removeprefix(PREFIX)))


@dataclass(slots=True)
class _ParseState:
    """State of one parse: the file's content, and by what each of its variables without effect is overridden."""

    variables: MutableMapping[str, str]  # the environment as typer reads it
    file: ConfigFile = field(default_factory=ConfigFile)
    overridden: dict[str, str] = field(default_factory=dict)

    def additions(self) -> dict[str, str | None]:
        """Variables of the file, and defaults of the image, for settings that the environment does not set."""
        added: dict[str, str | None] = {}
        for variable in FLAGS:
            names = names_of(variable)
            is_ours = variable == STRAY_KEY and bool(self.file.values.get(variable))
            if found := first_set(names[:1] if is_ours else names, self.variables):
                if variable in self.file.values:
                    self.overridden[variable] = f"the environment has {found}"
            else:
                added[names[0]] = self.file.values.get(variable) or image_default(variable, self.variables)
        return added

    def file_gives(self, variable: str) -> bool:
        """Whether the file, and not the environment, has a variable."""
        return variable in self.file.values and variable not in self.overridden

    def located(self, message: str) -> SettingsError:
        """Make a SettingsError with a message that names the line of the file at fault, if any."""
        return SettingsError(self.file.locate(message, self.overridden))


@dataclass(frozen=True)
class ParsedCommandLine:
    """The parsed settings, and the environment of children, which get settings as flags."""

    settings: LauncherSettings
    environ: Mapping[str, str]
    reread: Callable[[], "ParsedCommandLine"]  # parses again; raises SettingsError
    located: Callable[[str], SettingsError]  # makes an error that names the line of the file


class LauncherCommand(SettingsCommand):
    """TGI's form, without positional arguments; reads variables from a file too.

    Its context's object is a `_ParseState`.
    """

    arguments: Mapping[str, str] = {}  # positional ones, with their help

    def defaults(self, ctx: Any) -> dict[str, str | None]:
        """None yet: `parse_settings` applies those of an image below the file."""
        return {}

    def parse_settings(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the variables of the file."""
        state: _ParseState = ctx.obj
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        path = None if any(option.is_eager for option in order) else self._path(ctx, args)  # --help needs no file
        state.file = ConfigFile() if path is None else read_config(path)
        with overlaid(state.variables, state.additions()):
            try:
                rest = super().parse_settings(ctx, args)
            except typer.BadParameter as error:
                option: Any = error.param
                if _source(ctx, option) == "ENVIRONMENT" and state.file_gives(option.envvar[-1]):
                    raise state.located(usage_message(error)) from error
                raise
        for option in self.get_params(ctx):
            variable = (option.envvar or [None])[-1]
            if variable in state.file.values and _source(ctx, option) == "COMMANDLINE":
                state.overridden[variable] = f"{FLAGS[variable]} is given"
        return rest

    def _path(self, ctx: Any, args: Sequence[str]) -> str | None:
        """The file that the flag, or else its variable, names; nothing else is parsed."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        option = next(each for each in self.get_params(ctx) if each.name == CONFIG)
        path: str | None = option.consume_value(ctx, given)[0]
        return path

    def surplus(self, ctx: Any, extra: Sequence[str]) -> str:
        """Say where the word belongs."""
        return f"unexpected argument {extra[0]!r}: put a command first, as in funitel serve {extra[0]}"

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            raise ctx.obj.located(error.message) from error


def _source(ctx: Any, option: Any) -> str | None:
    """Source of an option's value: COMMANDLINE, ENVIRONMENT or DEFAULT."""
    source = None if option is None else ctx.get_parameter_source(option.name)
    return None if source is None else str(source.name)


def launcher_app(
    argv: Sequence[str],
    variables: MutableMapping[str, str],
    run: Callable[[ParsedCommandLine], None],
    set_up: Callable[[LauncherSettings], None] = lambda settings: None,
    command: type[LauncherCommand] = LauncherCommand,
) -> typer.Typer:
    """Make the program that parses its command line and calls `run` with the result.

    Args:
        argv: what `ParsedCommandLine.reread` parses; the first parse takes the program's own.
        variables: the environment as typer reads it; the file overlays it during a parse.
        run: called once.
        set_up: as of `as_command`.
        command: the form of its command line.
    """
    state = _ParseState(variables)

    def run_parsed(settings: LauncherSettings) -> None:
        for name in filter(state.overridden.get, state.file.values):
            logger.warning("%s has no effect: %s", state.file.position(name), state.overridden[name])
        environ = {
            name: value
            for name, value in variables.items()
            if name not in _OWN and not name.startswith(DEFAULT_PREFIX)  # children get settings as flags
        }
        run(ParsedCommandLine(settings, environ, lambda: _parse(argv, variables, command), state.located))

    app = typer.Typer(add_completion=False)
    parsed = as_command(LauncherSettings, run_parsed, command.arguments, program="launcher", set_up=set_up)
    app.command(cls=command, context_settings={"obj": state})(_with_version(parsed))
    return app


def _parse(
    argv: Sequence[str], variables: MutableMapping[str, str], command: type[LauncherCommand]
) -> ParsedCommandLine:
    """Parse a command line; any error in it is raised as a SettingsError."""
    found: list[ParsedCommandLine] = []
    try:
        launcher_app(argv, variables, found.append, command=command)(list(argv), standalone_mode=False)
    except typer.TyperException as error:
        raise SettingsError(usage_message(error)) from error
    return found[0]


def _with_version(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flag `--version` to a command."""

    def run(*, version: bool, **values: Any) -> None:
        command(**values)

    option = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    parameter = inspect.Parameter("version", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=bool)
    signature = inspect.signature(command)
    parameters = [*signature.parameters.values(), parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__doc__ = command.__doc__
    return run


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"funitel {version()}")
        raise typer.Exit
