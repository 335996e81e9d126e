"""Base records and field types of the bodies of all APIs, with errors that a client can read.

Types are strict as TGI's are: "5" is no number, true is no integer; an integer is a float.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    RootModel,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from funitel.router.api.common.field_policy import FIELD_ERROR, FieldPolicy, Unsupported
from funitel.router.core.request import MAX_PRIORITY
from funitel.router.core.stream import total_by_tier

F32_MAX = 3.4028234663852886e38
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
F32_TINY = 1.1754943508222875e-38


Root = TypeVar("Root")


def _flush_tiny(value: float) -> float:
    """Turn what single precision would make zero into zero, so that checks see what the shards will."""
    return value if abs(value) >= F32_TINY else 0.0


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def json_object(text: str) -> dict[str, Any]:
    """Return the object that a JSON text describes; an empty text describes an empty one.

    Halves of characters, which models spell now and then, are replaced: a conversation must go on with such a call.

    Raises:
        ValueError: it describes none, or is nested too deeply; the message has the reason.
    """
    try:
        values = json.loads(text or "{}")
        if _SURROGATE_ESCAPE.search(text):
            whole = json.dumps(values, ensure_ascii=False).encode("utf-16", "surrogatepass")
            values = json.loads(whole.decode("utf-16", "replace"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ValueError("must be the JSON text of an object")
    return values


def is_none(value: Any) -> bool:
    """For fields that are left out, not null, when there is nothing to say."""
    return value is None


class ApiModel(BaseModel):
    """A body of any API, or a part of one. What validates and writes it is made at its first use.

    Made when a module is imported, those of all APIs would take a fifth of what a router needs to start.
    """

    model_config = ConfigDict(defer_build=True)


class ApiRootModel(RootModel[Root], Generic[Root]):
    """A body of any API that is no object, or one of several; made at its first use too."""

    model_config = ConfigDict(defer_build=True)


class CachedByTier(ApiModel):
    """Cached tokens of a prompt by where they were found."""

    memory: int = Field(description="In the KV pool.")
    host: int | None = Field(default=None, exclude_if=is_none, description="In host memory beside a GPU.")
    disk: int | None = Field(default=None, exclude_if=is_none, description="In the file of --kv-disk-gb.")

    @classmethod
    def of(cls, *counts: Mapping[str, int]) -> Self | None:
        """The counts of `TokenStream.cached_by_tier` of prompts, added up; None where there is one tier."""
        found = total_by_tier(counts)
        return cls(**found) if found else None


MODEL_NAME = "Name of the model, or of an adapter; any name where there is one model."
ModelName = Annotated[str, Field(max_length=1024)]  # of any model; each event of a stream repeats it
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
CLAMPED = (
    "More than the context has room for is refused below 1024; from 1024 on it is accepted if 1024 fit, and clamped: "
    "the answer ends with the context."
)
"""What every field with a number of completion tokens says of numbers over the context."""
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
U64 = Annotated[int, Field(ge=0, le=2**64 - 1)]
F32 = Annotated[float, Field(ge=-F32_MAX, le=F32_MAX), AfterValidator(_flush_tiny)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
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


class Body(ApiModel):
    """A body, or a part of one. Strict types, finite numbers; a list is read up to its first wrong item.

    Otherwise a body of a million wrong items would make a million errors and block the loop for seconds.

    Where the context of a validation is a `FieldPolicy`, as it is for a client's body, a field that is null is unset, a
    field of `unsupported` is refused unless its value asks for nothing, and the policy decides on unknown fields.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, serialize_by_alias=True)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    _known: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls._known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _take_known_fields(cls, content: Any, info: ValidationInfo) -> Any:
        policy: FieldPolicy | None = info.context
        if policy is None or not isinstance(content, dict):
            return content
        if None in content.values():
            content = {name: value for name, value in content.items() if value is not None}
        if not content.keys() <= cls._known:
            cls._check_other_fields(content, policy)
        return content

    @classmethod
    def _check_other_fields(cls, content: dict[str, Any], policy: FieldPolicy) -> None:
        for name in cls.unsupported.keys() & content.keys():
            refusal = cls.unsupported[name]
            if not refusal.is_neutral(content[name]):
                context = {"name": name, "why": refusal.why, "code": "unsupported_parameter"}
                raise PydanticCustomError(FIELD_ERROR, "is not supported: {why}", context)
        policy.note(cls.__name__, content, cls._known | cls.unsupported.keys())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


class ModelBody(Body):
    """A body that may name the model, though the servers of its protocol have one."""

    model: ModelName | None = Field(default=None, description=MODEL_NAME)


WITH_TIMINGS = "Whether the answer has `timings`: queue, time to first token, whole time, tokens per second."


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
