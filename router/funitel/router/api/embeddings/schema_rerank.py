"""Request and answer records of `/v1/rerank`, in the shape that Cohere, Jina and vLLM share."""

import reprlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.field_policy import Unsupported
from funitel.router.api.common.schema_base import U32, ApiModel, Body, Priority, is_none

WHOLE = -1  # of `truncate_prompt_tokens`: what the model takes


def _text(value: Any) -> Any:
    """Return the text of a document, which may be an object with further fields."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"must be a string, or an object with a string `text`. Given: {reprlib.repr(value)}")
    return text


class RankedDocument(ApiModel):
    """A document by its text."""

    text: str


Text = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | RankedDocument)]


class DocumentsRequest(Body):
    """A query, and documents to rank by how well they answer it."""

    unsupported: ClassVar = {
        "rank_fields": Unsupported("a document is ranked by its `text`"),
        "max_chunks_per_doc": Unsupported("a document is one chunk"),
    }

    query: Text
    documents: list[Text] = Field(description="Texts, or objects with a `text`.")
    model: str | None = Field(
        default=None, description="Name of the model, any where there is one; echoed in the answer."
    )
    top_n: U32 | None = Field(default=None, description="How many of the best to return; all when 0 or not given.")
    return_documents: bool | None = Field(default=None, description="Whether to return the texts too, as by default.")
    use_activation: bool | None = Field(
        default=None, description="False returns the scores as the model gives them, beyond 0..1."
    )
    truncate_prompt_tokens: Literal[-1] | None = Field(
        default=None, description="-1 cuts a query with its document at the tokens that the model takes."
    )
    max_tokens_per_doc: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description="At least the tokens that the model takes, at which longer ones are cut then."
    )
    priority: Priority | None = Field(default=None, description="Lower is sooner. Wins over the header.")
    # Accepted: it concerns the operators of other services.
    user: Any = None

    def cut(self, max_tokens: int) -> str | None:
        """At which end texts are cut; None if they are not.

        Raises:
            InvalidRequest: documents are to be cut shorter than at `max_tokens`.
        """
        most = self.max_tokens_per_doc
        if most is not None and most < max_tokens:
            raise InvalidRequest(
                f"`max_tokens_per_doc` must be >= {max_tokens}, the tokens of a query and a document together. "
                f"Given: {most}",
                "max_tokens_per_doc",
            )
        return "right" if most is not None or self.truncate_prompt_tokens is not None else None


class RankedResult(ApiModel):
    """One document by its place in the request."""

    index: int
    document: RankedDocument | None = Field(default=None, exclude_if=is_none)
    relevance_score: float


class RerankUsage(ApiModel):
    """Tokens of all texts, special ones included."""

    prompt_tokens: int
    total_tokens: int


class DocumentsResponse(ApiModel):
    """The best documents, the best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    usage: RerankUsage
    results: list[RankedResult]
