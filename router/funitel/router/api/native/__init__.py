"""TGI's native routes: generate, tokenize."""

from funitel.router.api.common.route_kinds import native_read, native_work
from funitel.router.api.native import generate, tokenize
from funitel.router.api.native.schema import (
    ChatTokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    StreamResponse,
)
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.middleware.operation import ModelUse

ROUTES = (
    native_work("/generate", generate.generate, "Generate a completion", GenerateRequest, GenerateResponse),
    native_work(
        "/generate_stream",
        generate.generate_stream,
        "Generate a completion, token by token",
        GenerateRequest,
        event=StreamResponse,
    ),
    native_read(
        "/chat_tokenize",
        tokenize.chat_tokenize,
        "Make the prompt of a chat and tokenize it",
        ChatRequest,
        ChatTokenizeResponse,
        model=ModelUse.GENERATES,
    ),
)
