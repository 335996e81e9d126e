"""Run the sequences of one HTTP request side by side, and count them as one.

The generations of a step are taken where the engine delivers them, without waking a task for each stream.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from funitel.proto.errors import FunitelError, Overloaded
from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens
from funitel.proto.takeover.state import OutputStep
from funitel.router.auth.accounts import TokenCounts, charged
from funitel.router.core import request_context
from funitel.router.core.beam_group import BeamEnding
from funitel.router.core.beam_texts import completions_of
from funitel.router.core.journal import RequestJournal
from funitel.router.core.request import Request
from funitel.router.core.stream import Event, Listener, Timings, TokenStream, total_by_tier
from funitel.router.serving.prepare import GenerationJob
from funitel.router.serving.round_robin import RoundRobin
from funitel.router.serving.running import ActiveRequest
from funitel.router.serving.service import Service
from funitel.router.serving.timings import AnswerTimings

Take = Callable[[int, Generation], None]  # is given the place of a job, and what one step brought for it


# Streamed answers


async def stream_all(jobs: Sequence[GenerationJob], take: Take) -> AnswerTimings:
    """Run jobs side by side to their ends; what they generate is given to `take`, as it comes. Return their timings.

    They count as one request: as a success when every job has finished, as aborted when one was, else as a failure, of
    which the caller counts nothing. Leaving early cancels all, and so does the failure of one job, or of `take`, which
    is raised.

    Raises:
        Overloaded: they do not all fit in; none runs.
    """
    with jobs[0].service.metrics.counting_failures():
        endings = await run_all(jobs, take)
    life = spanning([timings for _, timings in endings])
    return AnswerTimings.of(jobs[0].validation_seconds, life, sum(finished.num_tokens for finished, _ in endings))


async def run_all(jobs: Sequence[GenerationJob], take: Take) -> list[tuple[GeneratedText, Timings]]:
    """Run jobs side by side and count them as one request; return how each ended, and its life.

    What they generate is given to `take`, as it comes. Raises: as `collect_all`.
    """
    async with _submitted(jobs) as streams:
        run = _Run(jobs, streams, take)
        try:
            await run.ended
        finally:
            _record(jobs, streams, run.endings)
    endings = [run.endings[place] for place in range(len(jobs))]
    timings = [stream.timings for stream in streams]
    if any(ending.finish_reason is FinishReason.ABORT for ending in endings):
        jobs[0].service.metrics.count_aborted()
    else:
        jobs[0].succeeded(spanning(timings), sum(ending.num_tokens for ending in endings))
    return list(zip(endings, timings, strict=True))


class _Run:
    """Jobs while they run: `ended` is done once all have, or one has failed."""

    def __init__(self, jobs: Sequence[GenerationJob], streams: Sequence[TokenStream], take: Take) -> None:
        """Listen to the streams from now on; raises what `take` does, where there is something of an earlier router."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.endings: dict[int, GeneratedText] = {}  # by place
        self._jobs = jobs
        self._take = take
        self._journal = request_context.current().journal  # events come outside of the request's context
        self._num_jobs = len(jobs)
        self._give: Take = self._give_on
        if self._journal.key and len(jobs) > 1:
            self._give = RoundRobin(len(jobs), self._give_on).put
        self._take_recorded(jobs, streams)
        for place, (job, stream) in enumerate(zip(jobs, streams, strict=True)):
            receive = self._listener(place, job, stream)
            end = self._aborted_after(job)
            if end is not None:
                receive = _aborted_again(job, stream, receive, end)
                if stream.has_ended:  # its outputs say otherwise
                    receive(_abort(job, end), time.monotonic())
            stream.listen(receive)

    def _aborted_after(self, job: GenerationJob) -> int | None:
        """The tokens after which an earlier router has aborted the sequence of a job; None where none has."""
        name = _aborted(job)
        return self._journal.draw(name, lambda: 0) if self._journal.knows(name) else None

    def _take_recorded(self, jobs: Sequence[GenerationJob], streams: Sequence[TokenStream]) -> None:
        """Take what an earlier router has got; its latencies were observed there."""
        now = time.monotonic()
        for place, (job, stream) in enumerate(zip(jobs, streams, strict=True)):
            for each in _first_tokens(stream.take_recorded(), self._aborted_after(job)):
                if job.latest_token is None:
                    self._note_cached(job, stream)
                job.latest_token = now
                self._give(place, each.generation)

    def _note_cached(self, job: GenerationJob, stream: TokenStream) -> None:
        """Note the cached tokens of a prompt with the first token: a fact, which also says that there was one."""
        job.num_cached_tokens, job.cached_by_tier = self._journal.draw(
            _cached_fact(job.request),
            lambda: (stream.num_cached_tokens, dict(stream.cached_by_tier)),
        )

    def _listener(self, place: int, job: GenerationJob, stream: TokenStream) -> Listener:
        """Make what takes the events of one job: counts tokens, and observes their latency.

        A closure: with a thousand streams each object that a token touches has left the processor's caches.
        """
        metrics, give, ended, note_cached = job.service.metrics, self._give, self.ended, self._note_cached
        journal = self._journal

        def receive(event: Event, now: float) -> None:
            if ended.done():
                return
            if isinstance(event, FunitelError):
                ended.set_exception(event)
                return
            try:
                num_tokens, latest = len(event.tokens.ids), job.latest_token
                job.latest_token = now
                if not num_tokens:
                    journal.draw(_aborted(job), lambda: stream.num_tokens)
                elif latest is not None:
                    metrics.observe_next_token(now - latest, num_tokens)
                else:
                    note_cached(job, stream)
                    metrics.observe_first_token(now - stream.timings.submitted, num_tokens)
                give(place, event)
            except Exception as error:  # fails this request alone: the engine goes on
                ended.set_exception(error)

        return receive

    def _give_on(self, place: int, generation: Generation) -> None:
        """Give a generation on, in its turn."""
        self._jobs[place].num_tokens += len(generation.tokens.ids)
        self._take(place, generation)
        if generation.finished is not None:
            self._finish(place, generation.finished)

    def _finish(self, place: int, ending: GeneratedText) -> None:
        self.endings[place] = ending
        if len(self.endings) == self._num_jobs:
            self.ended.set_result(None)


