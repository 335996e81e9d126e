"""Settings as frozen dataclasses, rendered as typer commands.

A field made with `setting(default, help)` becomes the flag `--its-name`, the variable `ITS_NAME` and a line
of `--help`; each default exists once. Flag beats variable beats default. The environment is read by typer, at
the rim, and nowhere else. `to_argv` turns settings back into flags for a child process.
"""

import dataclasses
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from funitel.proto.errors import FunitelError, SettingsError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Meta:
    help: str
    short: str | None
    choices: tuple[str, ...]
    env: str | None
    aliases: tuple[str, ...]


def setting(
    default: Any,
    help: str,
    *,
    short: str | None = None,
    choices: Iterable[str] = (),
    env: str | None = "",
    aliases: Iterable[str] = (),
) -> Any:
    """Declare one field of a settings dataclass.

    Args:
        default: value when neither flag nor variable is given; None means "decided at start".
        help: one line for `--help` and the settings page; names the unit.
        short: one-letter flag, such as "-p".
        choices: the only values allowed.
        env: name of the variable; "" derives it from the field, None means there is none.
        aliases: further long flags.
    """
    meta = _Meta(help, short, tuple(choices), env, tuple(aliases))
    return dataclasses.field(default=default, metadata={"setting": meta})


def flag_of(name: str) -> str:
    """`max_batch_size` -> `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def variable_of(field: "Field[Any]") -> str | None:
    """Name of the environment variable of a field, or None."""
    env: str | None = field.metadata["setting"].env
    return field.name.upper() if env == "" else env


def _plain(annotation: Any) -> tuple[Any, bool]:
    """Split an annotation into (type, is a repeatable tuple): `int | None` -> int, `tuple[str, ...]` -> str."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], True
    return annotation, False


def _option(field: "Field[Any]", annotation: Any) -> inspect.Parameter:
    meta: _Meta = field.metadata["setting"]
    plain, repeatable = _plain(annotation)
    if meta.choices:
        plain = Literal[meta.choices]
    names = [flag_of(field.name), *meta.aliases] + ([meta.short] if meta.short else [])
    default: Any = field.default
    default = list(default) if repeatable else default
    option = typer.Option(
        default,
        *names,
        envvar=variable_of(field),
        help=meta.help,
        show_default=field.default is not None,
    )
    kind: Any = list[plain] if repeatable else plain | None if field.default is None else plain  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def as_command(cls: type[T], run: Callable[[T], None], arguments: dict[str, str] | None = None) -> Callable[..., None]:
    """Make a typer command function that builds `cls` from flags and variables and hands it to `run`.

    `arguments` names the fields that are positional, with their help.
    """
    positional = arguments or {}
    hints = get_type_hints(cls)
    parameters = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in positional:
            argument = typer.Argument(... if field.default is MISSING else field.default, help=positional[field.name])
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=argument, annotation=hints[field.name]
                )
            )
        else:
            parameters.append(_option(field, hints[field.name]))

    def command(**values: Any) -> None:
        run(cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = cls.__doc__
    return command


def to_argv(settings: Any, skip: Iterable[str] = ()) -> list[str]:
    """Render settings as flags for a child process; fields that are None or False are left out."""
    left_out = set(skip)
    argv: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in left_out or value is None or value is False:
            continue
        flag = flag_of(field.name)
        if value is True:
            argv.append(flag)
        elif isinstance(value, tuple):
            for item in value:
                argv += [flag, str(item)]
        else:
            argv += [flag, str(value)]
    return argv


def project(settings: Any, cls: type[T], **changes: Any) -> T:
    """Build the settings `cls` of a child from the fields it shares with `settings`; `changes` win."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    shared = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.name in names}
    return cls(**(shared | changes))


def require(condition: bool, message: str) -> None:
    """Raise SettingsError with `message` unless `condition` holds."""
    if not condition:
        raise SettingsError(message)


def run_app(app: typer.Typer) -> NoReturn:
    """Run a typer app; usage errors are one line and exit code 2, all others one line and exit code 1.

    The traceback of an unexpected error is logged at debug level.
    """
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except typer.TyperException as error:
        print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except FunitelError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        logger.debug("unexpected", exc_info=error)
        print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
