"""Copy the fields that a dataclass and its protobuf message have by the same names, for `wire` and `encoder_wire`."""

from collections.abc import Collection
from typing import Any, TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def to_message(kind: type[M], value: Any, /, *, without: Collection[str] = (), **given: Any) -> M:
    """Build a message of the fields of a dataclass with slots; None leaves a field of the message absent.

    Args:
        kind: class of the message.
        value: the dataclass.
        without: fields that the message does not have by their names.
        given: fields of the message that differ in name or type.
    """
    same = {name: getattr(value, name) for name in value.__slots__ if name not in given and name not in without}
    return kind(**same, **given)


def from_message(kind: type[T], message: Message, /, **given: Any) -> T:
    """Build a dataclass with slots from a message: an absent optional field is None, a repeated one a tuple.

    Args:
        kind: class of the dataclass.
        message: has all fields of `kind` by the same names, except those `given`.
        given: fields of the dataclass that differ in name or type.
    """
    slots: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]
    return kind(**{name: _value(message, name) for name in slots if name not in given}, **given)


def _value(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        return tuple(getattr(message, name))
    return None if field.has_presence and not message.HasField(name) else getattr(message, name)
