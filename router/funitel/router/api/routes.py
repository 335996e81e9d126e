"""Every route, once: the application, the OpenAPI document and the key check are made from this table."""

import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

from funitel.router.api import openapi, operators
from funitel.router.api.anthropic import handlers as anthropic
from funitel.router.api.anthropic.schema import (
    AnthropicErrorResponse,
    CountTokensRequest,
    MessageAnswer,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from funitel.router.api.embeddings import handlers as encoder
from funitel.router.api.embeddings.schema import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    EmbedResponse,
    PredictRequest,
    PredictResponse,
    RerankRequest,
    RerankResponse,
)
from funitel.router.api.native import generate, tokenize
from funitel.router.api.native.schema import (
    AnyObject,
    ChatTokenizeResponse,
    CompatGenerateRequest,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Info,
    StreamResponse,
    TokenizeResponse,
)
from funitel.router.api.openai import chat, completions
from funitel.router.api.openai.schema_answers import ChatCompletion, ChatCompletionChunk
from funitel.router.api.openai.schema_chat import (
    ChatRequest,
    Model,
    ModelList,
    OpenAIErrorResponse,
)
from funitel.router.api.openai.schema_completions import Completion, CompletionChunk, CompletionRequest
from funitel.router.api.openapi import ANTHROPIC_FAILURES, GENERATION_FAILURES, READ_FAILURES
from funitel.router.api.platforms import kserve, sagemaker_vertex
from funitel.router.api.platforms.schema import (
    KserveLive,
    KserveMetadata,
    KserveRequest,
    KserveResponse,
    SagemakerRequest,
    SagemakerResponse,
    SagemakerStreamResponse,
    VertexRequest,
    VertexResponse,
)
from funitel.router.api.responses import handlers as responses
from funitel.router.api.responses.schema_request import (
    InputItemsQuery,
    InputTokensRequest,
    ResponsesRequest,
    RetrieveQuery,
)
from funitel.router.api.responses.schema_response import (
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ModelResponse,
    ResponseStreamEvent,
)
from funitel.router.core.version import version
from funitel.router.engine.snapshot import SchedulerState
from funitel.router.middleware.operation import Access, Operation
from funitel.router.settings import RouterSettings

TITLE = "funitel"

_native = partial(Operation, error=ErrorResponse, is_native=True)
_openai = partial(Operation, error=OpenAIErrorResponse)

# What reads a body and what generates, behind the key.
_native_read = partial(_native, method="POST", failures=READ_FAILURES)
_native_work = partial(_native, method="POST", failures=GENERATION_FAILURES)
_openai_work = partial(_openai, method="POST", failures=GENERATION_FAILURES)
_openai_stored = partial(_openai, failures=(404, 422))
_anthropic_work = partial(
    Operation,
    error=AnthropicErrorResponse,
    method="POST",
    failures=ANTHROPIC_FAILURES,
)

_native_fact = partial(_native, method="GET", access=Access.FACT)
_native_state = partial(_native, method="GET", access=Access.FACT, failures=(503,))
_native_probe = partial(_native, method="GET", access=Access.PROBE)
_openai_fact = partial(_openai, method="GET", access=Access.FACT)

_KSERVE_MODEL = "/v2/models/{name}/versions/{version}"

_vertex = partial(
    _native_work,
    handler=sagemaker_vertex.vertex,
    summary="Vertex AI: the texts of all instances",
    body=VertexRequest,
    answer=VertexResponse,
)
_health = partial(_native_probe, failures=(503,), handler=operators.health, summary="Whether every shard answers")

