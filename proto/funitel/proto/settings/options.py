"""Make typer options from settings fields and from rows of TGI's flags, and parse their text."""

import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass
from functools import partial
from typing import Any, TypeVar, Union, get_args, get_origin

import typer

from funitel.proto.settings.bounds import Bounds
from funitel.proto.settings.groups import COMPATIBILITY, GROUP_OF, GROUPS
from funitel.proto.settings.help_page import CHOICES
from funitel.proto.settings.suggestions import did_you_mean
from funitel.proto.settings.tgi_flags import Inert, Program, TgiFlag, Translated
from funitel.proto.settings.variables import DEFAULT_PREFIX, PREFIX, TGI_VARIABLES, first_set, names_of

T = TypeVar("T")


class Counts(tuple[int, ...]):
    """Whole numbers in one flag: `1,4,16`."""

    def __new__(cls, text: str) -> "Counts":
        """Raise ValueError with the reason for any other text."""
        return super().__new__(cls, _numbers(text, int, "whole numbers such as 1,4,16"))

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Rates(tuple[float, ...]):
    """Numbers in one flag: `0.5,2`."""

    def __new__(cls, text: str) -> "Rates":
        """Raise ValueError with the reason for any other text."""
        return super().__new__(cls, _numbers(text, float, "numbers such as 0.5,2"))

    def __str__(self) -> str:
        return ",".join(map(str, self))


def _numbers(text: str, kind: Callable[[str], T], what: str) -> list[T]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"is not a list of {what}") from None


# Words for booleans, in any case; also for the variable of a switch.
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
_NOT_BOOLEAN = f"is not one of {', '.join((*TRUE_WORDS, *FALSE_WORDS))}"


@dataclass(frozen=True, slots=True)
class Meta:
    """The arguments of `fields.setting` for a field."""

    help: str
    short: str | None
    choices: tuple[str, ...]
    env: str | None
    aliases: tuple[str, ...]
    takes_value: bool
    refused: Mapping[str, str]
    translated: Mapping[str, Translated]
    bounds: Bounds
    keeps_variable: bool
    complete: Callable[[str], Iterable[str]] | None = None
    unlisted: tuple[str, ...] = ()

    @property
    def parser(self) -> "OneOf | None":
        """The parser of a setting with choices."""
        return OneOf((*self.choices,), (*self.unlisted, *self.refused, *self.translated)) if self.choices else None


@dataclass(frozen=True, slots=True)
class OneOf:
    """The parser of one of several words; known ones, such as those that are refused, are offered nowhere."""

    offered: tuple[str, ...]
    known: tuple[str, ...] = ()

    def __call__(self, text: str) -> str:
        """Raise ValueError, with what is allowed, for any other text."""
        if text not in (*self.offered, *self.known):
            raise ValueError(f"is not one of {', '.join(self.offered)}{did_you_mean(text, self.offered)}")
        return text

    def complete(self, incomplete: str) -> list[str]:
        """The words that begin with `incomplete`."""
        return [word for word in self.offered if word.startswith(incomplete)]


def flag_of(name: str) -> str:
    """`max_batch_size` -> `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def variable_of(field: "Field[Any]") -> str | None:
    """The environment variable under which a field is described, TGI's where TGI has it; None if it has none."""
    env: str | None = field.metadata["setting"].env
    if env != "":
        return env
    name = field.name.upper()
    return name if name in TGI_VARIABLES else PREFIX + name


def _names_of(variable: str | None) -> list[str] | None:
    return None if variable is None else list(names_of(variable))


