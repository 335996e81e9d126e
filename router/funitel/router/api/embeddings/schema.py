"""Request and answer records of encoders: text-embeddings-inference's native routes and OpenAI's embeddings."""

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from funitel.router.api.common.schema_base import U32, ApiModel, ApiRootModel, Body, ModelBody, Priority, is_none
from funitel.router.api.openai.schema_completions import GivenPrompt, Prompts, given_prompts

Direction = Literal["Left", "Right", "left", "right"]
MAX_TOP_K = 100
DEFAULT_TOP_K = 5  # of what may stand behind a mask


class TruncatingBody(ModelBody):
    """What bodies say alike of texts that are too long."""

    truncate: bool | None = Field(
        default=None, description="Whether texts that are too long are cut, instead of refused."
    )
    truncation_direction: Direction = Field(default="Right", description="The end at which they are cut.")

    @property
    def cut(self) -> str | None:
        """At which end texts are cut; None if they are not."""
        return self.truncation_direction.lower() if self.truncate else None


class PromptedBody(TruncatingBody):
    """Bodies with texts that a prompt of the model is put before."""

    prompt_name: str | None = Field(default=None, description="The prompt of the model that texts are put behind.")


class EmbedAllRequest(PromptedBody):
    """Texts of which each token gets a vector."""

    inputs: Prompts = Field(description="A text, texts, the tokens of a text, or those of several.")

    @property
    def texts(self) -> list[GivenPrompt]:
        """The texts, one or more."""
        return given_prompts(self.inputs)


class EmbedAllResponse(ApiRootModel[list[list[list[float]]]]):
    """For each text, in their order, a vector for each of its tokens, special ones included."""


class EmbedRequest(EmbedAllRequest):
    """Texts to embed."""

    normalize: bool = Field(default=True, description="Whether vectors have length 1.")
    dimensions: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description="Keep the first so many numbers of each vector."
    )


class EmbedResponse(ApiRootModel[list[list[float]]]):
    """A vector for each text, in their order."""


class SimilarityInput(Body):
    """A sentence, and those to compare with it."""

    source_sentence: str
    sentences: list[str]


class SimilarityRequest(ModelBody):
    """Sentences to compare with one sentence."""

    inputs: SimilarityInput
    parameters: PromptedBody | None = None


class SimilarityResponse(ApiRootModel[list[float]]):
    """The cosine between the vectors of the sentence and of each other one, in their order."""


class RerankRequest(TruncatingBody):
    """A query, and texts to rank by how well they answer it."""

    query: str
    texts: list[str]
    raw_scores: bool = Field(default=False, description="Whether scores stay as the model gives them, beyond 0..1.")
    return_text: bool = Field(default=False, description="Whether to return the texts too.")


class Rank(ApiModel):
    """One text by its place in the request."""

    index: int
    text: str | None = Field(default=None, exclude_if=is_none)
    score: float


class RerankResponse(ApiRootModel[list[Rank]]):
    """All texts, the best first."""


def _check_predicted(value: Any) -> Any:
    """Say in one line what must be given: the errors of a union speak of one of its branches."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        kinds = "a string, a pair of strings, or an array of arrays of one or two strings"
        raise ValueError(f"must be {kinds}. Given: {reprlib.repr(value)}")
    if not value:
        raise ValueError("must not be empty. Given: []")
    if isinstance(value[0], list):
        for place, item in enumerate(value):
            if not isinstance(item, list):
                raise ValueError(f"item {place} must be an array, as item 0 is. Given: {reprlib.repr(item)}")
            _check_text(item, f"item {place} ")
    else:
        _check_text(value, "")
    return value


def _check_text(value: Sequence[Any], at: str) -> None:
    if not 1 <= len(value) <= 2 or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{at}must be one or two strings: a text or a pair. Given: {reprlib.repr(value)}")


TextList = Annotated[list[str], Field(min_length=1, max_length=2)]
PredictInputs = Annotated[
    str | TextList | Annotated[list[TextList], Field(min_length=1)], BeforeValidator(_check_predicted)
]


class PredictRequest(TruncatingBody):
    """Texts, or pairs, to classify; or texts with a mask to fill."""

    inputs: PredictInputs = Field(description="A text, a pair of texts, or a batch: arrays of a text or a pair each.")
    raw_scores: bool = Field(default=False, description="Whether scores stay as the model gives them, beyond 0..1.")
    top_k: Annotated[U32, Field(ge=1, le=MAX_TOP_K)] | None = Field(
        default=None, description="Most predictions of a text; all classes, or 5 tokens, when not given."
    )

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list for each text."""
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    @property
    def texts(self) -> list[str | tuple[str, str]]:
        """The texts and pairs, one or more."""
        items: list[Any] = self.inputs if self.is_batch else [self.inputs]  # type: ignore[assignment]
        return [item if isinstance(item, str) else item[0] if len(item) == 1 else (item[0], item[1]) for item in items]


class Prediction(ApiModel):
    """A class and its score; or a token, with its text as the label and its probability as the score."""

    score: float
    label: str
    token: int | None = Field(default=None, exclude_if=is_none)


class PredictResponse(ApiRootModel[list[Prediction] | list[list[Prediction]]]):
    """The predictions of a text, the likeliest first; of a batch, a list for each."""


# OpenAI's


class EmbeddingsRequest(Body):
    """Texts to embed, in OpenAI's words."""

    input: Prompts = Field(description="A text, texts, the tokens of a text, or those of several.")
    model: str | None = Field(
        default=None, description="Name of the model, any where there is one; echoed in the answer."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="Numbers, or the base64 form of their little-endian float32 bytes."
    )
    dimensions: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description="Keep the first so many numbers of each vector."
    )
    priority: Priority | None = Field(default=None, description="Lower is sooner. Wins over the header.")
    # Accepted: it concerns OpenAI's service.
    user: Any = None

    @property
    def texts(self) -> list[GivenPrompt]:
        """The texts, one or more."""
        return given_prompts(self.input)


class Embedding(ApiModel):
    """One vector, of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(ApiModel):
    """Tokens of all texts, special ones included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(ApiModel):
    """A vector for each text, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