_NATIVE = (
    _native_work(
        path="/",
        handler=generate.compat_generate,
        summary="Generate; streamed if `stream` is true, else an array of one completion",
        body=CompatGenerateRequest,
        answer=GenerateResponse,
        is_array=True,
        event=StreamResponse,
    ),
    _native_work(
        path="/generate",
        handler=generate.generate,
        summary="Generate a completion",
        body=GenerateRequest,
        answer=GenerateResponse,
    ),
    _native_work(
        path="/generate_stream",
        handler=generate.generate_stream,
        summary="Generate a completion, token by token",
        body=GenerateRequest,
        event=StreamResponse,
    ),
    _native_read(
        path="/tokenize",
        handler=tokenize.tokenize,
        summary="Tokenize a prompt",
        body=GenerateRequest,
        answer=TokenizeResponse,
    ),
    _native_read(
        path="/chat_tokenize",
        handler=tokenize.chat_tokenize,
        summary="Make the prompt of a chat and tokenize it",
        body=ChatRequest,
        answer=ChatTokenizeResponse,
    ),
)

_OPENAI = (
    _openai_work(
        path="/v1/chat/completions",
        handler=chat.chat_completions,
        summary="Answer a chat; streamed if `stream` is true",
        body=ChatRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
    ),
    _openai_work(
        path="/v1/completions",
        handler=completions.completions,
        summary="Go on from one prompt or several; streamed if `stream` is true",
        body=CompletionRequest,
        answer=Completion,
        event=CompletionChunk,
    ),
    _openai_fact(path="/v1/models", handler=chat.models, summary="The model", answer=ModelList),
    _openai_fact(
        path="/v1/models/{model:path}",
        handler=chat.model,
        summary="The model, by its name",
        answer=Model,
        failures=(404,),
    ),
)

_ENCODERS = (
    _native_work(
        path="/embed",
        handler=encoder.embed,
        summary="Encoders: a vector for each text",
        body=EmbedRequest,
        answer=EmbedResponse,
    ),
    _native_work(
        path="/rerank",
        handler=encoder.rerank,
        summary="Encoders: texts by how well they answer a query",
        body=RerankRequest,
        answer=RerankResponse,
    ),
    _native_work(
        path="/predict",
        handler=encoder.predict,
        summary="Encoders: the classes of texts and pairs, or what may stand behind a mask",
        body=PredictRequest,
        answer=PredictResponse,
    ),
    _openai_work(
        path="/v1/embeddings",
        handler=encoder.embeddings,
        summary="Encoders: a vector for each text",
        body=EmbeddingsRequest,
        answer=EmbeddingsResponse,
    ),
)

_ANTHROPIC = (
    _anthropic_work(
        path="/v1/messages",
        handler=anthropic.messages,
        summary="Answer a conversation, in Anthropic's words; streamed if `stream` is true",
        body=MessagesRequest,
        answer=MessageAnswer,
        event=MessageEvent,
    ),
    _anthropic_work(
        path="/v1/messages/count_tokens",
        handler=anthropic.count_tokens,
        summary="Count the tokens of a conversation, in Anthropic's words",
        body=CountTokensRequest,
        answer=TokenCount,
    ),
)

_RESPONSES = (
    _openai_work(
        path="/v1/responses",
        handler=responses.create,
        summary="Answer a conversation and keep the answer; streamed if `stream` is true",
        body=ResponsesRequest,
        answer=ModelResponse,
        event=ResponseStreamEvent,
    ),
    _openai(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=responses.count_input_tokens,
        summary="Count the tokens of a conversation",
        body=InputTokensRequest,
        answer=InputTokenCount,
        failures=READ_FAILURES,
    ),
    _openai_stored(
        method="GET",
        path="/v1/responses/{response_id}",
        handler=responses.retrieve,
        summary="An answer that was kept",
        query=RetrieveQuery,
        answer=ModelResponse,
    ),
    _openai_stored(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handler=responses.delete,
        summary="Keep an answer no more",
        answer=DeletedResponse,
    ),
    _openai_stored(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=responses.cancel,
        summary="Refused: what is kept has ended",
        answer=ModelResponse,
    ),
    _openai_stored(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        handler=responses.input_items,
        summary="The conversation that a kept answer goes on from",
        query=InputItemsQuery,
        answer=ItemList,
    ),
)

