"""Routes that vLLM's clients ask beside OpenAI's: tokens of prompts and their texts, version, load, and adapters."""

from funitel.router.api.common.route_kinds import native_fact, native_read, operator_work
from funitel.router.api.vllm import adapters, handlers
from funitel.router.api.vllm.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    LoadAdapter,
    ServerLoad,
    ServerVersion,
    TokenizeAnswer,
    TokenizeBody,
    UnloadAdapter,
)
from funitel.router.middleware.operation import ModelUse

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
    operator_work(
        "/v1/load_lora_adapter",
        adapters.load,
        "Load an adapter from below the folder of --lora-folder",
        LoadAdapter,
        text="text/plain",
        model=ModelUse.GENERATES,
    ),
    operator_work(
        "/v1/unload_lora_adapter",
        adapters.unload,
        "Forget an adapter; requests with it go on",
        UnloadAdapter,
        text="text/plain",
    ),
)