def _cached_fact(request: Request) -> str:
    return f"cached.{request.output_key}"


def _aborted(job: GenerationJob) -> str:
    """The fact that the sequence of a job was aborted: after how many tokens."""
    return f"aborted.{job.request.output_key}"


def _abort(job: GenerationJob, num_tokens: int) -> Generation:
    """The end of a sequence that is aborted after so many tokens."""
    sampling = job.request.sampling
    seed = sampling.seed if sampling.is_sampled else None
    return Generation(0, Tokens((), (), ()), finished=GeneratedText("", num_tokens, FinishReason.ABORT, seed))


def _aborted_again(job: GenerationJob, stream: TokenStream, receive: Listener, end: int) -> Listener:
    """Make what takes the events of a sequence that an earlier router has aborted after `end` tokens."""
    loop = asyncio.get_running_loop()
    if stream.num_tokens >= end:
        loop.call_soon(stream.stop)

    def receive_until_end(event: Event, now: float) -> None:
        if isinstance(event, Generation) and stream.num_tokens - len(event.tokens.ids) >= end:
            if event.finished is None:
                return
            event = _abort(job, end)
        receive(event, now)
        if stream.num_tokens >= end:
            loop.call_soon(stream.stop)

    return receive_until_end


def _first_tokens(recorded: list[OutputStep], end: int | None) -> list[OutputStep]:
    """The generations with the first `end` tokens of a sequence; all if None."""
    if end is None:
        return recorded
    found = []
    for each in recorded:
        if end <= 0:
            break
        end -= len(each.generation.tokens.ids)
        found.append(each)
    return found


def _record(
    jobs: Sequence[GenerationJob], streams: Sequence[TokenStream], endings: Mapping[int, GeneratedText]
) -> None:
    """Record what became of jobs that have ended, or are about to be."""
    context = request_context.current()
    firsts = {id(job.request.input_ids): job for job in jobs}.values()  # siblings share a prompt
    context.num_choices = sum(job.num_answers for job in jobs)
    context.prompt_tokens = sum(len(job.request.input_ids) for job in firsts)
    context.cached_tokens = sum(job.num_cached_tokens for job in firsts)
    context.cached_by_tier = total_by_tier([job.cached_by_tier for job in firsts])
    context.tokens = sum(stream.num_tokens for stream in streams)
    context.finish_reasons = [endings[place].openai_reason for place in sorted(endings)]
    context.validation_seconds = jobs[0].validation_seconds
    context.timings = spanning([stream.timings for stream in streams])


