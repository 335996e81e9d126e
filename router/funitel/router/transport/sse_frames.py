"""Frames of Server-Sent Events, and templates for those that a stream has for every token."""

import secrets
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

# Marks a value to fill in, in the record of a template; random, so that no client can send it.
HOLE: Any = f"hole-{secrets.token_hex(16)}"

Event = BaseModel | bytes  # a record, or its frame

MAX_KEPT_CHARACTERS = 32
_kept_texts = lru_cache(maxsize=1 << 13)(to_json)  # most tokens of a text are of a few thousand


def text_json(text: str) -> bytes:
    """Render a text as JSON; short ones are looked up."""
    return _kept_texts(text) if len(text) <= MAX_KEPT_CHARACTERS else to_json(text)


def frame(event: BaseModel) -> bytes:
    """Make the frame of one event."""
    return _frame(event.model_dump_json())


def named_frame(event: BaseModel) -> bytes:
    """Make the frame of one event, named by its field `type`."""
    return _name(event) + frame(event)


def _frame(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


def _name(event: BaseModel) -> bytes:
    name: str = event.__dict__["type"]
    return b"event: " + name.encode() + b"\n"


class Template:
    """Frames of records that differ in a few values only: the common part is rendered once.

    Values are filled in where the record holds HOLE; they must be valid for their fields, floats finite.
    """

    def __init__(self, record: BaseModel, *, is_named: bool = False) -> None:
        """Render a record with holes; `is_named` for what `named_frame` frames."""
        rendered = _frame(record.model_dump_json(warnings=False))
        if is_named:
            rendered = _name(record) + rendered
        self._num_holes = rendered.count(to_json(HOLE))
        self._before, _, self._after = rendered.partition(to_json(HOLE))
        self._format = rendered.replace(b"%", b"%%").replace(to_json(HOLE), b"%b")

    def fill(self, *values: Any) -> bytes:
        """Make a frame with these values in its holes, in their order."""
        return self._format % tuple(map(to_json, values))

    def insert(self, *rendered: bytes) -> bytes:
        """Make a frame with values that are JSON already."""
        return self._format % rendered

    def fill_all(self, text: str) -> bytes:
        """Make a frame with the same text in every hole."""
        rendered = text_json(text)
        if self._num_holes == 1:  # a third faster
            return self._before + rendered + self._after
        return self._format % ((rendered,) * self._num_holes)

    def fill_before(self, value: Any, last: BaseModel) -> bytes:
        """Make a frame with a record in its last hole and the same value in every other."""
        return self._format % ((to_json(value),) * (self._num_holes - 1) + (last.model_dump_json().encode(),))
