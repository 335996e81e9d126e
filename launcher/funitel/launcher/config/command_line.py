"""Parse the launcher's command line, and parse it again for a reload of the `--config` file.

Precedence: flag, file, environment variable, default.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer
from typer.core import TyperCommand

from funitel.launcher.config.config_file import FLAGS, ConfigFile, read_config
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import SettingsError
from funitel.proto.settings.fields import as_command
from funitel.proto.settings.options import usage_message

logger = logging.getLogger(__name__)

CONFIG = "config"  # the setting that names the file


@dataclass(slots=True)
class _ParseState:
    """State of one parse: the file's content, and those of its variables that a flag overrides."""

    variables: MutableMapping[str, str]  # the environment as typer reads it
    file: ConfigFile = field(default_factory=ConfigFile)
    overridden: tuple[str, ...] = ()

    @contextmanager
    def overlaid(self) -> Iterator[None]:
        """Put the variables of the file into the environment, and restore the environment afterwards."""
        before = {name: self.variables.get(name) for name in self.file.values}
        self.variables.update(self.file.values)
        try:
            yield
        finally:
            for name, value in before.items():
                del self.variables[name]
                if value is not None:
                    self.variables[name] = value

    def located(self, message: str) -> SettingsError:
        """Make a SettingsError with a message that names the line of the file at fault, if any."""
        return SettingsError(self.file.locate(message, self.overridden))


@dataclass(frozen=True)
class ParsedCommandLine:
    """The parsed settings, and the environment without the variables that the file sets."""

    settings: LauncherSettings
    environ: Mapping[str, str]
    reread: Callable[[], "ParsedCommandLine"]  # parses again; raises SettingsError
    located: Callable[[str], SettingsError]  # makes an error that names the line of the file


class _Command(TyperCommand):
    """A typer command that also reads variables from a file; its context's object is a `_ParseState`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        state: _ParseState = ctx.obj
        path = self._path(ctx, args)
        state.file = ConfigFile() if path is None else read_config(path)
        with state.overlaid():
            try:
                rest = super().parse_args(ctx, args)
            except typer.BadParameter as error:
                option: Any = error.param
                if _source(ctx, option) == "ENVIRONMENT" and option.envvar in state.file.values:
                    raise state.located(usage_message(error)) from error
                raise
        by_flag = {each.envvar for each in self.get_params(ctx) if _source(ctx, each) == "COMMANDLINE"}
        state.overridden = tuple(name for name in state.file.values if name in by_flag)
        return rest

    def _path(self, ctx: Any, args: Sequence[str]) -> str | None:
        """The file that the flag, or else its variable, names; nothing else is parsed."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        option = next(each for each in self.get_params(ctx) if each.name == CONFIG)
        path: str | None = option.consume_value(ctx, given)[0]
        return path

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
) -> typer.Typer:
    """Make the program that parses its command line and calls `run` with the result.

    Args:
        argv: what `ParsedCommandLine.reread` parses; the first parse takes the program's own.
        variables: the environment as typer reads it; the file overlays it during a parse.
        run: called once.
        set_up: as of `as_command`.
    """
    state = _ParseState(variables)

    def run_parsed(settings: LauncherSettings) -> None:
        for name in state.overridden:
            logger.warning("%s has no effect: %s is given", state.file.position(name), FLAGS[name])
        environ = state.file.without_file_variables(variables)
        run(ParsedCommandLine(settings, environ, lambda: _parse(argv, variables), state.located))

    app = typer.Typer(add_completion=False)
    command = _with_version(as_command(LauncherSettings, run_parsed, program="launcher", set_up=set_up))
    app.command(cls=_Command, context_settings={"obj": state})(command)
    return app


def _parse(argv: Sequence[str], variables: MutableMapping[str, str]) -> ParsedCommandLine:
    """Parse a command line; any error in it is raised as a SettingsError."""
    found: list[ParsedCommandLine] = []
    try:
        launcher_app(argv, variables, found.append)(list(argv), standalone_mode=False)
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


def _version() -> str:
    try:
        return version("funitel")
    except PackageNotFoundError:
        return "(not installed)"


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"funitel {_version()}")
        raise typer.Exit