@asynccontextmanager
async def _submitted(jobs: Sequence[GenerationJob]) -> AsyncIterator[list[TokenStream]]:
    """Queue all jobs or none; what still runs at the end of the block is cancelled."""
    streams: list[TokenStream] = []
    account, model = jobs[0].arrived.account, jobs[0].service.model_id
    journal = request_context.current().journal
    paying = charged(
        *(account, model, lambda: _max_tokens(jobs), lambda: _used_tokens(jobs, streams)),
        journal=journal,
    )
    async with paying:
        for job in jobs:
            job.arrived.consume_reservation()
        journal.flush()  # what the prompts depend on, before shards keep outputs for them
        async with AsyncExitStack() as stack:
            for job in jobs:
                job.request = _kept(job.request, journal)
                streams.append(await stack.enter_async_context(job.service.engine.submit(job.request)))
            jobs[0].arrived.submitted.set()
            try:
                with _listed(jobs[0], streams):
                    yield streams
            finally:
                if keys := [job.request.output_key for job in jobs if job.request.output_key]:
                    journal.when_done(partial(jobs[0].service.engine.release_outputs, keys))


def _kept(request: Request, journal: RequestJournal) -> Request:
    """The request with the key of its outputs, and with what became of it under an earlier router."""
    key = journal.output_key()
    if not key:
        return request
    kept = replace(request, output_key=key, is_replayed=journal.is_replayed)
    return replace(kept, was_begun=journal.knows(_cached_fact(kept))) if journal.is_replayed else kept


def _listed(job: GenerationJob, streams: Sequence[TokenStream]) -> AbstractContextManager[None]:
    """List the HTTP request of some streams among those that run, as long as the block lasts."""
    service, account = job.service, job.arrived.account
    owner = b"" if account is None else account.owner
    request = ActiveRequest(request_context.current(), owner, streams, service.engine.paused)
    return service.running.entered(request)


def _max_tokens(jobs: Sequence[GenerationJob]) -> TokenCounts:
    most = sum(job.num_answers * job.request.stopping.max_new_tokens for job in jobs)
    return TokenCounts(_prompt_tokens(jobs), most)


def _used_tokens(jobs: Sequence[GenerationJob], streams: Sequence[TokenStream]) -> TokenCounts:
    """What was computed for jobs, some of which may not have been queued: prompts that were begun, and completions."""
    begun = [job for job, stream in zip(jobs, streams, strict=False) if stream.timings.started is not None]
    return TokenCounts(_prompt_tokens(begun), sum(job.num_tokens for job in jobs))


def _prompt_tokens(jobs: Sequence[GenerationJob]) -> int:
    """Siblings share the object that their prompt is, and count once."""
    return sum(len(ids) for ids in {id(job.request.input_ids): job.request.input_ids for job in jobs}.values())


def spanning(timings: Sequence[Timings]) -> Timings:
    """One life made of several: from the first to begin until the last to end."""
    if len(timings) == 1:
        return timings[0]
    return Timings(
        submitted=min(each.submitted for each in timings),
        started=min((each.started for each in timings if each.started is not None), default=None),
        first_token=min((each.first_token for each in timings if each.first_token is not None), default=None),
        latest=max((each.latest for each in timings if each.latest is not None), default=None),
        finished=max((each.finished for each in timings if each.finished is not None), default=None),
    )


# Whole answers


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


async def collect_all(jobs: Sequence[GenerationJob]) -> list[Answer]:
    """Run jobs side by side to their ends; return their answers in the same order.

    They count as one request that succeeded, or was aborted. Leaving early, or the failure of one, cancels all.

    Raises:
        Overloaded: they do not all fit in; none runs.
    """
    generations: list[list[Generation]] = [[] for _ in jobs]
    endings = await run_all(jobs, lambda place, generation: generations[place].append(generation))
    return [
        Answer(each, _whole(each, finished), timings)
        for each, (finished, timings) in zip(generations, endings, strict=True)
    ]


def _whole(generations: Sequence[Generation], finished: GeneratedText) -> GeneratedText:
    """How a sequence ended, with its text; that of an aborted one is made here, of its tokens."""
    if finished.finish_reason is not FinishReason.ABORT:
        return finished
    text = "".join(
        text
        for tokens in (generation.tokens for generation in generations)
        for text, is_special in zip(tokens.texts, tokens.is_special or (False,) * len(tokens.ids), strict=True)
        if not is_special
    )
    return replace(finished, text=text)


