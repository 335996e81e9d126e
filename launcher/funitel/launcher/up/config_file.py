"""Read the TOML file of `funitel up --config`: flags of the server, and `[[models]]`, each the body of a launch."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from funitel.launcher.control_plane.api.launch_body import launch_of
from funitel.launcher.control_plane.records import LaunchRequest
from funitel.launcher.up.settings import CONFIG, UpSettings
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.settings.fields import require
from funitel.proto.settings.options import variable_of
from funitel.proto.settings.suggestions import did_you_mean
from funitel.proto.settings.variables import names_of

MODELS = "models"
MAX_BYTES = 1 << 20
_FIELDS = {each.name: each for each in fields(UpSettings) if each.name != CONFIG}


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What a file says: flags as texts of a command line, and models.

    Attributes:
        path: of the file; "" for none.
        flags: by the name of the setting.
        models: in the order of the file.
    """

    path: str = ""
    flags: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    models: tuple[LaunchRequest, ...] = ()

    def additions(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Variables for the flags that the environment does not set."""
        added = {}
        for name, value in self.flags.items():
            variable = variable_of(_FIELDS[name])
            assert variable is not None, "a flag of the file has a variable"
            names = names_of(variable)
            if not any(environ.get(each) for each in names):
                added[names[0]] = value
        return added


def read_config(path: str) -> UpConfig:
    """Read a file.

    Raises:
        SettingsError: it cannot be read, is no TOML, or has an unknown or wrong field; the message names the field.
    """
    content = _parsed(path)
    models = content.pop(MODELS, [])
    flags = {}
    for name, value in content.items():
        known = name.replace("-", "_")
        if known not in _FIELDS or variable_of(_FIELDS[known]) is None:
            hint = (
                did_you_mean(name, [*_FIELDS, MODELS])
                or f"; funitel up --help=all lists the flags, [[{MODELS}]] a model"
            )
            raise SettingsError(f"--config {path}: {name!r} is no flag of funitel up{hint}")
        flags[known] = _text(path, name, value)
    require(isinstance(models, list), f"--config {path}: {MODELS} must be tables, each begun by [[{MODELS}]]")
    requests = tuple(_model(path, number, body) for number, body in enumerate(models, 1))
    names = [request.served_name for request in requests]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"--config {path}: two models are called {twice!r}: give one another name")
    return UpConfig(path, flags, requests)


def _parsed(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        require(len(content) <= MAX_BYTES, f"--config {path} has more than {MAX_BYTES} bytes")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise SettingsError(f"--config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--config {path} cannot be read: it is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config {path} is no TOML: {error}") from error


def _text(path: str, name: str, value: Any) -> str:
    """A value as a text of a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return " ".join(value)
    if isinstance(value, str | int | float):
        return str(value)
    raise SettingsError(f"--config {path}: {name} must be a text, a number, a boolean or a list of texts")


def _model(path: str, number: int, body: Any) -> LaunchRequest:
    try:
        return launch_of(body)
    except InvalidRequest as error:
        raise SettingsError(f"--config {path}: model {number}: {error.message}") from error
