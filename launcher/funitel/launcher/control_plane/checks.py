"""Checks of fields of JSON bodies: each error names the field, the value and what is allowed, in one line."""

import reprlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.proto.settings.suggestions import did_you_mean

MAX_NAME_CHARACTERS = 200
MAX_INTEGER = 2**31 - 1
_RESERVED = {"tgi": "it means the default model", "instances": "it is a path of the API"}


def wrong(field: str, rule: str, given: Any) -> InvalidRequest:
    """The error of a field."""
    return InvalidRequest(f"`{field}` {rule}. Given: {reprlib.repr(given)}", field)


class Fields:
    """The fields of a JSON object, each of which is taken once; `finish` refuses those that were not.

    A field that is null counts as one that is not given.
    """

    def __init__(self, body: Any, path: str = "") -> None:
        """Raise InvalidRequest unless the body is an object; `path` is that of the object, for messages."""
        if not isinstance(body, dict):
            raise InvalidRequest(f"{f'`{path}`' if path else 'the body'} must be a JSON object", path or None)
        self._body: dict[str, Any] = body
        self._path = path
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._body.get(name) is not None

    def path(self, name: str) -> str:
        """The path of a field from the root of the body."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The value of a field, whatever it is; None where it is not given."""
        self._taken.add(name)
        return self._body.get(name)

    def required(self, name: str) -> str:
        """A text that must be given."""
        return self._given(name, self.text(name))

    def _given(self, name: str, value: str | None) -> str:
        if value is None:
            raise InvalidRequest(f"`{self.path(name)}` must be given", self.path(name))
        return value

    def text(self, name: str, choices: Collection[str] = ()) -> str | None:
        """A text that is not empty, of choices if there are some."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong(self.path(name), "must be a string", value)
        if choices and value not in choices:
            raise wrong(self.path(name), f"must be one of {', '.join(choices)}", value)
        if not value.strip() or not value.isprintable():
            raise wrong(self.path(name), "must be a text that is not empty, of characters that print", value)
        return value

    def secret(self, name: str) -> str | None:
        """A text that no error repeats."""
        value = self.raw(name)
        if value is not None and (not isinstance(value, str) or not value.strip() or not value.isprintable()):
            field = self.path(name)
            raise InvalidRequest(f"`{field}` must be a text that is not empty, of characters that print", field)
        return value

    def required_secret(self, name: str) -> str:
        """A text that must be given, and that no error repeats."""
        return self._given(name, self.secret(name))

    def text_of_lines(self, name: str) -> str | None:
        """A text that is not empty, which may have several lines."""
        value = self.raw(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise wrong(self.path(name), "must be a string that is not empty", value)
        return value

    def whole(self, name: str, least: int, most: int = MAX_INTEGER) -> int | None:
        """A whole number within bounds."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise wrong(self.path(name), f"must be a whole number within {least}..{most}", value)
        return value

    def number(self, name: str, *, above: float | None = None, least: float | None = None) -> float | None:
        """A finite number, greater than `above` or not less than `least`."""
        value = self.raw(name)
        return None if value is None else number_of(value, self.path(name), above=above, least=least)

    def boolean(self, name: str) -> bool | None:
        """A boolean."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.path(name), "must be true or false", value)
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """An object."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(self.path(name), "must be an object", value)
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of texts that are not empty."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise wrong(self.path(name), "must be a list of strings that are not empty", value)
        return value

    def rest(self) -> dict[str, Any]:
        """The fields that were not taken, which are taken by that."""
        left = {name: value for name, value in self._body.items() if name not in self._taken}
        self._taken |= set(left)
        return left

    def finish(self) -> None:
        """Raise InvalidRequest for a field that is unknown."""
        for name in self._body:
            if name not in self._taken:
                hint = did_you_mean(name, self._taken) or f". Known: {', '.join(sorted(self._taken))}"
                raise InvalidRequest(f"`{self.path(name)}` is an unknown field{hint}", self.path(name))


def number_of(value: Any, field: str, *, above: float | None = None, least: float | None = None) -> float:
    """A finite number, greater than `above` or not less than `least`; raises InvalidRequest."""
    bound = f" > {above:g}" if above is not None else f" >= {least:g}" if least is not None else ""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not is_number or (above is not None and value <= above) or (least is not None and value < least):
        raise wrong(field, f"must be a number{bound}", value)
    return float(value)


def check_name(name: str, field: str) -> str:
    """Check what clients are to call a model; raises InvalidRequest."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise wrong(field, f"must have at most {MAX_NAME_CHARACTERS} characters, it has {len(name)}", name)
    if not name.strip() or name != name.strip() or not name.isprintable() or "," in name:
        raise wrong(field, "must be a text of characters that print, without a comma or spaces around it", name)
    if name in _RESERVED:
        raise wrong(field, f"must not be {name}: {_RESERVED[name]}", name)
    if name in (".", "..") or any(part in ("", ".", "..") for part in name.split("/")):
        raise wrong(field, "must have no empty part, . or .. between slashes", name)
    return name


def local_place(place: str, field: str) -> str:
    """A model id of a place: a path that must exist, a catalogue name, or a hub repository; raises InvalidRequest."""
    scheme, separator, rest = place.partition("://")
    if separator and scheme != "file":
        raise wrong(field, "must be a path, file://PATH, or a hub repository", place)
    model = rest if separator else place
    if separator and not model.startswith("/"):
        raise wrong(field, "must be file:// and an absolute path", place)
    if model.startswith(("/", ".", "~")):
        path = Path(model).expanduser()
        if not path.is_absolute():
            raise wrong(field, "must be an absolute path: the server has a working folder of its own", place)
        if not path.exists():
            raise wrong(field, "names no folder or file of this machine", place)
        return str(path)
    return model
