"""Decide on the fields of a body that its record does not have: ignore, refuse, or ignore with a warning."""

import logging
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

logger = logging.getLogger(__name__)

FIELD_ERROR = "field_error"  # the type of an error about one field of the record at hand; `name` in its context

MAX_WARNED_FIELDS = 100  # names in one process; clients can invent names, and must fill neither the log nor memory
_warned: set[str] = set()


NOTHING: tuple[Any, ...] = (False, "", [], {})  # values that ask for nothing, of most fields


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field that is refused, for the reason `why`, unless its value is in `neutral`."""

    why: str
    neutral: tuple[Any, ...] = NOTHING

    def is_neutral(self, value: Any) -> bool:
        """Whether the value asks for nothing."""
        return any(value == none and isinstance(value, bool) == isinstance(none, bool) for none in self.neutral)


@dataclass(slots=True)
class FieldPolicy:
    """What becomes of the unknown fields of one body.

    Attributes:
        is_strict: whether the first one is an error.
        unknown: those found, shortened, with the name of their record; at most `MAX_WARNED_FIELDS`.
    """

    is_strict: bool = False
    unknown: dict[str, str] = field(default_factory=dict)

    def note(self, record: str, content: Mapping[str, Any], known: Collection[str]) -> None:
        """Look for fields of `content` that are not `known`.

        Raises:
            PydanticCustomError: there is one, and the policy is strict.
        """
        if not self.is_strict and len(self.unknown) >= MAX_WARNED_FIELDS:
            return
        for name in content:
            if name in known:
                continue
            if self.is_strict:
                raise PydanticCustomError(FIELD_ERROR, "unknown field", {"name": name, "code": "unknown_parameter"})
            self.unknown[reprlib.repr(name)] = record
            if len(self.unknown) >= MAX_WARNED_FIELDS:
                return

    def warn(self, route: str) -> None:
        """Log each unknown field, unless its name was logged before; after `MAX_WARNED_FIELDS` names, no more."""
        for name, record in self.unknown.items():
            if name in _warned or len(_warned) >= MAX_WARNED_FIELDS:
                continue
            _warned.add(name)
            logger.warning("%s: ignoring unknown field %s of %s", route, name, record)
            if len(_warned) == MAX_WARNED_FIELDS:
                logger.warning("ignoring further unknown fields without a warning")
