"""Answer records of the routes for requests that run."""

from typing import Any, Literal

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel, ApiRootModel


class RequestRecord(ApiModel):
    """A request that runs, without a word of its prompt or answer."""

    object: Literal["request"] = "request"
    id: str = Field(description="Of the HTTP request: its X-Request-Id.")
    response_id: str | None = Field(description="Of the answer, such as chatcmpl-...; null where it has none.")
    state: Literal["waiting", "running", "paused"]
    age_seconds: float
    prompt_tokens: int
    tokens: int = Field(description="Generated so far, of all choices.")
    choices: int = Field(description="Sequences.")
    key: str | None = Field(description="The name of its API key.")


class RequestList(ApiModel):
    """Requests that run, oldest first."""

    object: Literal["list"] = "list"
    data: list[RequestRecord]


class StreamQuery(ApiModel):
    """Where a stream is resumed."""

    after: int | None = Field(
        None, ge=0, description="Number of the last event that the client has; else that of the header Last-Event-ID."
    )


class StreamEvent(ApiRootModel[dict[str, Any]]):
    """An event of a stream, as the route of its request sends it."""


class AbortedRequest(ApiModel):
    """A request that was aborted."""

    object: Literal["request.aborted"] = "request.aborted"
    id: str = Field(description="As it was given.")
    aborted: Literal[True] = True
