"""The launcher's command line, which can be read again: flags and environment stay, the file of `--config` may change.

A flag beats the file, the file beats the environment, and that beats a default.
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
class _Reading:
    """What one reading has found out about the file: its content, and the variables that a flag has the better of."""

    variables: MutableMapping[str, str]  # where typer looks variables up
    file: ConfigFile = field(default_factory=ConfigFile)
    beaten: tuple[str, ...] = ()

    @contextmanager
    def overlaid(self) -> Iterator[None]:
        """Have typer find the variables of the file, and those of the environment as they were before afterwards."""
        before = {name: self.variables.get(name) for name in self.file.values}
        self.variables.update(self.file.values)
        try:
            yield
        finally:
            for name, value in before.items():
                del self.variables[name]
                if value is not None:
                    self.variables[name] = value

    def blamed(self, message: str) -> SettingsError:
        """An error that says which line of the file it is about, if one is."""
        return SettingsError(self.file.blame(message, self.beaten))


@dataclass(frozen=True)
class Given:
    """What the launcher is told: settings, and the environment without what the file says instead."""

    settings: LauncherSettings
    environ: Mapping[str, str]
    again: Callable[[], "Given"]  # reads once more; raises SettingsError
    blamed: Callable[[str], SettingsError]  # makes an error of a message, which names the line of the file


class _Command(TyperCommand):
    """A typer command whose variables stand in a file too; its context's object is a `_Reading`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        reading: _Reading = ctx.obj
        path = self._path(ctx, args)
        reading.file = ConfigFile() if path is None else read_config(path)
        with reading.overlaid():
            try:
                rest = super().parse_args(ctx, args)
            except typer.BadParameter as error:
                option: Any = error.param
                if _source(ctx, option) == "ENVIRONMENT" and option.envvar in reading.file.values:
                    raise reading.blamed(usage_message(error)) from error
                raise
        by_flag = {each.envvar for each in self.get_params(ctx) if _source(ctx, each) == "COMMANDLINE"}
        reading.beaten = tuple(name for name in reading.file.values if name in by_flag)
        return rest

    def _path(self, ctx: Any, args: Sequence[str]) -> str | None:
        """The file that a flag, or else its variable, names; without a look at anything else."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        option = next(each for each in self.get_params(ctx) if each.name == CONFIG)
        path: str | None = option.consume_value(ctx, given)[0]
        return path

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            raise ctx.obj.blamed(error.message) from error


def _source(ctx: Any, option: Any) -> str | None:
    """Where typer has found the value of an option: COMMANDLINE, ENVIRONMENT or DEFAULT."""
    source = None if option is None else ctx.get_parameter_source(option.name)
    return None if source is None else str(source.name)


def launcher_app(
    argv: Sequence[str],
    variables: MutableMapping[str, str],
    run: Callable[[Given], None],
    set_up: Callable[[LauncherSettings], None] = lambda settings: None,
) -> typer.Typer:
    """Make the program that reads its command line and hands what it is told to `run`.

    Args:
        argv: what `Given.again` reads; the first time it is the program's own.
        variables: the environment, as typer sees it: the file is laid over it while it is read.
        run: called once.
        set_up: as of `as_command`.
    """
    reading = _Reading(variables)

    def told(settings: LauncherSettings) -> None:
        for name in reading.beaten:
            logger.warning("%s has no effect, for %s is given", reading.file.place(name), FLAGS[name])
        run(Given(settings, reading.file.hide_from(variables), lambda: _read(argv, variables), reading.blamed))

    app = typer.Typer(add_completion=False)
    command = _with_version(as_command(LauncherSettings, told, program="launcher", set_up=set_up))
    app.command(cls=_Command, context_settings={"obj": reading})(command)
    return app


def _read(argv: Sequence[str], variables: MutableMapping[str, str]) -> Given:
    """Read a command line for itself; whatever is wrong with it is a SettingsError."""
    found: list[Given] = []
    try:
        launcher_app(argv, variables, found.append)(list(argv), standalone_mode=False)
    except typer.TyperException as error:
        raise SettingsError(usage_message(error)) from error
    return found[0]


def _with_version(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flag `--version`."""

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
