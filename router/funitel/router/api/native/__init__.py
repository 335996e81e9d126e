"""TGI's native routes: generate, tokenize."""

from funitel.router.api.common.route_kinds import native_read, native_work
from funitel.router.api.native import generate, tokenize
from funitel.router.api.native.schema import (
    ChatTokenizeResponse,
    CompatGenerateRequest,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
    TokenizeResponse,
)
from funitel.router.api.openai.schema_chat import ChatRequest

ROUTES = (
    native_work(
        path="/",
        handler=generate.compat_generate,
        summary="Generate; streamed if `stream` is true, else an array of one completion",
        body=CompatGenerateRequest,
        answer=GenerateResponse,
        is_array=True,
        event=StreamResponse,
    ),
    native_work(
        path="/generate",
        handler=generate.generate,
        summary="Generate a completion",
        body=GenerateRequest,
        answer=GenerateResponse,
    ),
    native_work(
        path="/generate_stream",
        handler=generate.generate_stream,
        summary="Generate a completion, token by token",
        body=GenerateRequest,
        event=StreamResponse,
    ),
    native_read(
        path="/tokenize",
        handler=tokenize.tokenize,
        summary="Tokenize a prompt",
        body=GenerateRequest,
        answer=TokenizeResponse,
    ),
    native_read(
        path="/chat_tokenize",
        handler=tokenize.chat_tokenize,
        summary="Make the prompt of a chat and tokenize it",
        body=ChatRequest,
        answer=ChatTokenizeResponse,
    ),
)
