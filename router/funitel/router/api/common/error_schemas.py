"""Error records of the protocols: TGI's, OpenAI's, Anthropic's, Inferflow's. A route's record decides statuses, too."""

from typing import Literal

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel, is_none


class ErrorResponse(ApiModel):
    """Any failure of a native route."""

    error: str
    error_type: str
    queue_position: int | None = Field(default=None, exclude_if=is_none, description="Where it would have stood.")
    estimated_wait_seconds: float | None = Field(default=None, exclude_if=is_none)


class OpenAIError(ApiModel):
    """What went wrong, in OpenAI's words; `param` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorResponse(ApiModel):
    """Any failure of an OpenAI route that TGI does not have, with OpenAI's status."""

    error: OpenAIError
    queue_position: int | None = Field(default=None, exclude_if=is_none, description="Where it would have stood.")
    estimated_wait_seconds: float | None = Field(default=None, exclude_if=is_none)


class TgiOpenAIErrorResponse(OpenAIErrorResponse):
    """Any failure of an OpenAI route that TGI has, with TGI's status; `error_type` is TGI's word for it."""

    error_type: str


class AnthropicErrorDetail(ApiModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorResponse(ApiModel):
    """Any failure of these routes, and the event that ends a stream which fails."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str
    queue_position: int | None = Field(default=None, exclude_if=is_none, description="Where it would have stood.")
    estimated_wait_seconds: float | None = Field(default=None, exclude_if=is_none)


class InferflowError(ApiModel):
    """Any failure of Inferflow's route; a status is that of the other native routes."""

    text: Literal[""] = ""
    ret_code: str = Field(
        description="error.busy, error.empty_request, error.too_long_request or error.invalid_request_format; of a "
        "refused key or a failure of the server error. and the type of the error."
    )
    is_end: Literal[True] = True
    error: str
    queue_position: int | None = Field(default=None, exclude_if=is_none, description="Where it would have stood.")
    estimated_wait_seconds: float | None = Field(default=None, exclude_if=is_none)
