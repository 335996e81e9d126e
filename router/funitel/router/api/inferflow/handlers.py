"""Handle Inferflow's native route, on a path of its own: `/` is TGI's."""

import time
from functools import partial

from starlette.responses import Response

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import Generation
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.errors import EMPTY_REQUEST, inferflow_error
from funitel.router.api.common.handler import IncomingRequest, generation_route
from funitel.router.api.inferflow.schema import NAMES, InferflowAnswer, InferflowRequest
from funitel.router.api.inferflow.template import written
from funitel.router.chat.call import ChatCall, ChatMessage
from funitel.router.chat.prompt import render_prompt
from funitel.router.chat.transcript import Transcript
from funitel.router.core import request_context
from funitel.router.serving.prepare import GenerationJob, Prompt, prepare
from funitel.router.serving.run import answer_headers, collect_all, stream_all, stream_headers
from funitel.router.serving.service import Service
from funitel.router.transport.sse import EventStream, Put, run_until_disconnect

MIN_PIECE_BYTES = 16


@generation_route
async def answer(incoming: IncomingRequest) -> Response:
    """`POST /inferflow`: the answer to a query, in pieces of 16 bytes or more, or whole."""
    body, service, arrived = await incoming.read(InferflowRequest), incoming.service, incoming.arrived
    prompt = await _prompt(service, body)
    job = await prepare(service, body.sampling, prompt, stream=body.is_streaming_mode, arrived=arrived, names=NAMES)
    if body.is_streaming_mode:
        return EventStream(partial(_events, job), inferflow_error, headers=stream_headers(job))
    [whole] = await run_until_disconnect(incoming.http.receive, collect_all([job]))
    cost = request_context.drawn("cost.1", lambda: _milliseconds(job))
    found = InferflowAnswer(text=whole.finished.text, time_cost=cost, is_end=True)
    return json_answer(found, answer_headers(job, whole))


async def _prompt(service: Service, body: InferflowRequest) -> Prompt:
    """The prompt, by the request's template or the model's.

    Raises:
        InvalidRequest: there is no query, a template is wrong, or the model has no chat template.
    """
    if not body.text:
        raise InvalidRequest("`text` cannot be empty", "text", EMPTY_REQUEST)
    fields = ("encoder_input_template", "decoder_input_template")
    given = [(field, template) for field in fields if (template := getattr(body, field)) is not None]
    if len(given) == 2:
        raise InvalidRequest("`encoder_input_template` and `decoder_input_template` exclude each other", fields[1])
    if given:
        [(field, template)] = given
        texts = {"query": body.text, "system_prompt": body.system_prompt, "res_prefix": body.res_prefix}
        most = service.payload_limit
        return written(template, texts, service.tokenizer, service.engine.limits.eos_token_ids, field, most)
    said = (("system", body.system_prompt), ("user", body.text), ("assistant", body.res_prefix))
    messages = tuple(ChatMessage(role=role, text=text) for role, text in said if text)
    chat = await render_prompt(service, ChatCall(messages=messages))
    return Prompt(chat.text, add_special_tokens=False, plain=chat.plain)


async def _events(job: GenerationJob, put: Put) -> None:
    transcript, waiting = Transcript((), keeps_tokens=False), ""
    journal = request_context.current().journal  # generations come outside of the request's context

    def take(_place: int, generation: Generation) -> None:
        nonlocal waiting
        finished = generation.finished
        waiting += transcript.feed(generation)
        if finished is not None or len(waiting.encode()) >= MIN_PIECE_BYTES:
            cost = journal.draw_next("cost", lambda: _milliseconds(job))
            put(InferflowAnswer(text=waiting, time_cost=cost, is_end=finished is not None))
            waiting = ""

    await stream_all([job], take)


def _milliseconds(job: GenerationJob) -> int:
    return round((time.monotonic() - job.arrived.at) * 1000)