_PLATFORMS = (
    _native_work(
        path="/invocations",
        handler=sagemaker_vertex.invocations,
        summary="SageMaker: a body of `/` or of a route of OpenAI's, told apart by its fields",
        body=SagemakerRequest,
        answer=SagemakerResponse,
        event=SagemakerStreamResponse,
    ),
    _vertex(path="/vertex"),
    _native_fact(path="/v2", handler=kserve.server_metadata, summary="KServe: the server", answer=KserveMetadata),
    _native_probe(
        path="/v2/health/live", handler=kserve.live, summary="KServe: whether the router answers", answer=KserveLive
    ),
    _native_probe(
        path="/v2/health/ready",
        failures=(503,),
        handler=kserve.ready,
        summary="KServe: whether every shard answers",
        answer=KserveLive,
    ),
    _native_fact(path=_KSERVE_MODEL, handler=kserve.model_metadata, summary="KServe: the model", answer=KserveMetadata),
    _native_probe(
        path=f"{_KSERVE_MODEL}/ready",
        failures=(503,),
        handler=kserve.ready,
        summary="KServe: whether every shard answers",
        answer=KserveLive,
    ),
    _native_work(
        path=f"{_KSERVE_MODEL}/infer",
        handler=kserve.infer,
        summary="KServe: the completions of all inputs",
        body=KserveRequest,
        answer=KserveResponse,
    ),
)

_OPERATORS = (
    _health(path="/"),
    _health(path="/health"),
    _health(path="/ping"),
    _health(path="/health/ready"),
    _native_probe(path="/health/live", handler=operators.live, summary="Whether the router answers"),
    _native_state(path="/info", handler=operators.info, summary="What is served", answer=Info),
    _native_fact(path="/metrics", handler=operators.prometheus, summary="Metrics for Prometheus", text="text/plain"),
    _native_fact(path="/docs", handler=operators.docs, summary="This page", text="text/html"),
    _native_fact(
        path="/openapi.json", handler=operators.openapi_json, summary="The OpenAPI document", answer=AnyObject
    ),
    _native_fact(path="/api-doc/openapi.json", handler=operators.openapi_json, summary="The same", answer=AnyObject),
)

# With --debug-routes only.
_DEBUG = (
    _native_state(
        path="/debug/scheduler",
        handler=operators.scheduler,
        summary="With --debug-routes: queue, batch, pool and last steps of every replica",
        answer=SchedulerState,
        access=Access.CLOSED_FACT,
    ),
)

OPERATIONS = _NATIVE + _OPENAI + _ENCODERS + _RESPONSES + _ANTHROPIC + _PLATFORMS + _OPERATORS


def operations(settings: RouterSettings) -> tuple[Operation, ...]:
    """All routes, after those whose paths the platform chose."""
    chosen = []
    if settings.aip_predict_route is not None:
        chosen.append(_vertex(path=settings.aip_predict_route))
    if settings.aip_health_route is not None:
        chosen.append(_health(path=settings.aip_health_route))
    taken = {(operation.method, operation.path) for operation in chosen}
    usual = OPERATIONS + _DEBUG if settings.debug_routes else OPERATIONS
    listed = (*chosen, *(operation for operation in usual if (operation.method, operation.path) not in taken))
    if not settings.protect_all_routes:
        return listed
    return tuple(
        replace(operation, access=Access.CLOSED_FACT) if operation.access is Access.FACT else operation
        for operation in listed
    )


@cache
def document(listed: tuple[Operation, ...] = OPERATIONS) -> dict[str, Any]:
    """The OpenAPI document of routes; made once, when first asked for."""
    return openapi.document(listed, TITLE, version())


@cache
def pages(listed: tuple[Operation, ...] = OPERATIONS) -> tuple[bytes, str]:
    """The same as it is sent, for programs and for people; written once, for they are asked for by anybody."""
    described = document(listed)
    return json.dumps(described, separators=(",", ":")).encode(), openapi.page(described)
