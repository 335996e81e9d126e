"""The OpenAI chat and completions APIs."""

from funitel.router.api.common.route_kinds import tgi_openai_fact, tgi_openai_work
from funitel.router.api.openai import chat, completions, models
from funitel.router.api.openai.models import LaunchedModelInfo, ModelList
from funitel.router.api.openai.schema_answers import ChatCompletion, ChatCompletionChunk
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.api.openai.schema_completions import Completion, CompletionChunk, CompletionRequest

ROUTES = (
    tgi_openai_work(
        "/v1/chat/completions",
        chat.chat_completions,
        "Answer a chat; streamed if `stream` is true",
        ChatRequest,
        ChatCompletion,
        event=ChatCompletionChunk,
    ),
    tgi_openai_work(
        "/v1/completions",
        completions.completions,
        "Go on from one prompt or several; streamed if `stream` is true",
        CompletionRequest,
        Completion,
        event=CompletionChunk,
    ),
    tgi_openai_fact("/v1/models", models.models, "The models", answer=ModelList),
    tgi_openai_fact(
        "/v1/models/{model:path}", models.model, "A model, by its name", answer=LaunchedModelInfo, failures=(404,)
    ),
)
