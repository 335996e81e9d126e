"""The file of `--config`: settings by the names of their variables, one a line.

Knows which names there are and nothing of what their values mean: a command line reads those, and asks here which line
an error is about.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType

from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import SettingsError
from funitel.proto.settings.fields import require
from funitel.proto.settings.options import flag_of, variable_of
from funitel.proto.settings.tgi_flags import rows_of

MOST_BYTES = 1 << 20
QUOTES = ("'", '"')

_SETTINGS = [setting for setting in fields(LauncherSettings) if setting.name != "config"]  # a file names no other
# What the file may set, and the flag that says the same.
FLAGS: Mapping[str, str] = {
    variable: flag_of(name)
    for name, variable in (
        *((setting.name, variable_of(setting)) for setting in _SETTINGS),
        *((row.name, row.env) for row in rows_of("launcher")),
    )
    if variable is not None
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What a file sets; without a path, the file that nobody gave.

    Attributes:
        values: by variable; an empty one is as good as none, and hides that of the environment.
        lines: where each of them stands, counted from 1.
    """

    path: str = ""
    values: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    lines: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def hide_from(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment without what the file says instead: children are told of it by flags."""
        return {name: value for name, value in environ.items() if name not in self.values}

    def place(self, variable: str) -> str:
        """Where a variable is set, for people."""
        return f"{self.path}, line {self.lines[variable]}: {variable}"

    def blame(self, message: str, beaten: Collection[str] = ()) -> str:
        """Put before a message which line it is about: the first setting it names that the file has set.

        Args:
            message: names settings by flag or variable.
            beaten: variables of the file that a flag has the better of.
        """
        for word in re.findall(r"--[a-z][a-z0-9-]*|[A-Z][A-Z0-9_]*", message):
            for variable in self.values:
                if word in (variable, FLAGS[variable]) and variable not in beaten:
                    return f"{self.place(variable)}: {message}"
        return message


def read_config(path: str) -> ConfigFile:
    """Read a file; the last line of a variable counts.

    Raises:
        SettingsError: it cannot be read, or a line is not `VARIABLE=value` of a setting; values are not shown.
    """
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        variable, is_set, value = (part.strip() for part in line.partition("="))
        where = f"{path}, line {number}"
        require(bool(is_set), f"{where}: not of the form VARIABLE=value")
        require(variable.isprintable() and variable in FLAGS, f"{where}: {variable!r} is not the variable of a setting")
        values[variable], lines[variable] = _plain(value, f"{where}: {variable}"), number
    return ConfigFile(path, values, lines)


def _text(path: str) -> str:
    file = Path(path)
    try:
        require(file.is_file() or not file.exists(), f"--config {path} is not a regular file")  # a pipe is read once
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        require(len(content) <= MOST_BYTES, f"--config {path} has more than {MOST_BYTES} bytes")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"--config {path} cannot be read: {reason}") from error


def _plain(value: str, what: str) -> str:
    """A value without its quotes, between which nothing is escaped."""
    require(value.isprintable(), f"{what} has a character that cannot be printed")
    if not value.startswith(QUOTES):
        return value
    quote, inner, end = value[0], value[1:-1], value[1:][-1:]
    require(
        end == quote and quote not in inner, f"{what} begins with {quote} and has no other one than that at its end"
    )
    return inner
