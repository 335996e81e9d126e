"""Handle OpenAI's `/v1/chat/completions`: the answer to a chat, whole or streamed."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response

from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import IncomingRequest, generation_route
from funitel.router.api.common.schema_base import CachedByTier
from funitel.router.api.openai.openai_bounds import check_openai_bounds
from funitel.router.api.openai.prompt_scores import prompt_logprobs
from funitel.router.api.openai.schema_answers import (
    AnsweredToolCall,
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    CompletionTokensDetails,
    ContentLogprob,
    Delta,
    FunctionDelta,
    Logprobs,
    PromptTokensDetails,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from funitel.router.api.openai.schema_chat import ChatRequest
from funitel.router.chat.answer import ChatAnswer, ToolCall
from funitel.router.chat.parts import (
    ChatUsage,
    EndReason,
    Finished,
    Part,
    ReasoningDelta,
    ScoredToken,
    Started,
    TextDelta,
    TokenIds,
    ToolCallArguments,
    ToolCallStart,
)
from funitel.router.chat.run import PreparedChat, prepare_chat
from funitel.router.core import request_context
from funitel.router.core.request_context import drawn
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.service import Service
from funitel.router.transport.sse import EventStream, Put, run_until_disconnect
from funitel.router.transport.sse_frames import HOLE, Template

# What a chat calls otherwise than `SamplingRequest` and `ChatCall` do.
FIELDS = {
    "inputs": "messages",
    "top_n_tokens": "top_logprobs",
}
MIN_LOGPROB = -9999.0  # OpenAI's, for a token that could not be drawn


@generation_route
async def chat_completions(incoming: IncomingRequest) -> Response:
    """`/v1/chat/completions`: the answer to a chat, whole or streamed."""
    body = await incoming.read(ChatRequest)
    body.check()
    if incoming.service.settings.openai_errors:
        check_openai_bounds(body)
    if body.stream:
        chat = await _prepare(incoming.service, body, incoming.arrived)
        stream = partial(_stream, incoming.service, chat, body)
        return EventStream(stream, incoming.error_record, done=True, headers=chat.stream_headers)
    completion, headers = await run_until_disconnect(
        incoming.http.receive, _complete(incoming.service, body, incoming.arrived)
    )
    return json_answer(completion, headers)


async def _prepare(service: Service, body: ChatRequest, arrived: Arrival) -> PreparedChat:
    names = FIELDS | body.names
    chat = await prepare_chat(service, body.call, stream=bool(body.stream), arrived=arrived, names=names)
    body.messages = []  # images take megabytes, and a stream holds the body
    return chat


async def _complete(service: Service, body: ChatRequest, arrived: Arrival) -> tuple[ChatCompletion, dict[str, str]]:
    chat = await _prepare(service, body, arrived)
    answers, headers = await chat.run()
    choices = [_choice(index, answer, body) for index, answer in enumerate(answers)]
    completion = ChatCompletion(
        **_head(service, body), choices=choices, usage=_usage([answer.finished for answer in answers])
    )
    if body.timings and chat.timings is not None:
        completion.timings = chat.timings.told()
    if body.return_token_ids:
        completion.prompt_token_ids = chat.prompt_ids
    if body.prompt_logprobs is not None:  # long prompts have many: other requests go on meanwhile
        completion.prompt_logprobs = await asyncio.to_thread(prompt_logprobs, chat.first, body.prompt_logprobs)
    return completion, headers


def _choice(index: int, answer: ChatAnswer, body: ChatRequest) -> ChatChoice:
    calls = [_tool_call(call) for call in answer.tool_calls]
    reasoning = None if body.include_reasoning is False else answer.reasoning or None
    message = AnswerMessage(
        content=None if calls and not answer.text else answer.text,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=None if body.answers_functions else calls or None,
        function_call=calls[0].function if calls and body.answers_functions else None,
    )
    return ChatChoice(
        index=index,
        message=message,
        logprobs=_logprobs(body, answer.tokens),
        finish_reason=_finish_reason(answer.finished, body),
        token_ids=answer.token_ids if body.return_token_ids else None,
    )


def _tool_call(call: ToolCall) -> AnsweredToolCall:
    return AnsweredToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


async def _stream(service: Service, chat: PreparedChat, body: ChatRequest, put: Put) -> None:
    """A chunk with the role, chunks of text and one that says why it ended, for each choice; if asked, a count."""
    head = _head(service, body)
    more: dict[tuple[int, type[Part]], Template] = {}  # chunks of nothing but text, by choice and what it is
    bare: dict[int, Template] = {}  # the same of the answer's text, by choice, where no chunk has a count
    ends = []
    prompt_ids = chat.prompt_ids if body.return_token_ids else None  # in the first chunk
    held: dict[int, list[int]] = {}  # tokens that no chunk had yet, by choice

    def take(index: int, part: Part) -> None:
        nonlocal prompt_ids
        template = bare.get(index)
        if template is not None and isinstance(part, TextDelta):  # nearly all of them
            put(template.fill_all(part.text))
            return
        if isinstance(part, TokenIds):
            held.setdefault(index, []).extend(part.ids)
            return
        if isinstance(part, ReasoningDelta) and body.include_reasoning is False:
            return
        usage = _usage_so_far(chat, index, part) if body.continuous_usage else None
        if isinstance(part, _TEXTS) and not body.logprobs and not body.return_token_ids:
            key = index, type(part)
            if key not in more:
                choice = _chunk_choice(index, type(part)(HOLE), body)
                count = None if usage is None else HOLE
                more[key] = Template(ChatCompletionChunk.model_construct(**head, choices=[choice], usage=count))
                if usage is None and isinstance(part, TextDelta):
                    bare[index] = more[key]
            put(more[key].fill_all(part.text) if usage is None else more[key].fill_before(part.text, usage))
            return
        choice = _chunk_choice(index, part, body)
        choice.token_ids = held.pop(index, None)
        put(ChatCompletionChunk(**head, choices=[choice], usage=usage, prompt_token_ids=prompt_ids))
        prompt_ids = None
        if isinstance(part, Finished):
            ends.append(part)

    timings = await chat.stream(take)
    if body.include_usage or body.timings:
        usage = _usage(ends) if body.include_usage else None
        put(ChatCompletionChunk(**head, choices=[], usage=usage, timings=timings.told() if body.timings else None))


_TEXTS = (TextDelta, ReasoningDelta)


def _chunk_choice(index: int, part: Part, body: ChatRequest) -> ChunkChoice:
    match part:
        case Started():  # what may become nothing but calls has no content yet
            return ChunkChoice(
                index=index, delta=Delta(role="assistant", content=None if body.tools or body.functions else "")
            )
        case TextDelta():
            return ChunkChoice(index=index, delta=Delta(content=part.text), logprobs=_logprobs(body, part.tokens))
        case ReasoningDelta():
            return ChunkChoice(index=index, delta=Delta(reasoning_content=part.text, reasoning=part.text))
        case ToolCallStart():
            function = FunctionDelta(name=part.name, arguments="")
            if body.answers_functions:
                return ChunkChoice(index=index, delta=Delta(function_call=function))
            call = ToolCallDelta(index=part.index, id=part.id, type="function", function=function)
            return ChunkChoice(index=index, delta=Delta(tool_calls=[call]))
        case ToolCallArguments():
            more = FunctionDelta(arguments=part.delta)
            if body.answers_functions:
                return ChunkChoice(index=index, delta=Delta(function_call=more))
            call = ToolCallDelta(index=part.index, function=more)
            return ChunkChoice(index=index, delta=Delta(tool_calls=[call]))
        case Finished():
            return ChunkChoice(index=index, delta=Delta(), finish_reason=_finish_reason(part, body))
        case TokenIds():
            raise AssertionError("tokens are held for the next part")


def _finish_reason(finished: Finished, body: ChatRequest) -> str:
    match finished.reason:
        case EndReason.LENGTH:
            return "length"
        case EndReason.ABORT:
            return "abort"
        case EndReason.TOOL_CALLS:
            return "function_call" if body.answers_functions else "tool_calls"
        case _:
            return "stop"


def _head(service: Service, body: ChatRequest) -> dict[str, Any]:
    """What an answer, or each of its chunks, begins with."""
    head: dict[str, Any] = drawn(
        "beginning",
        lambda: {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.shown_model(body.model),
            "system_fingerprint": f"{service.version}-native",
            "service_tier": "default" if body.service_tier else None,
        },
    )
    request_context.current().name_answer(head["id"], head["model"])
    return head


def _usage_so_far(chat: PreparedChat, index: int, part: Part) -> Usage:
    """Tokens of one choice up to a part; its role comes before them."""
    usage = chat.usage(index)
    return _total([replace(usage, completion_tokens=0) if isinstance(part, Started) else usage])


def _usage(ends: Sequence[Finished]) -> Usage:
    return _total([end.usage for end in ends])


def _total(usages: Sequence[ChatUsage]) -> Usage:
    prompt = usages[0].prompt_tokens
    completion = sum(usage.completion_tokens for usage in usages)
    least = min(usages, key=lambda usage: usage.cached_tokens)
    tiers = CachedByTier.of(least.cached_by_tier)
    reasoning = sum(usage.reasoning_tokens for usage in usages)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=least.cached_tokens, cached_tokens_by_tier=tiers),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
    )


def _logprobs(body: ChatRequest, tokens: Sequence[ScoredToken]) -> Logprobs | None:
    if not body.logprobs:
        return None
    return Logprobs(
        content=[
            ContentLogprob(**_fields(token), top_logprobs=[TokenLogprob(**_fields(top)) for top in token.top])
            for token in tokens
        ]
    )


def _fields(token: ScoredToken) -> dict[str, Any]:
    """A token's record; what cannot be drawn has OpenAI's least log-probability, for JSON has no infinity."""
    return {"token": token.text, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": list(token.text.encode())}
