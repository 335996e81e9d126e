"""Handle `/tokenize` and `/chat_tokenize`: the tokens of a prompt, without running the model."""

from starlette.responses import Response

from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import IncomingRequest, counted_route, reading_route
from funitel.router.api.native.schema import ChatTokenizeResponse, GenerateRequest, SimpleToken, TokenizeResponse
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.chat.prompt import render_prompt
from funitel.router.text.tokenizer import Encoding


@reading_route
async def tokenize(incoming: IncomingRequest) -> Response:
    """`/tokenize`: the prompt's tokens, special ones added, with their places in bytes."""
    body = await incoming.read(GenerateRequest)
    encoding = await incoming.service.tokenizer.encode(body.inputs)
    return json_answer(_listed(encoding))


@counted_route
@reading_route
async def chat_tokenize(incoming: IncomingRequest) -> Response:
    """`/chat_tokenize`: the prompt that the template makes of a chat, and its tokens."""
    body = await incoming.read(ChatRequest)
    body.check()
    prompt = await render_prompt(incoming.service, body.call)
    encoding = await incoming.service.tokenizer.encode(prompt.text, add_special_tokens=False, plain=prompt.plain)
    answer = ChatTokenizeResponse(tokenize_response=_listed(encoding), templated_text=prompt.text)
    return json_answer(answer)


def _listed(encoding: Encoding) -> TokenizeResponse:
    rows = zip(encoding.ids, encoding.offsets, encoding.byte_offsets(), strict=True)
    tokens = [
        SimpleToken(id=id, text=encoding.text[begin:end], start=start, stop=stop)
        for id, (begin, end), (start, stop) in rows
    ]
    return TokenizeResponse(tokens)
