"""Pieces that the bodies of several APIs are made of, with errors a client can read."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Discriminator

from funitel.router.schema_types import Body


class ClosedBody(Body):
    """A body, or a part of one, whose unknown fields are errors; fields are named as clients name them."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)


def by_type(*supported: str, default: str | None = None) -> Discriminator:
    """Choose a record of a union by the field `type` of what a client sent.

        Block = Annotated[Annotated[Text, Tag("<text>")] | Annotated[Call, Tag("<call>")], by_type("text", "call")]

    Tags are in angle brackets so that the path of an error cannot take one for a field.

    Args:
        supported: the values there are records for.
        default: what an absent `type` means; without one it is an error.
    """

    def tag(value: Any) -> str | None:
        kind = value.get("type") or default if isinstance(value, dict) else getattr(value, "type", default)
        return f"<{kind}>" if kind in supported else None

    named = ", ".join(f"`{kind}`" for kind in supported)
    return Discriminator(
        tag, custom_error_type="unsupported_type", custom_error_message=f"must be an object of type {named}"
    )


def unsupported_type(value: Any, message: str) -> str:
    """What to say of a value that a union has no record for."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"type `{kind}` is not supported: {message}" if isinstance(kind, str) else message


def _refuse(value: Any) -> None:
    if value not in (None, [], {}):
        raise ValueError("is not supported")


Refused = Annotated[None, BeforeValidator(_refuse, json_schema_input_type=None)]
"""A known field that is refused when it asks for something."""
