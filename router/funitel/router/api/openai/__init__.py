"""The OpenAI chat and completions APIs."""

from funitel.router.api.common.route_kinds import openai_fact, openai_work
from funitel.router.api.openai import chat, completions, models
from funitel.router.api.openai.models import Model, ModelList
from funitel.router.api.openai.schema_answers import ChatCompletion, ChatCompletionChunk
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.api.openai.schema_completions import Completion, CompletionChunk, CompletionRequest

ROUTES = (
    openai_work(
        path="/v1/chat/completions",
        handler=chat.chat_completions,
        summary="Answer a chat; streamed if `stream` is true",
        body=ChatRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
    ),
    openai_work(
        path="/v1/completions",
        handler=completions.completions,
        summary="Go on from one prompt or several; streamed if `stream` is true",
        body=CompletionRequest,
        answer=Completion,
        event=CompletionChunk,
    ),
    openai_fact(path="/v1/models", handler=models.models, summary="The model", answer=ModelList),
    openai_fact(
        path="/v1/models/{model:path}",
        handler=models.model,
        summary="The model, by its name",
        answer=Model,
        failures=(404,),
    ),
)
