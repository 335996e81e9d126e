"""Handle vLLM's `/tokenize` beside TGI's, `/detokenize`, `/version` and `/load`."""

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.body import json_answer, read_json
from funitel.router.api.common.handler import IncomingRequest, reading_route, service_of
from funitel.router.api.native import tokenize as native
from funitel.router.api.vllm.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    ServerLoad,
    ServerVersion,
    TokenizeChat,
    Tokenized,
    TokenizePrompt,
)
from funitel.router.chat.prompt import render_prompt
from funitel.router.serving.media import placed
from funitel.router.serving.service import Service


@reading_route
async def tokenize(incoming: IncomingRequest) -> Response:
    """`/tokenize`: TGI's answer to a body with `inputs`, vLLM's to one with `messages` or `prompt`."""
    content = await read_json(incoming.http, incoming.service.payload_limit)
    given = content if isinstance(content, dict) else {}
    if given.get("inputs") is None and given.get("messages") is not None:
        return json_answer(await _tokenized_chat(incoming))
    if given.get("inputs") is None and given.get("prompt") is not None:
        return json_answer(await _tokenized_prompt(incoming))
    return await native.tokenize(incoming.http)


async def _tokenized_prompt(incoming: IncomingRequest) -> Tokenized:
    body, service = await incoming.read(TokenizePrompt), incoming.service
    ids = await service.tokenizer.listed_ids(body.prompt, add_special_tokens=body.add_special_tokens, field="prompt")
    return _answer(service, ids, with_strings=bool(body.return_token_strs))


async def _tokenized_chat(incoming: IncomingRequest) -> Tokenized:
    body, service = await incoming.read(TokenizeChat), incoming.service
    body.check()
    prompt = await render_prompt(service, body.call)
    ids = await service.tokenizer.listed_ids(
        prompt.text,
        add_special_tokens=body.add_special_tokens,
        field="messages",
        plain=prompt.plain,
    )
    ids, _ = placed(service, ids, prompt.media, "messages")
    return _answer(service, ids, with_strings=bool(body.return_token_strs))


def _answer(service: Service, ids: Sequence[int], *, with_strings: bool) -> Tokenized:
    strings = service.tokenizer.spellings(ids) if with_strings else None
    return Tokenized(count=len(ids), max_model_len=service.max_model_len, tokens=list(ids), token_strs=strings)


@reading_route
async def detokenize(incoming: IncomingRequest) -> Response:
    """`/detokenize`: the text of some tokens, at most as many as the model can take."""
    body, service = await incoming.read(DetokenizeRequest), incoming.service
    ids, most, num_tokens = body.tokens, service.max_model_len, service.tokenizer.num_tokens
    if len(ids) > most:
        raise InvalidRequest(f"`tokens` must be at most {most}. Given: {len(ids)}", "tokens")
    unknown = next((token_id for token_id in ids if token_id >= num_tokens), None)
    if unknown is not None:
        raise InvalidRequest(f"`tokens` must be ids >= 0 and < {num_tokens}. Given: {unknown}", "tokens")
    return json_answer(DetokenizeResponse(prompt=await service.tokenizer.decode(ids)))


async def version(http: HttpRequest) -> Response:
    """`/version`: the version of the server."""
    return json_answer(ServerVersion(version=service_of(http).version))


async def load(http: HttpRequest) -> Response:
    """`/load`: how many requests are in flight, on routes that work."""
    return json_answer(ServerLoad(server_load=service_of(http).drain.num_running))
