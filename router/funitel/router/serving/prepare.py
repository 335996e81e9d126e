"""From checked bodies to jobs for the engine: what the routes that generate do alike."""

import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import Generation
from funitel.router.api.common.body import receive_body
from funitel.router.api.native.schema import GenerateParameters
from funitel.router.api.native.schema_grammar import grammar_of
from funitel.router.core import request_context
from funitel.router.core.request import Request
from funitel.router.core.stream import Timings, TokenStream
from funitel.router.serving.admission_gate import Admits
from funitel.router.serving.arrival import ARRIVAL, Arrival
from funitel.router.serving.service import Service
from funitel.router.serving.validation import build_request, check_parameters, check_prompt_ids, check_token_ids
from funitel.router.text.grammar import Grammar
from funitel.router.transport.sse import EventStream

Handler = Callable[[HttpRequest], Awaitable[Response]]

_COUNTED = "funitel.counted"


def service_of(request: HttpRequest) -> Service:
    """The service of the application that got the request."""
    return cast(Service, request.app.state.service)


def counted_route(handler: Handler) -> Handler:
    """Count the requests of a handler, and those that fail before their answer begins.

    A request that one handler hands to another is counted once.
    """

    @wraps(handler)
    async def counted(request: HttpRequest) -> Response:
        if request.scope.get(_COUNTED):
            return await handler(request)
        request.scope[_COUNTED] = True
        metrics = service_of(request).metrics
        metrics.count_request()
        with metrics.counting_failures():
            return await handler(request)

    return counted


def generation_route(handler: Handler) -> Handler:
    """Ask the engine's admission about the requests of a handler, and count them."""

    async def admitted(request: HttpRequest) -> Response:
        return await _admitted(request, service_of(request).engine, handler)

    return counted_route(wraps(handler)(admitted))


def encoder_route(handler: Handler) -> Handler:
    """Ask the encoder's admission about the requests of a handler, and count them."""

    async def admitted(request: HttpRequest) -> Response:
        return await _admitted(request, service_of(request).encoder.engine, handler)

    return counted_route(wraps(handler)(admitted))


def reading_route(handler: Handler) -> Handler:
    """Bound the requests of a handler that only tokenizes."""

    @wraps(handler)
    async def admitted(request: HttpRequest) -> Response:
        return await _admitted(request, service_of(request).tokenize_limit, handler)

    return admitted


async def _admitted(request: HttpRequest, gate: Admits, handler: Handler) -> Response:
    """Ask admission before the body is read, and handle a request with a reservation that a stream keeps meanwhile.

    Raises:
        Overloaded: there is no room for it.
    """
    if ARRIVAL in request.scope:  # another handler has handed it on
        return await handler(request)
    arrived = Arrival.of(request)
    incoming = arrived.incoming
    gate.check_room(incoming)
    await receive_body(request, service_of(request).settings.payload_limit)
    reservation = gate.reserve(incoming)
    request.scope[ARRIVAL] = replace(arrived, reservation=reservation)
    with ExitStack() as held:
        held.callback(reservation.release)
        response = await handler(request)
        return _ReservedStream(response, held.pop_all()) if isinstance(response, EventStream) else response


class _ReservedStream(Response):
    """A stream whose request is submitted once it begins: until then, or its end, the reservation is held."""

    def __init__(self, stream: EventStream, held: ExitStack) -> None:
        self._stream = stream
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._stream(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from, and how it enters the model: its tokens if they are given, else those of its text."""

    text: str
    add_special_tokens: bool = True
    ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class GenerationJob:
    """A request on its way to the engine; `validated` is an instant of the monotonic clock."""

    service: Service
    request: Request
    arrived: Arrival
    validated: float = field(default_factory=time.monotonic)
    num_cached_tokens: int = 0  # of the prompt, known once its first token is there
    num_tokens: int = 0  # of the completion, seen so far
    latest_token: float | None = None  # when one was seen last, on the monotonic clock

    @property
    def validation_seconds(self) -> float:
        """Arrival until queued."""
        return self.validated - self.arrived.at

    def measure(self, stream: TokenStream, generation: Generation, now: float) -> None:
        """Note what its stream brought at an instant."""
        metrics, num_tokens = self.service.metrics, len(generation.tokens.ids)
        self.num_tokens += num_tokens
        if self.latest_token is None:
            self.num_cached_tokens = stream.num_cached_tokens
            metrics.observe_first_token(now - stream.timings.submitted, num_tokens)
        else:
            metrics.observe_next_token(now - self.latest_token, num_tokens)
        self.latest_token = now

    def succeeded(self, timings: Timings, num_tokens: int) -> None:
        """Note that the whole answer was computed."""
        self.service.metrics.observe_success(self.validation_seconds, timings, num_tokens)

    def siblings(self, count: int) -> list["GenerationJob"]:
        """This job and others like it, `count` in all; the i-th samples with the seed plus i, modulo 2**64."""
        sampling = self.request.sampling
        seeds = [(sampling.seed + place) % 2**64 for place in range(count)]
        return [replace(self, request=replace(self.request, sampling=replace(sampling, seed=seed))) for seed in seeds]


async def prepare(
    service: Service,
    parameters: GenerateParameters,
    prompt: Prompt,
    *,
    stream: bool,
    arrived: Arrival,
    presence_penalty: float = 0.0,
    count_penalty: float = 0.0,
    raw_logprobs: bool = False,
    grammar: Grammar | None = None,
) -> GenerationJob:
    """Check a request, tokenize its prompt and check its lengths.

    The penalties are OpenAI's; `raw_logprobs` are log-probabilities of the scores before any sampling parameter;
    `grammar` is for callers whose parameters hold none.

    Raises:
        NotReady: the shards do not answer yet.
        InvalidRequest: it breaks a rule.
    """
    limits = service.engine.limits
    check_parameters(parameters, prompt.text, limits, service.settings, stream=stream)
    check_token_ids(parameters, service.tokenizer.num_tokens)
    language = parameters.target_language
    first_token = None if language is None else service.tokenizer.languages.token(language)
    if parameters.grammar is not None:
        grammar = grammar_of(parameters.grammar)
    input_ids = prompt.ids
    if input_ids is None:
        input_ids = (await service.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)).ids
        check_prompt_ids(input_ids, service.tokenizer.num_tokens)
    request = build_request(
        parameters,
        prompt.text,
        input_ids,
        limits,
        add_special_tokens=prompt.add_special_tokens,
        presence_penalty=presence_penalty,
        count_penalty=count_penalty,
        raw_logprobs=raw_logprobs,
        grammar=grammar,
        first_token=first_token,
    )
    if grammar is not None:  # last, as TGI does, and the dearest
        await _check_grammar(service, grammar)
    service.metrics.observe_prompt(len(request.input_ids), request.stopping.max_new_tokens)
    priority = arrived.priority if parameters.priority is None else parameters.priority
    note = request_context.current()
    request = replace(request, key=arrived.key, priority=priority, deadline=arrived.deadline)
    request = replace(request, request_id=note.request_id, key_name=note.key_name)
    note.operation, note.request = "text_completion", note.request or request
    return GenerationJob(service, request, arrived)


async def _check_grammar(service: Service, grammar: Grammar) -> None:
    if service.settings.disable_grammar_support:
        raise InvalidRequest("grammar is not supported: --disable-grammar-support is set", "grammar")
    await service.grammars.check(grammar)
