"""Settings as frozen dataclasses, rendered as typer commands.

A field made with `setting(default, help)` becomes the flag `--its-name`, the variable `FUNITEL_ITS_NAME` (also TGI's
name, where TGI has it) and a line of `--help`. Precedence: flag, variable, default. Only typer reads the environment.
Flags of TGI that are accepted without being honoured are rows of `tgi_flags`. `to_argv` converts settings back to flags
for a child process.
"""

import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, get_type_hints

import typer

from funitel.proto.errors import FunitelError, SettingsError
from funitel.proto.settings.bounds import ANY, Bounds
from funitel.proto.settings.command import POSITIONAL
from funitel.proto.settings.options import Meta, flag_of, option_of, tgi_option, usage_message
from funitel.proto.settings.tgi_flags import Inert, Program, Refused, Translated, rows_of
from funitel.proto.settings.variables import PREFIX, PROTECTIVE, TGI_VARIABLES, GivenBy, disregarded, first_set

logger = logging.getLogger(__name__)

T = TypeVar("T")


def setting(
    default: Any,
    help: str,
    *,
    short: str | None = None,
    choices: Iterable[str] = (),
    env: str | None = "",
    aliases: Iterable[str] = (),
    takes_value: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
    translated: Mapping[str, Translated] = MappingProxyType({}),
    bounds: Bounds = ANY,
    keeps_variable: bool = False,
    complete: Callable[[str], Iterable[str]] | None = None,
    unlisted: Iterable[str] = (),
) -> Any:
    """Declare one field of a settings dataclass.

    Args:
        default: value when neither flag nor variable is given; None means "decided at start".
        help: one line for `--help` and the settings page; names the unit.
        short: one-letter flag, such as "-p".
        choices: the allowed values; empty for any.
        env: name of the variable; "" derives it from the field, None means that there is none.
        aliases: further long flags.
        takes_value: a boolean that is written `--its-name true` instead of being a switch.
        refused: known values that cannot be honoured, with the reason.
        translated: values of TGI's that have another name here; each is logged when given.
        bounds: range for `check_bounds`; None is always allowed where it is the default.
        keeps_variable: a text that a variable gave is a `GivenBy`.
        complete: values that begin with a text, for the completion of shells; those of `choices` need none.
        unlisted: values that are allowed beside `choices`, and are listed elsewhere.
    """
    meta = Meta(
        *(help, short, tuple(choices), env, tuple(aliases), takes_value),
        *(refused, translated, bounds, keeps_variable, complete, tuple(unlisted)),
    )
    return field(default=default, metadata={"setting": meta})


def inherited(source: dataclasses.Field[Any], **changes: Any) -> Any:
    """Declare a field like that of another settings dataclass, which checks its bounds; `changes` are to its `Meta`."""
    meta = dataclasses.replace(source.metadata["setting"], bounds=ANY, **changes)
    return field(default=source.default, metadata={"setting": meta})


def as_command(
    cls: type[T],
    run: Callable[[T], None],
    arguments: Mapping[str, str] | None = None,
    *,
    program: Program | None = None,
    set_up: Callable[[T], None] = lambda settings: None,
) -> Callable[..., None]:
    """Make a typer command function that builds `cls` from flags and variables and calls `run` with it.

    Args:
        cls: the settings dataclass.
        run: called with the settings.
        arguments: the fields that are positional, with their help; one that is a setting too keeps its flag, and
            needs the class `command.SettingsCommand`.
        program: its rows of `tgi_flags` are accepted too; refused ones raise SettingsError before `run`.
        set_up: called before `run` and before the first log line; each given row without effect is logged.
    """
    rows = tuple(rows_of(program)) if program else ()
    parameters = [*_parameters(cls, arguments or {}), *(tgi_option(row, program) for row in rows if program)]
    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def command(*, context: typer.Context, **values: Any) -> None:
        given = _Given(context, values)
        asked = [(row, given.text(row.name, values[row.name])) for row in rows if row.asks(values[row.name])]
        for row, text in asked:
            if isinstance(row, Refused):
                raise SettingsError(row.refusal(text))
        given.check_refused(cls)
        settings = cls(**{f.name: given.value(f) for f in dataclasses.fields(cls)})  # type: ignore[arg-type]
        set_up(settings)
        if getattr(settings, "exit_with_parent", None) is None:  # the parent has logged it
            given.log_variables(settings, is_named=program is not None)
            given.log_translated(cls)
        for row, text in asked:
            if isinstance(row, Inert):
                logger.info(row.remark(text))
        run(settings)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = cls.__doc__
    return command


