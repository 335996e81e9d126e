"""Every route, once: the application, the OpenAPI document and the key check are made from this table."""

from functools import cache, partial
from typing import Any

from funitel.router import openapi
from funitel.router.api import generate, openai, ops
from funitel.router.openapi import Operation
from funitel.router.schema import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Info,
    SimpleToken,
    StreamResponse,
)
from funitel.router.schema_openai import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ModelList,
    OpenAIErrorResponse,
)
from funitel.router.service import version

TITLE = "funitel"

_native = partial(Operation, error=ErrorResponse)
_openai = partial(Operation, error=OpenAIErrorResponse)

OPERATIONS = (
    _native(
        method="POST",
        path="/",
        handler=generate.compat_generate,
        summary="Generate; streamed if `stream` is true, else an array of one completion",
        body=CompatGenerateRequest,
        answer=GenerateResponse,
        is_array=True,
        event=StreamResponse,
        is_protected=True,
    ),
    _native(
        method="POST",
        path="/generate",
        handler=generate.generate,
        summary="Generate a completion",
        body=GenerateRequest,
        answer=GenerateResponse,
        is_protected=True,
    ),
    _native(
        method="POST",
        path="/generate_stream",
        handler=generate.generate_stream,
        summary="Generate a completion, token by token",
        body=GenerateRequest,
        event=StreamResponse,
        is_protected=True,
    ),
    _native(
        method="POST",
        path="/tokenize",
        handler=generate.tokenize,
        summary="Tokenize a prompt",
        body=GenerateRequest,
        answer=SimpleToken,
        is_array=True,
        is_protected=True,
    ),
    _openai(
        method="POST",
        path="/v1/chat/completions",
        handler=openai.chat_completions,
        summary="Answer a chat; streamed if `stream` is true",
        body=ChatRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        is_protected=True,
    ),
    _openai(method="GET", path="/v1/models", handler=openai.models, summary="The model", answer=ModelList),
    _native(method="GET", path="/", handler=ops.health, summary="The same as /health"),
    _native(method="GET", path="/health", handler=ops.health, summary="Whether every shard answers"),
    _native(method="GET", path="/ping", handler=ops.health, summary="The same as /health"),
    _native(method="GET", path="/info", handler=ops.info, summary="What is served", answer=Info),
    _native(method="GET", path="/metrics", handler=ops.prometheus, summary="Metrics for Prometheus"),
    _native(method="GET", path="/docs", handler=ops.docs, summary="This page"),
    _native(method="GET", path="/openapi.json", handler=ops.openapi_json, summary="The OpenAPI document"),
    _native(method="GET", path="/api-doc/openapi.json", handler=ops.openapi_json, summary="The same"),
)


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document of every route; made once, when first asked for."""
    return openapi.document(OPERATIONS, TITLE, version())
