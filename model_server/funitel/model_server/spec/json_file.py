"""Read and write model specs as JSON files; an error names the field, its value and its limit.

A file holds the fields of a ModelSpec, those left out having their defaults.
"""

import difflib
import json
import math
import sys
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.rules import check_spec
from funitel.proto.errors import SettingsError, UnsupportedModel

MAX_FILE_BYTES = 1 << 20


def to_json(spec: object, *, is_whole: bool = False) -> str:
    """A spec, a dataclass of dataclasses, as JSON: the fields that differ from their defaults, or all of them."""
    return json.dumps(_plain(spec, is_whole), indent=2)


def _plain(value: Any, is_whole: bool) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        defaults = {each.name: _default(each) for each in fields(value)}
        return {n: _plain(v, is_whole) for n, v in given.items() if is_whole or v != defaults[n]}
    return list(value) if isinstance(value, tuple) else value


def _default(each: Any) -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


def read_spec(path: Path) -> ModelSpec:
    """Read a spec that a user wrote.

    Raises:
        SettingsError: there is no such file, or what it says is wrong; the message names field, value and limit.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path} has {path.stat().st_size} bytes, a spec has at most {MAX_FILE_BYTES}")
        return from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the spec {path}: {error}") from error


def from_json(text: str, source: str) -> ModelSpec:
    """Read a spec. `source` is what messages call it. Raises: `SettingsError`."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{source} is not JSON: {error}") from error
    try:
        spec: ModelSpec = _object(given, ModelSpec, "")
        check_spec(spec)
    except UnsupportedModel as error:
        raise SettingsError(f"{source}: {error.message}") from error
    return spec


def check_types(spec: ModelSpec) -> None:
    """Refuse fields of the wrong type or without bounds, wherever the spec came from. Raises: `UnsupportedModel`."""
    _object(_plain(spec, is_whole=True), ModelSpec, "")
    check_spec(spec)


def _object(given: Any, cls: type[Any], path: str) -> Any:
    if not isinstance(given, dict):
        raise UnsupportedModel(f"{path or 'the spec'} must be an object, given {_shown(given)}")
    known = {each.name: each for each in fields(cls)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UnsupportedModel(f"unknown field {_joined(path, name)}: {hint}")
    for name, each in known.items():
        if name not in given and _default(each) is MISSING:
            raise UnsupportedModel(f"the field {_joined(path, name)} is missing")
    hints = get_type_hints(cls)
    return cls(**{name: _value(value, hints[name], _joined(path, name)) for name, value in given.items()})


def _value(given: Any, hint: Any, path: str) -> Any:
    """A JSON value as what the field's annotation says."""
    if get_origin(hint) in (types.UnionType, Union):
        if given is None:
            return None
        return _value(given, next(each for each in get_args(hint) if each is not type(None)), path)
    if get_origin(hint) is tuple:
        if not isinstance(given, list):
            raise UnsupportedModel(f"{path} must be a list, given {_shown(given)}")
        return tuple(_value(item, get_args(hint)[0], f"{path}[{i}]") for i, item in enumerate(given))
    if isinstance(hint, type) and is_dataclass(hint):
        return _object(given, hint, path)
    if issubclass(hint, StrEnum):
        choices = [str(choice) for choice in hint]
        if given not in choices:
            raise UnsupportedModel(f"{path} must be one of {', '.join(choices)}, given {_shown(given)}")
        return hint(given)
    if hint is float and type(given) is int and abs(given) <= sys.float_info.max:
        given = float(given)
    if type(given) is not hint or (hint is float and not math.isfinite(given)):
        kind = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}[hint]
        raise UnsupportedModel(f"{path} must be {kind}, given {_shown(given)}")
    return given


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
