"""From checked bodies to answers: what the native routes and OpenAI's do alike."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import islice
from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto import tracing
from funitel.proto.errors import Incomplete, InvalidRequest, Overloaded
from funitel.proto.step import GeneratedText, Generation
from funitel.router.api.arrival import Arrival
from funitel.router.grammar import Grammar
from funitel.router.schema import GenerateParameters
from funitel.router.schema_grammar import grammar_of
from funitel.router.sequence import Request
from funitel.router.service import Service
from funitel.router.stream import Timings, TokenStream
from funitel.router.validation import build_request, check_parameters, check_token_ids

Handler = Callable[[HttpRequest], Awaitable[Response]]

_COUNTED = "funitel.counted"


def service_of(request: HttpRequest) -> Service:
    """The service of the application that got the request."""
    return cast(Service, request.app.state.service)


def generation_route(handler: Handler) -> Handler:
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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from, and how it enters the model: its tokens if they are given, else those of its text."""

    text: str
    add_special_tokens: bool = True
    ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class Job:
    """A request on its way to the engine; `arrived` and `validated` are instants of the monotonic clock."""

    service: Service
    request: Request
    arrived: float
    validated: float = field(default_factory=time.monotonic)
    num_cached_tokens: int = 0  # of the prompt, known once its first token is there
    latest_token: float | None = None  # when one was seen last, on the monotonic clock

    @property
    def validation_seconds(self) -> float:
        """Arrival until queued."""
        return self.validated - self.arrived

    def measure(self, stream: TokenStream, generation: Generation) -> None:
        """Note what its stream has just brought."""
        metrics = self.service.metrics
        now = time.monotonic()
        if self.latest_token is None:
            self.num_cached_tokens = stream.num_cached_tokens
            metrics.observe_first_token(now - stream.timings.submitted)
        else:
            metrics.observe_next_token(now - self.latest_token)
        self.latest_token = now
        metrics.observe_generation(generation)

    def succeeded(self, timings: Timings, num_tokens: int) -> None:
        """Note that the whole answer was computed."""
        self.service.metrics.observe_success(self.validation_seconds, timings, num_tokens)
        queue, inference = timings.queue_seconds, timings.inference_seconds
        tracing.annotate(
            total_time=self.validation_seconds + queue + inference,
            validation_time=self.validation_seconds,
            queue_time=queue,
            inference_time=inference,
            time_per_token=inference / max(num_tokens, 1),
            seed=str(self.request.sampling.seed),
        )

    def siblings(self, count: int) -> list["Job"]:
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
) -> Job:
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
    if parameters.grammar is not None:
        grammar = grammar_of(parameters.grammar)
    input_ids = prompt.ids
    if input_ids is None:
        input_ids = (await service.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)).ids
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
    )
    if grammar is not None:  # last, as TGI does, and the dearest
        await _check_grammar(service, grammar)
    service.metrics.observe_prompt(len(request.input_ids), request.stopping.max_new_tokens)
    priority = arrived.priority if parameters.priority is None else parameters.priority
    request = replace(request, key=arrived.key, priority=priority, deadline=arrived.deadline)
    return Job(service, request, arrived.at)


async def _check_grammar(service: Service, grammar: Grammar) -> None:
    if service.settings.disable_grammar_support:
        raise InvalidRequest("grammar is not supported: --disable-grammar-support is set", "grammar")
    await service.grammars.check(grammar)


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
    async for generation in stream:
        job.measure(stream, generation)
        generations.append(generation)
        if generation.finished is not None:
            return Answer(generations, generation.finished, stream.timings)
    raise Incomplete("the stream ended without its last token")


# Several sequences of one HTTP request


async def collect_all(jobs: Sequence[Job]) -> list[Answer]:
    """Run jobs side by side to their ends; return their answers in the same order.

    They count as one request that succeeded. Leaving early, or the failure of one, cancels all.

    Raises:
        Overloaded: they do not all fit in; none runs.
        Incomplete: one ended without saying how.
    """
    async with _submitted(jobs) as streams:
        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(jobs, streams, strict=True)
                tasks = [group.create_task(collect(job, stream)) for job, stream in pairs]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
    answers = [task.result() for task in tasks]
    _succeeded(jobs, streams, sum(answer.finished.num_tokens for answer in answers))
    return answers


def check_count(service: Service, field: str, best_of: Sequence[int]) -> None:
    """Raise Overloaded, as TGI does, for so many prompts, and sequences of each, that they could never run at once.

    To be asked before any prompt is tokenized. A `best_of` that is too large by itself is refused for that, later.
    """
    settings = service.settings
    most, count = settings.max_concurrent_requests, sum(min(each, settings.max_best_of) for each in best_of)
    if count > most:
        raise Overloaded(f": `{field}` times `best_of` must be <= {most}. Given: {count}")


