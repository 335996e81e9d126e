"""The pages of `--help`: a short one, all flags, the flags of a group, the flags that contain a word."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from funitel.proto.settings.groups import COMMON, GROUPS
from funitel.proto.settings.suggestions import nearest

MAX_WIDTH, MIN_WIDTH = 100, 30
NAME_COLUMNS = 28  # of a flag with its value; a longer one has a line of its own
SHORT_PROGRAM = 16  # flags of a program that has no need of a short page
ALL = "all"
CHOICES = "One of "  # the first words of a sentence that lists what is allowed
_ORDER = {group.title: index for index, group in enumerate(GROUPS)}
_TITLES = {group.name: group.title for group in GROUPS}
_NAMES = {group.title: group.name for group in GROUPS}


@dataclass(frozen=True)
class Flag:
    """One flag as it is shown; `group` is the title of its group."""

    name: str
    spelling: str
    help: str
    default: str
    variable: str | None
    group: str
    is_switch: bool

    @classmethod
    def of(cls, option: Any) -> "Flag":
        """Of a typer option."""
        names = sorted(option.opts, key=lambda name: (name.startswith("--"), option.opts.index(name)))
        if option.is_flag and option.default is True:
            names += option.secondary_opts
        value = "" if option.is_flag else f" {option.metavar or 'TEXT'}"
        title = option.rich_help_panel or _TITLES["program"]
        return cls(
            option.name,
            ", ".join(names) + value,
            option.help or "",
            _default(option),
            option.envvar[-1] if option.envvar else None,
            title,
            bool(option.secondary_opts),
        )

    def contains(self, word: str) -> bool:
        """Whether a word, in lower case, is in its names or its description."""
        return any(word in text.lower() for text in (self.spelling, self.help, self.variable or ""))

    def text(self) -> str:
        """The description with the default and the variable."""
        return self._noted(self.help, {"default": self.default, "variable": self.variable})

    def brief(self) -> str:
        """The first sentence, the choices and the default."""
        sentences = self.help.removesuffix(".").split(". ")
        kept = [sentences[0].split(";")[0], *(each for each in sentences[1:] if each.startswith(CHOICES))]
        return self._noted(f"{'. '.join(kept)}.", {"default": self.default})

    @staticmethod
    def _noted(text: str, notes: Mapping[str, str | None]) -> str:
        shown = "; ".join(f"{name}: {value}" for name, value in notes.items() if value)
        return f"{text} [{shown}]" if shown else text


def _default(option: Any) -> str:
    value = option.default
    if isinstance(value, (list, tuple)) and not isinstance(value, str):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "" if option.is_flag and not value else str(value).lower()
    return "" if value is None else str(value)


@dataclass(frozen=True)
class HelpPage:
    """What the pages of one program are made of.

    Attributes:
        usage: the command line, such as `funitel serve [FLAGS] [MODEL]`.
        about: one or more paragraphs.
        flags: the visible ones.
        arguments: (name, description) of positional arguments.
        commands: (name, description) of subcommands.
        further: (title, names) of subcommands that the page names without a description.
    """

    program: str
    usage: str
    about: str
    flags: Sequence[Flag]
    arguments: Sequence[tuple[str, str]] = ()
    commands: Sequence[tuple[str, str]] = ()
    further: Sequence[tuple[str, Sequence[str]]] = ()
    width: int = field(default_factory=lambda: min(max(shutil.get_terminal_size().columns, MIN_WIDTH), MAX_WIDTH))

    def short(self) -> str:
        """The default page."""
        is_whole = len(self.flags) <= SHORT_PROGRAM
        if is_whole:
            return "\n".join([*self._head(), *self._grouped(self.flags)])
        common = sorted((flag for flag in self.flags if flag.name in COMMON), key=lambda flag: _ORDER[flag.group])
        table = self._table([(flag.spelling, flag.brief()) for flag in common])
        return "\n".join([*self._head(), "", "Common flags:", *table, *self._more()])

    def all(self) -> str:
        """Every flag."""
        return "\n".join([*self._head(), *self._grouped(self.flags), *self._notes()])

    def about_topic(self, topic: str) -> str | None:
        """The flags of a group, or those that contain a word; None where there are none."""
        word = topic.strip().lower()
        found = [flag for flag in self.flags if _NAMES[flag.group] == word]
        found = found or [flag for flag in self.flags if word and flag.contains(word)]
        return "\n".join([*self._grouped(found), *self._notes()]).lstrip("\n") if found else None

    def no_topic(self, topic: str) -> str:
        """What to say where nothing is about a topic."""
        words = {part for flag in self.flags for part in (flag.name, *flag.name.split("_"))}
        close = nearest(topic.lower().removeprefix("--").replace("-", "_"), {*words, *self.groups})
        hint = f": did you mean {' or '.join(each.replace('_', '-') for each in close)}?" if close else ";"
        return f"--help={topic}: no group and no flag contains it{hint} groups: {', '.join(self.groups)}"

    @property
    def groups(self) -> list[str]:
        """Names of the groups that have flags."""
        present = {flag.group for flag in self.flags}
        return [name for name, title in _TITLES.items() if title in present]

    def _head(self) -> Iterator[str]:
        yield from self._wrapped(f"Usage: {self.usage}", "", "  ")
        for paragraph in self.about.split("\n\n"):
            yield ""
            yield from self._wrapped(" ".join(paragraph.split()), "", "")
        if self.commands:
            yield from ("", "Commands:")
            yield from self._table(self.commands, max(len(name) for name, _ in self.commands) + 4)
        for title, names in self.further:
            yield from ("", f"{title}:", *self._wrapped(", ".join(names), "  ", "  "))
        if self.arguments:
            yield from ("", "Arguments:")
            yield from self._table(self.arguments)

    def _grouped(self, flags: Iterable[Flag]) -> Iterator[str]:
        for title, members in groupby(sorted(flags, key=lambda flag: _ORDER[flag.group]), lambda flag: flag.group):
            yield ""
            yield from self._wrapped(f"{title} ({_NAMES[title]}):", "", "")
            yield from self._table([(flag.spelling, flag.text()) for flag in members])

    def _more(self) -> Iterator[str]:
        yield ""
        names = ", ".join(self.groups)
        yield from self._wrapped(f"{self.program} --help=all shows all {len(self.flags)} flags.", "", "")
        yield from self._wrapped(f"{self.program} --help=GROUP shows those of a group: {names}.", "", "  ")
        yield from self._wrapped(f"{self.program} --help=WORD shows those that contain a word.", "", "")

    def _notes(self) -> Iterator[str]:
        if not any(flag.is_switch for flag in self.flags):
            return
        yield ""
        yield from self._wrapped("--no- before the name of a switch turns it off.", "", "")

    def _table(self, rows: Iterable[tuple[str, str]], narrow: int = 8) -> Iterator[str]:
        """Names and descriptions; `narrow` columns are for the names where the page is not wide."""
        columns = NAME_COLUMNS if self.width >= 70 else min(narrow, self.width // 2)
        for name, text in rows:
            lines = self._wrapped(text, " " * columns, " " * columns)
            if len(name) + 4 > columns or not lines:
                yield from self._wrapped(name, "  ", "      ")
                yield from lines
            else:
                yield f"  {name}".ljust(columns) + lines[0].strip()
                yield from lines[1:]

    def _wrapped(self, text: str, first: str, rest: str) -> list[str]:
        return textwrap.wrap(text, self.width - 1, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
