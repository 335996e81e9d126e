"""From checked bodies to answers: what the native routes and OpenAI's do alike."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import Incomplete
from funitel.proto.step import GeneratedText, Generation
from funitel.router.schema import GenerateParameters
from funitel.router.sequence import Request
from funitel.router.service import Service
from funitel.router.stream import Timings, TokenStream
from funitel.router.validation import build_request, check_parameters

Handler = Callable[[HttpRequest], Awaitable[Response]]


def service_of(request: HttpRequest) -> Service:
    """The service of the application that got the request."""
    return cast(Service, request.app.state.service)


def generation_route(handler: Handler) -> Handler:
    """Count the requests of a handler, and those that fail before their answer begins."""

    async def counted(request: HttpRequest) -> Response:
        metrics = service_of(request).metrics
        metrics.count_request()
        with metrics.counting_failures():
            return await handler(request)

    return counted


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from, and how it enters the model."""

    text: str
    add_special_tokens: bool = True


@dataclass(slots=True)
class Job:
    """A request on its way to the engine; `arrived` and `validated` are instants of the monotonic clock."""

    service: Service
    request: Request
    arrived: float
    validated: float = field(default_factory=time.monotonic)

    @property
    def validation_seconds(self) -> float:
        """Arrival until queued."""
        return self.validated - self.arrived

    async def generations(self, stream: TokenStream) -> AsyncGenerator[Generation, None]:
        """Yield what a stream brings, and measure it."""
        metrics = self.service.metrics
        previous: float | None = None
        async for generation in stream:
            now = time.monotonic()
            if previous is None:
                metrics.observe_first_token(now - stream.timings.submitted)
            else:
                metrics.observe_next_token(now - previous)
            previous = now
            metrics.observe_generation(generation)
            yield generation

    def succeeded(self, timings: Timings, num_tokens: int) -> None:
        """Note that the whole answer was computed."""
        self.service.metrics.observe_success(self.validation_seconds, timings, num_tokens)


async def prepare(
    service: Service,
    parameters: GenerateParameters,
    prompt: Prompt,
    *,
    stream: bool,
    arrived: float,
    presence_penalty: float = 0.0,
    count_penalty: float = 0.0,
) -> Job:
    """Check a request, tokenize its prompt and check its lengths.

    Raises:
        NotReady: the shards do not answer yet.
        InvalidRequest: it breaks a rule.
    """
    limits = service.engine.limits
    check_parameters(parameters, prompt.text, limits, service.settings, stream=stream)
    encoding = await service.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
    request = build_request(
        parameters,
        prompt.text,
        encoding.ids,
        limits,
        add_special_tokens=prompt.add_special_tokens,
        presence_penalty=presence_penalty,
        count_penalty=count_penalty,
    )
    service.metrics.observe_prompt(len(request.input_ids), request.stopping.max_new_tokens)
    return Job(service, request, arrived)


@dataclass(slots=True)
class Answer:
    """One finished sequence, whole."""

    generations: list[Generation]
    finished: GeneratedText
    timings: Timings

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens."""
        logprobs = [logprob for generation in self.generations for logprob in generation.tokens.logprobs]
        return sum(logprobs) / max(len(logprobs), 1)


async def collect(job: Job, stream: TokenStream) -> Answer:
    """Run a stream to its end.

    Raises:
        Incomplete: it ended without saying how.
    """
    generations = []
    async for generation in job.generations(stream):
        generations.append(generation)
        if generation.finished is not None:
            return Answer(generations, generation.finished, stream.timings)
    raise Incomplete("the stream ended without its last token")


def stream_headers(job: Job) -> dict[str, str]:
    """Response headers of a streamed answer."""
    return {
        "x-compute-type": job.service.engine.compute_type,
        "x-compute-characters": str(len(job.request.inputs)),
    }


def answer_headers(job: Job, answer: Answer) -> dict[str, str]:
    """Response headers of a whole answer, by TGI's definitions; times in milliseconds unless said."""
    queue = answer.timings.queue_seconds
    inference = answer.timings.inference_seconds
    total = job.validation_seconds + queue + inference
    num_tokens = answer.finished.num_tokens
    return stream_headers(job) | {
        "x-compute-time": f"{total:.6f}",  # seconds
        "x-total-time": _milliseconds(total),
        "x-validation-time": _milliseconds(job.validation_seconds),
        "x-queue-time": _milliseconds(queue),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(num_tokens, 1)),
        "x-prompt-tokens": str(len(job.request.input_ids)),
        "x-generated-tokens": str(num_tokens),
    }


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))