def _plain(annotation: Any) -> tuple[Any, bool]:
    """Split an annotation into (type, is a repeatable tuple): `int | None` -> int, `tuple[str, ...]` -> str."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], True
    return annotation, False


def option_of(field: "Field[Any]", annotation: Any) -> inspect.Parameter:
    """Make the option of a field that `fields.setting` declared."""
    meta: Meta = field.metadata["setting"]
    plain, repeatable = _plain(annotation)
    is_switch = plain is bool and not meta.takes_value
    names = [_switch(field.name) if is_switch else flag_of(field.name), *meta.aliases]
    default: Any = field.default
    option = _make_option(
        list(default) if repeatable else None if default is MISSING else default,
        [*names, *([meta.short] if meta.short else [])],
        meta.parser or plain,
        is_switch=is_switch,
        env=_names_of(variable_of(field)),
        help=meta.help,
        complete=meta.complete,
        rich_help_panel=GROUP_OF[field.name].title if field.name in GROUP_OF else None,
    )
    kind: Any = bool if is_switch else str if plain is bool else plain
    return _parameter(field.name, option, list[kind] if repeatable else kind)


def tgi_option(row: TgiFlag, program: Program) -> inspect.Parameter:
    """Make the option of a row of `tgi_flags`; hidden where the program has only the variable."""
    is_switch = row.kind is bool
    option = _make_option(
        None,
        [_switch(row.name) if is_switch else flag_of(row.name)],
        OneOf(row.choices) if row.choices else row.kind,
        is_switch=is_switch,
        env=_names_of(row.env),
        help=f"Accepted without effect: {row.why}." if isinstance(row, Inert) else f"Refused: {row.why}.",
        hidden=program not in row.flag,
        rich_help_panel=next(group.title for group in GROUPS if group.name == COMPATIBILITY),
    )
    return _parameter(row.name, option, bool if is_switch else str)


def _switch(name: str) -> str:
    """`json_output` -> `--json-output/--no-json-output`, as typer writes a switch."""
    return f"{flag_of(name)}/--no-{name.replace('_', '-')}"


def _make_option(
    default: Any,
    names: list[str],
    kind: Callable[[str], Any],
    *,
    is_switch: bool,
    env: list[str] | None,
    help: str,
    complete: Callable[[str], Iterable[str]] | None = None,
    **more: Any,
) -> Any:
    parser = None if is_switch or kind is str else partial(_parse, parse_bool if kind is bool else kind)
    metavar = None if is_switch else _METAVARS.get(kind) or _words_of(kind)
    if metavar == _CHOICE and isinstance(kind, OneOf):
        help = f"{help} {CHOICES}{', '.join(kind.offered)}."
    words = OneOf(("true", "false")) if kind is bool else kind
    return typer.Option(
        default,
        *names,
        envvar=env,
        parser=parser,
        metavar=metavar,
        help=help,
        autocompletion=complete or (None if is_switch or not isinstance(words, OneOf) else words.complete),
        show_default=default is not None,
        **more,
    )


_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: "true|false"}
_CHOICE = "CHOICE"
MAX_METAVAR = 18  # characters; longer lists of choices are in the description


def _words_of(kind: Any) -> str:
    """`auto|cpu|cuda`, or one word for what has many choices or a type of its own."""
    words = "|".join(kind.offered) if isinstance(kind, OneOf) else ""
    return words if 0 < len(words) <= MAX_METAVAR else _CHOICE if words else getattr(kind, "METAVAR", "LIST")


def _parameter(name: str, option: Any, kind: Any) -> inspect.Parameter:
    annotation = kind | None if option.default is None else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _parse(kind: Callable[[str], Any], value: Any) -> Any:
    """Parse the text of a flag or variable; typer also passes defaults, which are values already."""
    if not isinstance(value, str):
        return value
    try:
        return kind(value.strip())
    except ValueError as error:
        name = _KINDS.get(kind)
        raise typer.BadParameter(f"{value!r} {f'is not a valid {name}' if name else error}") from error


_KINDS: dict[Callable[[str], Any], str] = {int: "integer", float: "number"}


def parse_bool(text: str) -> bool:
    """Parse a boolean; ValueError lists the allowed words."""
    word = text.lower()
    if word not in (*TRUE_WORDS, *FALSE_WORDS):
        raise ValueError(_NOT_BOOLEAN)
    return word in TRUE_WORDS


_UNKNOWN_FLAG = re.compile(r"No such option: (\S+)")


def _given_by(names: list[str]) -> str:
    """The variable of a setting that has a value."""
    default = DEFAULT_PREFIX + names[-1].removeprefix(PREFIX)
    return first_set((*names, default), os.environ) or names[-1]


def usage_message(error: typer.TyperException) -> str:
    """Describe a usage error in one line, with the variable at fault; typer leaves out the value of a switch's."""
    option, context = getattr(error, "param", None), getattr(error, "ctx", None)
    message = " ".join(error.format_message().split())
    if isinstance(error, typer.BadParameter) and getattr(option, "is_flag", False) and option and error.ctx:
        value = option.value_from_envvar(error.ctx)
        message = f"Invalid value for {option.get_error_hint()}: {value!r} {_NOT_BOOLEAN}"
    unknown = _UNKNOWN_FLAG.match(message)
    if unknown and context is not None:
        for each in context.command.params:
            if each.param_type_name == "argument" and flag_of(each.name) == unknown[1]:
                return f"{unknown[0]}: give {each.metavar} without a flag"
        flags = [name for each in context.command.get_params(context) if not each.hidden for name in _spellings(each)]
        hint = did_you_mean(unknown[1], flags) or f"; {context.command_path.strip()} --help=all lists all"
        return f"{unknown[0]}{hint}"
    names = getattr(option, "envvar", None)
    if isinstance(names, list):  # typer writes all of them
        message = message.replace(f"'{names}'", f"'{_given_by(names)}'")
    return message


def _spellings(option: Any) -> list[str]:
    return [name for name in (*option.opts, *option.secondary_opts) if name.startswith("--")]
