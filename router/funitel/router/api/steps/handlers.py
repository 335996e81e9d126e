"""Handle `/v1/steps`: queries that advance a step at a time, in which the client chooses every token.

A key has queries of its own; without keys all clients share them. A step is computed, and charged to the key, as a
request with the tokens known so far as its prompt and one token as its answer.
"""

import math
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest, NotFound, Overloaded
from funitel.router.api.common.body import json_answer, query_of
from funitel.router.api.common.handler import IncomingRequest, generation_route, models_of, reading_route
from funitel.router.api.native.schema import NAMES, GenerateParameters, GenerateRequest
from funitel.router.api.steps.schema import (
    AddedQuery,
    Candidate,
    CommitRequest,
    CommittedTokens,
    InferredToken,
    InferredTokens,
    InferRequest,
    ModelQuery,
    RemovedQuery,
)
from funitel.router.core import request_context
from funitel.router.middleware.auth import tenant_of
from funitel.router.middleware.operation import ModelUse
from funitel.router.serving.inline_images import inline_prompt
from funitel.router.serving.prepare import GenerationJob, prepare
from funitel.router.serving.run import collect_all
from funitel.router.serving.step_queries import PlannedQuery, QueryResult, StepSession, StepSessions
from funitel.router.transport.sse import run_until_disconnect

_OF_ANSWERS = ("use_beam_search", "return_full_text", "details", "decoder_input_details", "timings")


@reading_route
async def add(incoming: IncomingRequest) -> Response:
    """`POST /v1/steps/queries`: add a query; nothing is computed yet."""
    body = await incoming.read(GenerateRequest)
    parameters = body.effective_parameters
    _check(parameters)
    prompt = await inline_prompt(incoming.service, body.inputs)
    job = await prepare(
        incoming.service, parameters.sampling, prompt, stream=False, arrived=incoming.arrived, names=NAMES
    )
    session = _session(incoming.http, incoming.service.model_id)
    query_id = session.queries.add(job.request)
    if not query_id:
        most = session.queries.max_queries
        raise Overloaded(f": at most {most} queries of a key at once. Remove one first", reason="queries")
    return json_answer(AddedQuery(id=query_id, prompt_tokens=len(job.request.input_ids)))


@generation_route
async def infer(incoming: IncomingRequest) -> Response:
    """`POST /v1/steps/infer`: compute one step of the queries."""
    body, session = await incoming.read(InferRequest), _session(incoming.http, incoming.service.model_id)
    results = await run_until_disconnect(incoming.http.receive, _step(incoming, session, body.ids))
    return json_answer(InferredTokens(data=[_record(result) for result in results]))


@reading_route
async def commit(incoming: IncomingRequest) -> Response:
    """`POST /v1/steps/commit`: go on with the tokens that the client chose."""
    body, session = await incoming.read(CommitRequest), _session(incoming.http, incoming.service.model_id)
    tokens = {each.id: (each.token_id, each.is_end) for each in body.tokens}
    if len(tokens) < len(body.tokens):
        raise InvalidRequest("`tokens` must have at most one token of a query", "tokens")
    async with session.lock:
        session.queries.commit(tokens, incoming.service.tokenizer.num_tokens)
    return json_answer(CommittedTokens(committed=len(tokens), queries=len(session.queries)))


async def remove(http: HttpRequest) -> Response:
    """`DELETE /v1/steps/queries/{query_id}`: remove a query."""
    given = http.path_params["query_id"]
    query_id = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    model = models_of(http).choose(query_of(http, ModelQuery).model, ModelUse.GENERATES)
    name = model.name if model.service is None else model.service.model_id
    if not _session(http, name).queries.remove(query_id):
        raise NotFound(f"there is no query {given!r}")
    return json_answer(RemovedQuery(id=query_id))


def _session(http: HttpRequest, model: str) -> StepSession:
    """The queries of a key with a model."""
    sessions: StepSessions = http.app.state.steps
    return sessions.of(tenant_of(http.scope), model)


def _check(parameters: GenerateParameters) -> None:
    """Raise InvalidRequest for what only a whole answer has."""
    field = next((field for field in _OF_ANSWERS if getattr(parameters, field)), None)
    if field is None and parameters.best_of not in (None, 1):
        field = "best_of"
    if field is not None:
        raise InvalidRequest(f"`{field}` is not for a query", f"parameters.{field}")


async def _step(incoming: IncomingRequest, session: StepSession, ids: list[int] | None) -> list[QueryResult]:
    async with session.lock:
        planned = session.queries.plan(ids)
        if not planned:
            return []
        answers = await collect_all([_job(incoming, each) for each in planned])
        return session.queries.settle(planned, [answer.generations[0] for answer in answers])


def _job(incoming: IncomingRequest, planned: PlannedQuery) -> GenerationJob:
    arrived = incoming.arrived
    request = replace(
        planned.request,
        priority=arrived.priority,
        deadline=arrived.deadline,
        request_id=request_context.current().request_id,
    )
    return GenerationJob(incoming.service, request, arrived)


def _record(result: QueryResult) -> InferredToken:
    return InferredToken(
        id=result.query_id,
        token_id=result.token_id,
        text=result.text,
        logprob=_finite(result.logprob),
        candidates=[
            Candidate(token_id=token_id, text=text, logprob=_finite(logprob))
            for token_id, text, logprob in result.candidates
        ],
        is_end=result.is_end,
    )


def _finite(logprob: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return logprob if math.isfinite(logprob) else None