def _parameters(cls: type[Any], positional: Mapping[str, str]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(cls)
    for setting_field in dataclasses.fields(cls):
        name, meta = setting_field.name, setting_field.metadata.get("setting")
        if meta is not None:
            yield option_of(setting_field, hints[name])
        if name in positional:
            yield _argument(setting_field, meta, hints[name], positional[name])


def _argument(setting_field: dataclasses.Field[Any], meta: Meta | None, hint: Any, help: str) -> inspect.Parameter:
    """The positional argument of a field; that of a setting, which has a flag too, can be left out."""
    metavar = setting_field.name.upper().removesuffix("_ID")
    if meta is not None:
        argument = typer.Argument(None, help=help, metavar=metavar, show_default=False, autocompletion=meta.complete)
        name = setting_field.name + POSITIONAL
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=argument, annotation=str | None)
    default = ... if setting_field.default is MISSING else setting_field.default
    argument = typer.Argument(default, help=help, metavar=metavar)
    return inspect.Parameter(setting_field.name, inspect.Parameter.KEYWORD_ONLY, default=argument, annotation=hint)


@dataclass(frozen=True, slots=True)
class _Given:
    """The values of one command line and its environment."""

    context: typer.Context
    values: Mapping[str, Any]

    def value(self, setting_field: dataclasses.Field[Any]) -> Any:
        """A value in the type of the dataclass."""
        value = self.values[setting_field.name]
        meta = setting_field.metadata.get("setting")
        variable = self.variable(setting_field.name)
        keeps = meta is not None and meta.keeps_variable and variable is not None
        if meta is not None and isinstance(value, str) and value in meta.translated:
            return meta.translated[value].value
        if isinstance(value, list):
            return tuple(GivenBy.of(each, variable) if keeps and variable else each for each in value)
        return GivenBy.of(value, variable) if keeps and variable else value

    def variable(self, name: str) -> str | None:
        """The variable of the environment that gave a value; None for one of a flag, a file or a default."""
        source = self.context.get_parameter_source(name)
        if source is None or source.name != "ENVIRONMENT":
            return None
        option = next(option for option in self.context.command.params if option.name == name)
        ignored = disregarded(os.environ)
        found = first_set((each for each in option.envvar or () if each not in ignored), os.environ)
        value = self.values.get(name)
        is_of_file = found is not None and isinstance(value, str) and value != os.environ[found]
        return None if is_of_file else found

    def text(self, name: str, value: Any) -> str:
        """A value as it was given: `--its-name value` or `ITS_NAME=value`."""
        source = self.context.get_parameter_source(name)
        if source is not None and source.name == "ENVIRONMENT":
            shown = str(value).lower() if isinstance(value, bool) else value
            return f"{self.variable(name) or name.upper()}={shown}"
        return flag_of(name) if value is True else f"{flag_of(name)} {value}"

    def log_variables(self, settings: Any, *, is_named: bool) -> None:
        """Log which shared variables count, if `is_named`, and which do not although another version would read them.

        Raises:
            SettingsError: such a variable would keep clients out.
        """
        for name, reason in disregarded(os.environ).items():
            if reason and name in self._variables:
                logger.warning("%s=%s is not used: %s", name, os.environ[name], reason)
        for setting_field in dataclasses.fields(settings):
            self._check_former_name(setting_field, getattr(settings, setting_field.name))
        changed = (each.name for each in dataclasses.fields(settings) if getattr(settings, each.name) != each.default)
        used = filter(None, map(self.variable, changed))
        shared = [name for name in used if not name.startswith(PREFIX)]
        if shared and is_named:
            logger.info("settings from the environment: %s", ", ".join(shared))

    def _check_former_name(self, setting_field: dataclasses.Field[Any], value: Any) -> None:
        """Warn of a variable that lacks the prefix of ours, where nothing else gives the setting."""
        meta, former = setting_field.metadata.get("setting"), setting_field.name.upper()
        if meta is None or meta.env != "" or former in TGI_VARIABLES or value != setting_field.default:
            return
        if os.environ.get(former):
            message = f"{former} is not read: the variable of {flag_of(setting_field.name)} is {PREFIX}{former}"
            require(former not in PROTECTIVE, message)
            logger.warning(message)

    @property
    def _variables(self) -> set[str]:
        return {name for option in self.context.command.params for name in option.envvar or ()}

    def log_translated(self, cls: type[Any]) -> None:
        """Log each value of TGI's that has another name here."""
        for setting_field in dataclasses.fields(cls):
            meta, name = setting_field.metadata.get("setting"), setting_field.name
            value = self.values[name]
            if meta is not None and isinstance(value, str) and value in meta.translated:
                logger.info(meta.translated[value].remark(name, self.text(name, value)))

    def check_refused(self, cls: type[Any]) -> None:
        """Raise SettingsError for a known value that cannot be honoured."""
        for setting_field in dataclasses.fields(cls):
            meta = setting_field.metadata.get("setting")
            value = self.values[setting_field.name]
            if meta is not None and isinstance(value, str) and value in meta.refused:
                row = Refused(name=setting_field.name, why=meta.refused[value])
                raise SettingsError(row.refusal(self.text(row.name, value)))


