"""Request and answer records of the step API."""

from typing import Annotated, Literal

from pydantic import Field

from funitel.router.api.common.schema_base import MODEL_NAME, U32, ApiModel, Body, ModelBody

MAX_ITEMS = 1024


class InferRequest(ModelBody):
    """Which queries a step advances."""

    ids: Annotated[list[U32], Field(max_length=MAX_ITEMS)] | None = Field(
        default=None, description="Those queries alone; all of the key if absent."
    )


class ModelQuery(ApiModel):
    """Which model a query is with."""

    model: str | None = Field(default=None, description=MODEL_NAME)


class CommittedToken(Body):
    """The token that a query goes on with."""

    id: U32 = Field(description="Of the query.")
    token_id: U32
    is_end: bool = Field(default=False, description="Whether it is the last; the query is removed then.")


class CommitRequest(ModelBody):
    """The tokens that the client chose, at most one of each query."""

    tokens: Annotated[list[CommittedToken], Field(max_length=MAX_ITEMS)]


class AddedQuery(ApiModel):
    """A query that was added."""

    object: Literal["step.query"] = "step.query"
    id: int = Field(description="From 1; ids begin again after 10000.")
    prompt_tokens: int


class Candidate(ApiModel):
    """One of the likeliest tokens of a step."""

    token_id: int
    text: str
    logprob: float | None = Field(description="null where the token could not be drawn.")


class InferredToken(ApiModel):
    """What a step gave for one query."""

    id: int = Field(description="Of the query.")
    token_id: int = Field(description="The token that its sampling chose; nothing is committed yet.")
    text: str
    logprob: float | None
    candidates: list[Candidate] = Field(description="The likeliest tokens, as many as `top_n_tokens`.")
    is_end: bool = Field(description="Whether the token ends the text.")


class InferredTokens(ApiModel):
    """What a step gave; a query has no result before its prompt is computed."""

    object: Literal["list"] = "list"
    data: list[InferredToken]


class CommittedTokens(ApiModel):
    """How many queries went on, and how many are left."""

    object: Literal["step.commit"] = "step.commit"
    committed: int
    queries: int


class RemovedQuery(ApiModel):
    """A query that was removed."""

    object: Literal["step.query.removed"] = "step.query.removed"
    id: int
    removed: Literal[True] = True
