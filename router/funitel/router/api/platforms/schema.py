"""Request and answer records of SageMaker, Vertex AI and KServe's open inference protocol.

Knows no HTTP. What they carry inside are the bodies of the other routes.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from funitel.router.api.common.schema_base import ApiModel, ApiRootModel, Body, ModelBody
from funitel.router.api.embeddings.schema import (
    EmbedRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
)
from funitel.router.api.native.schema import (
    CompatGenerateRequest,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
)
from funitel.router.api.openai.schema_answers import ChatCompletion, ChatCompletionChunk
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.api.openai.schema_completions import Completion, CompletionChunk, CompletionRequest

# Clients that know the address only


class BareUrlRequest(
    ApiRootModel[CompatGenerateRequest | EmbedRequest | SimilarityRequest | RerankRequest | PredictRequest]
):
    """A prompt; of an encoder the body of `/embed`, `/similarity`, `/rerank` or `/predict`."""


# SageMaker: told apart by the field that only one of them has.


class SagemakerRequest(ApiRootModel[CompatGenerateRequest | ChatRequest | CompletionRequest]):
    """A body of `/`, `/v1/chat/completions` or `/v1/completions`."""


class SagemakerResponse(ApiRootModel[list[GenerateResponse] | ChatCompletion | Completion]):
    """What that route answers."""


class SagemakerStreamResponse(ApiRootModel[StreamResponse | ChatCompletionChunk | CompletionChunk]):
    """An event of what that route streams."""


# Vertex AI


def _kind(instance: Any) -> str:
    is_chat = isinstance(instance, dict) and "inputs" not in instance and "messages" in instance
    return "chat" if is_chat else "prompt"


VertexInstance = Annotated[
    Annotated[GenerateRequest, Tag("prompt")] | Annotated[ChatRequest, Tag("chat")], Discriminator(_kind)
]


class VertexRequest(ModelBody):
    """Prompts and chats to answer side by side."""

    instances: list[VertexInstance] = Field(description="At least one.")


class VertexResponse(ApiModel):
    """The texts, in the order of the instances."""

    predictions: list[str]


# KServe

Byte = Annotated[int, Field(ge=0, le=255)]


class KserveInput(Body):
    """One prompt: its bytes in UTF-8, as TGI takes them, or a list of one string, as the protocol says."""

    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: str
    data: list[Byte] | Annotated[list[str], Field(min_length=1, max_length=1)]

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a string rather than bytes."""
        return any(isinstance(item, str) for item in self.data)


class KserveWanted(Body):
    """Name of one output."""

    name: str


class KserveRequest(Body):
    """As many prompts as wanted outputs; all are generated with the same parameters."""

    id: str = ""
    parameters: GenerateParameters | None = None
    inputs: list[KserveInput] = Field(description="At least one.")
    outputs: list[KserveWanted] = Field(description="One for each input.")


class KserveOutput(ApiModel):
    """One completion, as bytes or as a list of one string: as its prompt came."""

    name: str
    shape: list[int]
    datatype: Literal["BYTES"] = "BYTES"
    data: list[int] | list[str]


class KserveResponse(ApiModel):
    """The completions, in the order of the outputs."""

    id: str
    outputs: list[KserveOutput]


class KserveLive(ApiModel):
    """Whether the server, or the model, can be used."""

    live: bool


class KserveMetadata(ApiModel):
    """What a server or a model is, and what it can do."""

    name: str
    version: str
    extensions: list[str]
