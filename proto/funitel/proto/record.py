"""Records that programs send each other and keep: dataclasses with their JSON."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Self


class Record:
    """A dataclass with one JSON property for each field."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the record."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The record of a JSON object; properties of a later version are left out."""
        names = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in content.items() if name in names})
