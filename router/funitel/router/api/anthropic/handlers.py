"""Handle Anthropic's routes `/v1/messages` and `/v1/messages/count_tokens`."""

import uuid
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest
from funitel.router.api.anthropic.builder import MessageBuilder
from funitel.router.api.anthropic.schema_request import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingEnabled,
)
from funitel.router.api.anthropic.schema_response import MessageAnswer, MessageUsage, Ping, TokenCount
from funitel.router.api.anthropic.to_chat import chat_call, sampling_of
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.errors import anthropic_error, exchange_id
from funitel.router.api.common.handler import IncomingRequest, generation_route, reading_route
from funitel.router.chat.parts import Part
from funitel.router.chat.run import PreparedChat, count_prompt_tokens, prepare_chat
from funitel.router.core import request_context
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.service import Service
from funitel.router.transport.sse import EventStream, Put, run_until_disconnect
from funitel.router.transport.sse_frames import named_frame

VERSIONS = ("2023-06-01", "2026-10-21")  # their events are the same; the sampling the later one drops is taken in both
FIELDS = {
    "inputs": "messages",
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "grammar": "output_config.format",
    "response_format": "output_config.format",
    "thinking_budget": "thinking",
}


@generation_route
async def messages(incoming: IncomingRequest) -> Response:
    """`/v1/messages`: the answer to a conversation, whole or streamed."""
    _check_version(incoming.http)
    body = await incoming.read(MessagesRequest)
    request_id = exchange_id()
    if body.stream:
        chat = await _prepare(incoming.service, body, incoming.arrived)
        return EventStream(
            partial(_stream, incoming.service, chat, body),
            partial(anthropic_error, request_id=request_id),
            headers=chat.stream_headers | {"request-id": request_id},
            frame=named_frame,
            keep_alive=named_frame(Ping()),
        )
    message, headers = await run_until_disconnect(
        incoming.http.receive, _complete(incoming.service, body, incoming.arrived)
    )
    return json_answer(message, headers | {"request-id": request_id})


@reading_route
async def count_tokens(incoming: IncomingRequest) -> Response:
    """`/v1/messages/count_tokens`: how many tokens the prompt of a conversation has."""
    _check_version(incoming.http)
    body = await incoming.read(CountTokensRequest)
    count = await count_prompt_tokens(incoming.service, chat_call(body), FIELDS)
    return json_answer(TokenCount(input_tokens=count), {"request-id": exchange_id()})


def _check_version(http: HttpRequest) -> None:
    version = http.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        allowed = " or ".join(VERSIONS)
        raise InvalidRequest(f"header anthropic-version: must be {allowed}. Given: {version!r}", "anthropic-version")


async def _prepare(service: Service, body: MessagesRequest, arrived: Arrival) -> PreparedChat:
    call = chat_call(body, sampling_of(body))
    chat = await prepare_chat(service, call, stream=body.stream, arrived=arrived, names=FIELDS)
    body.messages = []  # images take megabytes, and a stream holds the body
    if isinstance(body.thinking, ThinkingEnabled) and chat.prompt.reasoning is None:
        raise InvalidRequest("`thinking` is not supported: the model's template marks no reasoning", "thinking")
    return chat


async def _complete(service: Service, body: MessagesRequest, arrived: Arrival) -> tuple[MessageAnswer, dict[str, str]]:
    chat = await _prepare(service, body, arrived)
    (answer,), headers = await chat.run()
    builder = _builder(service, chat, body)
    for part in answer.parts:
        for _ in builder.feed(part):
            pass
    return builder.message, headers


async def _stream(service: Service, chat: PreparedChat, body: MessagesRequest, put: Put) -> None:
    builder = _builder(service, chat, body)

    def take(_index: int, part: Part) -> None:
        for event in builder.feed(part):
            put(event)

    await chat.stream(take)


def _builder(service: Service, chat: PreparedChat, body: MessagesRequest) -> MessageBuilder:
    thinking = body.thinking if isinstance(body.thinking, ThinkingEnabled | ThinkingAdaptive) else None
    message = MessageAnswer(
        id=request_context.drawn("id", lambda: f"msg_{uuid.uuid4().hex}"),
        model=request_context.drawn("model", lambda: service.shown_model(body.model)),
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=MessageUsage(input_tokens=len(chat.jobs[0].request.input_ids), output_tokens=0),
    )
    request_context.current().name_answer(message.id, message.model)
    return MessageBuilder(
        message,
        body.max_tokens,
        shows_thinking=thinking is not None,
        omits_thinking=thinking is not None and thinking.display == "omitted",
    )