async def collect_best(jobs: Sequence[Job], best_of: Sequence[int]) -> list[list[Answer]]:
    """Run so many siblings of each job, all side by side; return each job's answers, likeliest first.

    Raises: as `collect_all`.
    """
    answers = iter(await collect_all([each for job, n in zip(jobs, best_of, strict=True) for each in job.siblings(n)]))
    return [sorted(islice(answers, n), key=lambda answer: answer.mean_logprob, reverse=True) for n in best_of]


@asynccontextmanager
async def interleave(jobs: Sequence[Job]) -> AsyncIterator[AsyncIterator[tuple[int, Generation]]]:
    """Run jobs side by side and stream what they generate, as it comes, with the place of its job.

        async with interleave(jobs) as generations:
            async for index, generation in generations: ...

    They count as one request: as a success when every job has finished, else as a failure, of which the caller
    counts nothing. Leaving the block early, or the failure of one job, cancels all.

    Raises:
        Overloaded: they do not all fit in; none runs.
    """
    with jobs[0].service.metrics.counting_failures():
        async with _submitted(jobs) as streams, aclosing(_merged(jobs, streams)) as generations:
            yield generations


async def _merged(jobs: Sequence[Job], streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, Generation], None]:
    """What comes first is first; of what comes together, the earlier job's."""
    if len(jobs) == 1:  # the usual case, without a task for each token
        [job], [stream] = jobs, streams
        async for generation in stream:
            job.measure(stream, generation)
            if generation.finished is not None:
                _succeeded(jobs, streams, generation.finished.num_tokens)
            yield 0, generation
        return
    num_tokens = 0
    arriving = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
    try:
        while arriving:
            done, _ = await asyncio.wait(arriving, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=arriving.__getitem__):
                generation = task.result()
                place = arriving.pop(task)
                jobs[place].measure(streams[place], generation)
                if generation.finished is None:
                    arriving[asyncio.ensure_future(anext(streams[place]))] = place
                else:
                    num_tokens += generation.finished.num_tokens
                if not arriving:
                    _succeeded(jobs, streams, num_tokens)
                yield place, generation
    finally:
        for task in arriving:
            task.cancel()
        await asyncio.gather(*arriving, return_exceptions=True)


@asynccontextmanager
async def _submitted(jobs: Sequence[Job]) -> AsyncIterator[list[TokenStream]]:
    """Queue all jobs or none; what still runs at the end of the block is cancelled."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(job.service.engine.submit(job.request)) for job in jobs]


def _succeeded(jobs: Sequence[Job], streams: Sequence[TokenStream], num_tokens: int) -> None:
    """Note that one request got the answers of all its jobs: from the first step of any to the last of all."""
    timings = [stream.timings for stream in streams]
    jobs[0].succeeded(spanning(timings), num_tokens)


def spanning(timings: Sequence[Timings]) -> Timings:
    """One life made of several: from the first to begin until the last to end."""
    return Timings(
        submitted=min(each.submitted for each in timings),
        started=min((each.started for each in timings if each.started is not None), default=None),
        first_token=min((each.first_token for each in timings if each.first_token is not None), default=None),
        finished=max((each.finished for each in timings if each.finished is not None), default=None),
    )


# Headers


def stream_headers(*jobs: Job) -> dict[str, str]:
    """Response headers of a streamed answer made by one job or several."""
    service = jobs[0].service
    return {
        "x-compute-type": service.settings.compute_type or service.engine.compute_type,
        "x-compute-characters": str(sum(len(request.inputs) for request in _distinct(jobs))),
    }


def answer_headers(job: Job, answer: Answer) -> dict[str, str]:
    """Response headers of a whole answer that one job gave, by TGI's definitions."""
    total = job.validation_seconds + answer.timings.queue_seconds + answer.timings.inference_seconds
    return {"x-compute-time": f"{total:.6f}"} | summed_headers([job], [answer])  # the one time in seconds


def summed_headers(jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, str]:
    """Response headers of a whole answer made by several jobs: times in milliseconds and counts, summed over answers.

    The prompt of siblings counts once.
    """
    validation = sum(job.validation_seconds for job in jobs)
    queue = sum(answer.timings.queue_seconds for answer in answers)
    inference = sum(answer.timings.inference_seconds for answer in answers)
    num_tokens = sum(answer.finished.num_tokens for answer in answers)
    return stream_headers(*jobs) | {
        "x-total-time": _milliseconds(validation + queue + inference),
        "x-validation-time": _milliseconds(validation),
        "x-queue-time": _milliseconds(queue),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(num_tokens, 1)),
        "x-prompt-tokens": str(sum(len(request.input_ids) for request in _distinct(jobs))),
        "x-generated-tokens": str(num_tokens),
    }


def _distinct(jobs: Sequence[Job]) -> list[Request]:
    """One request for each prompt; siblings share theirs."""
    return list({id(job.request.input_ids): job.request for job in jobs}.values())


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))