def to_argv(settings: Any, skip: Iterable[str] = ()) -> list[str]:
    """Render settings as flags for a child process; fields that are None or False are left out."""
    left_out = set(skip)
    argv: list[str] = []
    for setting_field in dataclasses.fields(settings):
        value = getattr(settings, setting_field.name)
        takes_value = setting_field.metadata and setting_field.metadata["setting"].takes_value
        if setting_field.name in left_out or value is None or (value is False and not takes_value):
            continue
        flag = flag_of(setting_field.name)
        if isinstance(value, bool):
            argv += [flag, str(value).lower()] if takes_value else [flag]
        elif type(value) is tuple:  # what is derived from one is one text
            for item in value:
                argv += [flag, str(item)]
        else:
            argv += [flag, str(value)]
    return argv


def project(settings: Any, cls: type[T], **changes: Any) -> T:
    """Build the settings `cls` of a child from the fields it shares with `settings`; `changes` take precedence."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    shared = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name in names}
    return cls(**(shared | changes))


def require(condition: bool, message: str) -> None:
    """Raise SettingsError with `message` unless `condition` holds."""
    if not condition:
        raise SettingsError(message)


def check_bounds(settings: Any) -> None:
    """Raise SettingsError for the first number outside its bounds."""
    for setting_field in dataclasses.fields(settings):
        meta = setting_field.metadata.get("setting")
        value = getattr(settings, setting_field.name)
        if meta is not None and meta.bounds != ANY and value is not None:
            require(value in meta.bounds, f"{flag_of(setting_field.name)} must be {meta.bounds}, given {value}")


def run_app(app: typer.Typer, name: str | None = None) -> NoReturn:
    """Run a typer app; usage errors end it with one line and exit code 2, others with one line and their exit code.

    `name` is that of the program, the script's by default.

    The traceback of an unexpected error is logged at debug level.
    """
    try:
        code = app(standalone_mode=False, prog_name=name)
    except typer.Abort:
        sys.exit(130)
    except typer.TyperException as error:
        print(f"error: {usage_message(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except FunitelError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        logger.debug("unexpected", exc_info=error)
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
