"""OpenAI's routes: `/v1/chat/completions` and `/v1/models`."""

import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.step import GeneratedText, Generation, Tokens
from funitel.router.api.bodies import read_body
from funitel.router.api.errors import openai_error
from funitel.router.api.inference import (
    Job,
    Prompt,
    answer_headers,
    collect,
    generation_route,
    prepare,
    service_of,
    stream_headers,
)
from funitel.router.schema_openai import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ChunkChoice,
    ContentLogprob,
    Delta,
    Logprobs,
    Model,
    ModelList,
    TokenLogprob,
    Usage,
)
from funitel.router.service import Service
from funitel.router.sse import EventStream, run_until_disconnect
from funitel.router.stops import StopHoldback

LEAST_LOGPROB = -9999.0  # OpenAI's, for a token that could not be drawn
DEFAULT_MODEL = "tgi"  # what TGI's clients send when they name none


async def models(http: HttpRequest) -> Response:
    """`/v1/models`: the one model that is served."""
    name = service_of(http).model_id
    body = ModelList(data=[Model(id=name, owned_by=name)])
    return Response(body.model_dump_json(), media_type="application/json")


@generation_route
async def chat_completions(http: HttpRequest) -> Response:
    """`/v1/chat/completions`: the answer to a chat, whole or streamed."""
    arrived = time.monotonic()
    service = service_of(http)
    body = await read_body(http, ChatRequest, service.settings.payload_limit)
    body.refuse_unsupported()
    if body.stream:
        job = await _prepare(service, body, arrived)
        return EventStream(_events(job, body), openai_error, done=True, headers=stream_headers(job))
    completion, headers = await run_until_disconnect(http.receive, _complete(service, body, arrived))
    return Response(completion.model_dump_json(), headers=headers, media_type="application/json")


async def _prepare(service: Service, body: ChatRequest, arrived: float) -> Job:
    prompt = await service.tokenizer.chat_prompt([message.variables for message in body.messages])
    return await prepare(
        service,
        body.parameters(service.recommended),
        Prompt(prompt, add_special_tokens=False),
        stream=bool(body.stream),
        arrived=arrived,
        presence_penalty=body.presence_penalty or 0.0,
        count_penalty=body.frequency_penalty or 0.0,
    )


async def _complete(service: Service, body: ChatRequest, arrived: float) -> tuple[ChatCompletion, dict[str, str]]:
    job = await _prepare(service, body, arrived)
    async with service.engine.submit(job.request) as stream:
        answer = await collect(job, stream)
    job.succeeded(answer.timings, answer.finished.num_tokens)
    transcript = Transcript(job.request.stopping.stop_sequences, body)
    additions = [transcript.feed(generation) for generation in answer.generations]
    choice = ChatChoice(
        message=AnswerMessage(content="".join(addition.text for addition in additions)),
        logprobs=_logprobs(body, [entry for addition in additions for entry in addition.logprobs]),
        finish_reason=answer.finished.openai_reason,
    )
    completion = ChatCompletion(**_head(service, body), choices=[choice], usage=_usage(job, answer.finished))
    return completion, answer_headers(job, answer)


async def _events(job: Job, body: ChatRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
    """Chunks of text, the first with the role; one that says why it ended; if asked, one that counts."""
    head = _head(job.service, body)
    transcript = Transcript(job.request.stopping.stop_sequences, body)
    role: Literal["assistant"] | None = "assistant"
    with job.service.metrics.counting_failures():
        async with job.service.engine.submit(job.request) as stream:
            async for generation in job.generations(stream):
                addition = transcript.feed(generation)
                if role or addition.text or addition.logprobs:
                    delta = Delta(role=role, content=addition.text)
                    choice = ChunkChoice(delta=delta, logprobs=_logprobs(body, addition.logprobs))
                    yield ChatCompletionChunk(**head, choices=[choice])
                    role = None
                if generation.finished is not None:
                    job.succeeded(stream.timings, generation.finished.num_tokens)
                    for chunk in _last_chunks(job, body, head, generation.finished):
                        yield chunk


def _last_chunks(
    job: Job, body: ChatRequest, head: dict[str, Any], finished: GeneratedText
) -> Iterator[ChatCompletionChunk]:
    choice = ChunkChoice(delta=Delta(), finish_reason=finished.openai_reason)
    yield ChatCompletionChunk(**head, choices=[choice])
    if body.include_usage:
        yield ChatCompletionChunk(**head, choices=[], usage=_usage(job, finished))


def _head(service: Service, body: ChatRequest) -> dict[str, Any]:
    """What an answer, or each of its chunks, begins with."""
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": service.model_id if body.model in (None, "", DEFAULT_MODEL) else body.model,
        "system_fingerprint": f"{service.version}-native",
    }


def _usage(job: Job, finished: GeneratedText) -> Usage:
    prompt, completion = len(job.request.input_ids), finished.num_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _logprobs(body: ChatRequest, entries: list[ContentLogprob]) -> Logprobs | None:
    return Logprobs(content=entries) if body.logprobs else None


# Transcript


@dataclass(slots=True)
class Addition:
    """What one step adds to the text a client sees."""

    text: str
    logprobs: list[ContentLogprob]


class Transcript:
    """The text of one answer as the client sees it: no special tokens, and no part of the stop that ended it.

    Whole and streamed answers are both made of its additions, and so are equal.
    """

    def __init__(self, stop_sequences: Sequence[str], body: ChatRequest) -> None:
        self._holdback = StopHoldback(stop_sequences)
        self._num_top = body.top_logprobs or 0
        self._wants_logprobs = bool(body.logprobs)
        self._pending: deque[tuple[int, ContentLogprob]] = deque()  # where its text begins, token
        self._length = 0  # characters of the tokens fed so far

    def feed(self, generation: Generation) -> Addition:
        """Take what one step generated; return what can be shown now, with the tokens that begin in it."""
        text, finished = self._take(generation), generation.finished
        shown = self._holdback.feed(text) if finished is None else self._holdback.finish(finished)
        ready = []
        while self._pending and self._pending[0][0] < self._holdback.num_shown:
            ready.append(self._pending.popleft()[1])
        return Addition(shown, ready)

    def _take(self, generation: Generation) -> str:
        tokens = generation.tokens
        specials = tokens.is_special or (False,) * len(tokens.ids)
        pieces = []
        for place, (text, special) in enumerate(zip(tokens.texts, specials, strict=True)):
            if special:
                continue
            if self._wants_logprobs:
                self._pending.append((self._length, self._entry(generation, place)))
            self._length += len(text)
            pieces.append(text)
        return "".join(pieces)

    def _entry(self, generation: Generation, place: int) -> ContentLogprob:
        tokens = generation.tokens
        top = _token_logprobs(generation.top_tokens[place])[: self._num_top] if generation.top_tokens else []
        return ContentLogprob(**_fields(tokens.texts[place], tokens.logprobs[place]), top_logprobs=top)


def _token_logprobs(tokens: Tokens) -> list[TokenLogprob]:
    rows = zip(tokens.texts, tokens.logprobs, strict=True)
    return [TokenLogprob(**_fields(text, logprob)) for text, logprob in rows]


def _fields(text: str, logprob: float) -> dict[str, Any]:
    """A token's record; what cannot be drawn has OpenAI's least log-probability, for JSON has no infinity."""
    logprob = logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
