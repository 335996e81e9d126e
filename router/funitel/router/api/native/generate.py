"""Handle TGI's native routes `/generate` and `/generate_stream`, and the old form of `POST /`."""

from functools import partial
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import to_json
from starlette.responses import Response

from funitel.proto.step import Generation
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.errors import native_error
from funitel.router.api.common.handler import IncomingRequest, generation_route
from funitel.router.api.common.schema_base import CachedByTier
from funitel.router.api.native.schema import (
    NAMES,
    BestOfSequence,
    CompatGenerateRequest,
    Details,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamResponse,
    Token,
    ending,
    top_token_lists,
)
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.inline_images import inline_prompt
from funitel.router.serving.prepare import GenerationJob, prepare
from funitel.router.serving.run import Answer, answer_headers, collect_best, stream_all, stream_headers, timings_of
from funitel.router.serving.service import Service
from funitel.router.serving.timings import AnswerTimings
from funitel.router.transport.sse import EventStream, Put, run_until_disconnect
from funitel.router.transport.sse_frames import HOLE, Template, text_json

_ANSWER_LIST = TypeAdapter(list[GenerateResponse], config=ConfigDict(defer_build=True))


# Handlers


@generation_route
async def compat_generate(incoming: IncomingRequest) -> Response:
    """`POST /`: streams when asked, else an array of one answer; the prompt begins it by default."""
    body = await incoming.read(CompatGenerateRequest)
    parameters = body.effective_parameters
    if parameters.return_full_text is None:  # TGI's default, for a model of unknown purpose too
        is_plain = incoming.service.facts.pipeline_tag in (None, "text-generation")
        parameters = parameters.model_copy(update={"return_full_text": is_plain})
    if body.stream:
        return await _stream(incoming.service, parameters, body.inputs, incoming.arrived)
    work = _answer(incoming.service, parameters, body.inputs, incoming.arrived)
    answer, headers = await run_until_disconnect(incoming.http.receive, work)
    return Response(_ANSWER_LIST.dump_json([answer]), headers=headers, media_type="application/json")


@generation_route
async def generate(incoming: IncomingRequest) -> Response:
    """`/generate`: the whole completion."""
    body = await incoming.read(GenerateRequest)
    work = _answer(incoming.service, body.effective_parameters, body.inputs, incoming.arrived)
    answer, headers = await run_until_disconnect(incoming.http.receive, work)
    return json_answer(answer, headers)


@generation_route
async def generate_stream(incoming: IncomingRequest) -> Response:
    """`/generate_stream`: the completion token by token."""
    body = await incoming.read(GenerateRequest)
    return await _stream(incoming.service, body.effective_parameters, body.inputs, incoming.arrived)


# Whole answers


async def _answer(
    service: Service, parameters: GenerateParameters, inputs: str, arrived: Arrival
) -> tuple[GenerateResponse, dict[str, str]]:
    prompt = await inline_prompt(service, inputs)
    job = await prepare(service, parameters.sampling, prompt, stream=False, arrived=arrived, names=NAMES)
    [[best, *others]] = await collect_best([job], [parameters.best_of or 1])
    prefix = job.request.inputs if parameters.return_full_text else ""
    timings = timings_of([job], [best, *others]).told() if parameters.timings else None
    response = GenerateResponse(
        generated_text=prefix + best.finished.text,
        details=_details(best, others, prefix, timings, job) if parameters.wants_details else None,
    )
    return response, answer_headers(job, best)


def _details(
    best: Answer, others: list[Answer], prefix: str, timings: AnswerTimings | None, job: GenerationJob
) -> Details:
    sequences = [
        BestOfSequence(**_details_of(answer), generated_text=prefix + answer.finished.text) for answer in others
    ]
    return Details(**_details_of(best), best_of_sequences=sequences or None, timings=timings, **_cached(job))


def _cached(job: GenerationJob) -> dict[str, Any]:
    """Cached tokens of a prompt, where there are several tiers."""
    tiers = CachedByTier.of(job.cached_by_tier)
    return {"cached_tokens": None if tiers is None else job.num_cached_tokens, "cached_tokens_by_tier": tiers}


def _details_of(answer: Answer) -> dict[str, Any]:
    """What the best sequence and the others say alike."""
    generations = answer.generations
    prefill = next((g.prefill_tokens for g in generations if g.prefill_tokens is not None), None)
    return {
        **ending(answer.finished),
        "prefill": [] if prefill is None else PrefillToken.list_of(prefill),
        "tokens": [token for generation in generations for token in Token.list_of(generation.tokens)],
        "top_tokens": top_token_lists([top for generation in generations for top in generation.top_tokens]),
    }


# Streamed answers


async def _stream(service: Service, parameters: GenerateParameters, inputs: str, arrived: Arrival) -> EventStream:
    prompt = await inline_prompt(service, inputs)
    job = await prepare(service, parameters.sampling, prompt, stream=True, arrived=arrived, names=NAMES)
    return EventStream(partial(_events, job, parameters), native_error, headers=stream_headers(job))


async def _events(job: GenerationJob, parameters: GenerateParameters, put: Put) -> None:
    index = 0
    last: StreamResponse | None = None  # held until the timings are known

    def take(_place: int, generation: Generation) -> None:
        nonlocal index, last
        if generation.finished is None and not generation.top_tokens:
            for id, text, logprob, special in Token.rows_of(generation.tokens):
                index += 1
                rendered = b"%d" % index, b"%d" % id, text_json(text), to_json(logprob), _JSON[special]
                put(_TOKEN.insert(*rendered))
            return
        for event in _events_of(generation, index, parameters, job):
            index = event.index
            if parameters.timings and event.details is not None:
                last = event
            else:
                put(event)

    timings = await stream_all([job], take)
    if last is not None and last.details is not None:
        last.details.timings = timings.told()
        put(last)


# One token and nothing else.
_TOKEN = Template(
    StreamResponse.model_construct(
        index=HOLE,
        token=Token.model_construct(id=HOLE, text=HOLE, logprob=HOLE, special=HOLE),
        generated_text=None,
        details=None,
    )
)
_JSON = {False: b"false", True: b"true"}


def _events_of(
    generation: Generation, index: int, parameters: GenerateParameters, job: GenerationJob
) -> list[StreamResponse]:
    """One event for each token; the last token of a sequence carries how it ended."""
    top_tokens = top_token_lists(generation.top_tokens)
    tokens = Token.list_of(generation.tokens) or [Token(id=0, text="", logprob=None, special=True)]  # of an abort
    events = [
        StreamResponse(
            index=index + 1 + place,
            token=token,
            top_tokens=top_tokens[place] if top_tokens else None,
            generated_text=None,
            details=None,
        )
        for place, token in enumerate(tokens)
    ]
    finished = generation.finished
    if finished is not None:
        last = events[-1]
        last.generated_text = (job.request.inputs if parameters.return_full_text else "") + finished.text
        if parameters.details or parameters.timings:
            last.details = StreamDetails(**ending(finished), input_length=len(job.request.input_ids), **_cached(job))
    return events