async def collect_best(jobs: Sequence[GenerationJob], best_of: Sequence[int]) -> list[list[Answer]]:
    """Run so many siblings of each job, all side by side; return each job's answers, likeliest first.

    Raises: as `collect_all`.
    """
    siblings = [job.siblings(n) for job, n in zip(jobs, best_of, strict=True)]
    answers = iter(await collect_all([each for group in siblings for each in group]))
    groups = [list(islice(answers, len(group))) for group in siblings]
    return [
        completed(job, group[0])
        if len(group) == 1
        else sorted(group, key=lambda answer: answer.mean_logprob, reverse=True)
        for job, group in zip(jobs, groups, strict=True)
    ]


def completed(job: GenerationJob, answer: Answer) -> list[Answer]:
    """The answers in what a job brought: several, best first, where it searched beams."""
    ending = answer.generations[-1]
    if not isinstance(ending, BeamEnding):
        return [answer]
    codec = job.service.tokenizer.codec
    answers = []
    for generations in completions_of(ending, job.request, codec):
        finished = generations[-1].finished
        assert finished is not None, "the last generation says how it ended"
        answers.append(Answer(generations, finished, answer.timings))
    return answers


def check_count(service: Service, field: str, best_of: Sequence[int]) -> None:
    """Raise Overloaded, as TGI does, for so many prompts, and sequences of each, that they could never run at once.

    To be asked before any prompt is tokenized. A `best_of` that is too large by itself is refused for that, later.
    """
    settings = service.settings
    limit, count = settings.max_concurrent_requests, sum(min(each, settings.max_best_of) for each in best_of)
    if count > limit:
        raise Overloaded(f": `{field}` times `best_of` must be <= {limit}. Given: {count}")


# Response headers


def stream_headers(*jobs: GenerationJob) -> dict[str, str]:
    """Response headers of a streamed answer made by one job or several."""
    service = jobs[0].service
    return {
        "x-compute-type": service.settings.compute_type or service.engine.compute_type,
        "x-compute-characters": str(sum(len(request.inputs) for request in _distinct(jobs))),
    }


def answer_headers(job: GenerationJob, answer: Answer) -> dict[str, str]:
    """Response headers of a whole answer that one job gave, by TGI's definitions."""
    total = job.validation_seconds + answer.timings.queue_seconds + answer.timings.inference_seconds
    return {"x-compute-time": f"{total:.6f}"} | summed_headers([job], [answer])  # the one time in seconds


def summed_headers(jobs: Sequence[GenerationJob], answers: Sequence[Answer]) -> dict[str, str]:
    """Response headers of a whole answer made by several jobs: times in milliseconds and counts, summed over answers.

    The prompt of siblings counts once.
    """
    validation = sum(job.validation_seconds for job in jobs)
    queue = sum(answer.timings.queue_seconds for answer in answers)
    inference = sum(answer.timings.inference_seconds for answer in answers)
    num_tokens = sum(answer.finished.num_tokens for answer in answers)
    timings = timings_of(jobs, answers)
    first = {}
    if timings.time_to_first_token_seconds is not None:
        first = {
            "x-time-to-first-token": _milliseconds(timings.time_to_first_token_seconds),
            "x-tokens-per-second": f"{timings.tokens_per_second:.3f}",
        }
    return stream_headers(*jobs) | {
        "x-total-time": _milliseconds(validation + queue + inference),
        "x-validation-time": _milliseconds(validation),
        "x-queue-time": _milliseconds(queue),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(num_tokens, 1)),
        "x-prompt-tokens": str(sum(len(request.input_ids) for request in _distinct(jobs))),
        "x-generated-tokens": str(num_tokens),
        **first,
    }


def timings_of(jobs: Sequence[GenerationJob], answers: Sequence[Answer]) -> AnswerTimings:
    """The timings of a whole answer made by several jobs."""
    life = spanning([answer.timings for answer in answers])
    num_tokens = sum(answer.finished.num_tokens for answer in answers)
    return AnswerTimings.of(jobs[0].validation_seconds, life, num_tokens)


def _distinct(jobs: Sequence[GenerationJob]) -> list[Request]:
    """One request for each prompt; siblings share theirs."""
    return list({id(job.request.input_ids): job.request for job in jobs}.values())


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))
