"""Routes that vLLM's clients ask beside OpenAI's: tokens of prompts and their texts, version and load."""

from funitel.router.api.common.route_kinds import native_fact, native_read
from funitel.router.api.vllm import handlers
from funitel.router.api.vllm.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    ServerLoad,
    ServerVersion,
    TokenizeAnswer,
    TokenizeBody,
)

ROUTES = (
    native_read(
        "/tokenize",
        handlers.tokenize,
        "Tokenize a prompt: TGI's body with `inputs`, or vLLM's with `prompt` or `messages`",
        TokenizeBody,
        TokenizeAnswer,
    ),
    native_read("/detokenize", handlers.detokenize, "The text of tokens", DetokenizeRequest, DetokenizeResponse),
    native_fact("/version", handlers.version, "The version of the server", answer=ServerVersion),
    native_fact("/load", handlers.load, "How many requests are in flight", answer=ServerLoad),
)
