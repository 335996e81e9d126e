"""Handle `/tokenize` and `/chat_tokenize`: the tokens of a prompt, without running the model."""

import json

from starlette.responses import Response

from funitel.router.api.common.handler import IncomingRequest, counted_route, reading_route
from funitel.router.api.native.schema import GenerateRequest
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.chat.prompt import render_prompt
from funitel.router.serving.inline_images import inline_prompt
from funitel.router.serving.media import with_all_rows


@reading_route
async def tokenize(incoming: IncomingRequest) -> Response:
    """`/tokenize`: the prompt's tokens, special ones added, with their places in bytes."""
    body = await incoming.read(GenerateRequest)
    prompt = await inline_prompt(incoming.service, body.inputs)
    rows = await incoming.service.tokenizer.listed(prompt.text)
    return _answer(with_all_rows(incoming.service, rows, prompt.media))


@counted_route
@reading_route
async def chat_tokenize(incoming: IncomingRequest) -> Response:
    """`/chat_tokenize`: the prompt that the template makes of a chat, and its tokens."""
    body = await incoming.read(ChatRequest)
    body.check()
    prompt = await render_prompt(incoming.service, body.call)
    rows = await incoming.service.tokenizer.listed(prompt.text, add_special_tokens=False, plain=prompt.plain)
    rows = with_all_rows(incoming.service, rows, prompt.media)
    return _answer(f'{{"tokenize_response":{rows},"templated_text":{json.dumps(prompt.text, ensure_ascii=False)}}}')


def _answer(text: str) -> Response:
    return Response(text, media_type="application/json")
