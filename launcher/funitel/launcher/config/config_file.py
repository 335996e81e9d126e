"""Read the configuration file of `--config`: one `VARIABLE=value` a line.

This module knows the names of the settings, not their meaning. The command line parses the values, and asks here for
the line that an error is about.
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
from funitel.proto.settings.variables import PREFIX

MAX_BYTES = 1 << 20
QUOTES = ("'", '"')

_SETTINGS = [setting for setting in fields(LauncherSettings) if setting.name != "config"]  # a file names no file
# Variables that the file may set, and the flag of each.
FLAGS: Mapping[str, str] = {
    variable: flag_of(name)
    for name, variable in (
        *((setting.name, variable_of(setting)) for setting in _SETTINGS),
        *((row.name, row.env) for row in rows_of("launcher")),
    )
    if variable is not None
}
# What a file may write for each: the prefix is optional, since nothing else writes there.
_SPELLINGS: Mapping[str, str] = {
    prefix + variable.removeprefix(PREFIX): variable for variable in FLAGS for prefix in ("", PREFIX)
}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The settings of a file; without a path, no file was given.

    Attributes:
        values: by variable, as in `FLAGS`; an empty value counts as unset.
        lines: line number of each variable, counted from 1, and its name there.
    """

    path: str = ""
    values: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    lines: Mapping[str, tuple[int, str]] = field(default_factory=lambda: MappingProxyType({}))

    def position(self, variable: str) -> str:
        """File, line and name of a variable, for messages."""
        number, name = self.lines[variable]
        return f"{self.path}, line {number}: {name}"

    def locate(self, message: str, overridden: Collection[str] = ()) -> str:
        """Prefix a message with the line of the first setting it names that the file has set.

        Args:
            message: names settings by flag or variable.
            overridden: variables of the file that a flag or the environment overrides.
        """
        for word in re.findall(r"--[a-z][a-z0-9-]*|[A-Z][A-Z0-9_]*", message):
            for variable in self.values:
                is_named = FLAGS[variable] == word or _SPELLINGS.get(word) == variable
                if is_named and variable not in overridden:
                    return f"{self.position(variable)}: {message}"
        return message


def read_config(path: str) -> ConfigFile:
    """Read a file; if a variable occurs twice, its last line counts.

    Raises:
        SettingsError: it cannot be read, or a line is not `VARIABLE=value` of a setting; values are not shown.
    """
    values: dict[str, str] = {}
    lines: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, is_set, value = (part.strip() for part in line.partition("="))
        where = f"{path}, line {number}"
        require(bool(is_set), f"{where}: not of the form VARIABLE=value")
        require(name.isprintable() and name in _SPELLINGS, f"{where}: {name!r} is not the variable of a setting")
        variable = _SPELLINGS[name]
        values[variable], lines[variable] = _plain(value, f"{where}: {name}"), (number, name)
    return ConfigFile(path, values, lines)


def _text(path: str) -> str:
    file = Path(path)
    try:
        require(file.is_file() or not file.exists(), f"--config {path} is not a regular file")  # a pipe is read once
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        require(len(content) <= MAX_BYTES, f"--config {path} has more than {MAX_BYTES} bytes")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"--config {path} cannot be read: {reason}") from error


def _plain(value: str, what: str) -> str:
    """A value without its quotes; there are no escapes within quotes."""
    require(value.isprintable(), f"{what} has a character that cannot be printed")
    if not value.startswith(QUOTES):
        return value
    quote, inner, end = value[0], value[1:-1], value[1:][-1:]
    require(
        end == quote and quote not in inner, f"{what} begins with {quote}, so its only other {quote} must be at its end"
    )
    return inner
