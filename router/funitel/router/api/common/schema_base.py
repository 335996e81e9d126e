"""Base records and field types of the bodies of all APIs, with errors that a client can read.

Types are strict as TGI's are: "5" is no number, true is no integer; an integer is a float.
"""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from funitel.router.core.request import MAX_PRIORITY

F32_MAX = 3.4028234663852886e38
F32_TINY = 1.1754943508222875e-38


def _flush_tiny(value: float) -> float:
    """Turn what single precision would make zero into zero, so that checks see what the shards will."""
    return value if abs(value) >= F32_TINY else 0.0


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def is_none(value: Any) -> bool:
    """For fields that are left out, not null, when there is nothing to say."""
    return value is None


MAX_UNKNOWN_FIELDS = 1000  # of one record; each would be an error, or a warning

Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
U64 = Annotated[int, Field(ge=0, le=2**64 - 1)]
F32 = Annotated[float, Field(ge=-F32_MAX, le=F32_MAX), AfterValidator(_flush_tiny)]
StopList = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=list[str] | str | None)]
TargetLanguage = Annotated[str, Field(min_length=1, max_length=32)]
TARGET_LANGUAGE = "The language a model that translates writes in, by its token: fra_Latn, fr_XX or __fr__ (or fr)."


def _fail_fast(schema: Any) -> None:
    """Make every list within a core schema stop at its first wrong item, in place."""
    parts = schema.values() if isinstance(schema, dict) else schema
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    for part in parts:
        if isinstance(part, dict | list | tuple):
            _fail_fast(part)


class Body(BaseModel):
    """A body, or a part of one. Strict types, finite numbers; a list is read up to its first wrong item.

    Otherwise a body of a million wrong items, or unknown fields, would make a million errors and block the loop for
    seconds.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, content: Any) -> Any:
        max_fields = len(cls.model_fields) + MAX_UNKNOWN_FIELDS
        if isinstance(content, dict) and len(content) > max_fields:
            raise ValueError(f"must have at most {max_fields} fields. Given: {len(content)}")
        return content

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class NativeBody(Body):
    """A body that keeps unknown fields aside, to warn of them (TGI ignores them)."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown_fields(self) -> list[str]:
        """Names of unknown fields, here and in the parts."""
        values = [item for value in self.__dict__.values() for item in (value if isinstance(value, list) else [value])]
        parts = [value for value in values if isinstance(value, NativeBody)]
        return [*(self.model_extra or {}), *(name for part in parts for name in part.unknown_fields)]


class Documented:
    """Bounds that the document tells and `validation` checks, in TGI's order and words."""

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        if {"exclusiveMinimum", "minimum"} & self._bounds.keys():
            schema.pop("minimum", None)
        if {"exclusiveMaximum", "maximum"} & self._bounds.keys():
            schema.pop("maximum", None)
        return schema | self._bounds


ABOVE_0 = Documented(exclusiveMinimum=0)
WITHIN_0_AND_1 = Documented(exclusiveMinimum=0, exclusiveMaximum=1)


class ClosedBody(Body):
    """A body, or a part of one, that refuses unknown fields; fields are named as clients name them."""

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
