"""Handle OpenAI's `/v1/completions`: texts that continue prompts, whole or streamed."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.responses import Response

from funitel.proto.errors import BatchSizeExceeded, InvalidRequest
from funitel.proto.step import Generation
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import IncomingRequest, generation_route
from funitel.router.api.common.schema_base import CachedByTier
from funitel.router.api.openai.completion_text import Addition, CompletionText, joined
from funitel.router.api.openai.openai_bounds import check_openai_bounds
from funitel.router.api.openai.prompt_scores import prompt_logprobs
from funitel.router.api.openai.schema_answers import PromptTokensDetails, Usage
from funitel.router.api.openai.schema_completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionRequest,
    GivenPrompt,
)
from funitel.router.core import request_context
from funitel.router.core.request_context import drawn
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.prepare import GenerationJob, Prompt, check_prompt_scores, prepare
from funitel.router.serving.run import (
    Answer,
    collect_all,
    completed,
    stream_all,
    stream_headers,
    summed_headers,
    timings_of,
)
from funitel.router.serving.sampling_request import U64_RANGE, SamplingRequest
from funitel.router.serving.service import Service
from funitel.router.transport.sse import EventStream, Put, run_until_disconnect
from funitel.router.transport.sse_frames import HOLE, Template

# What a completion calls otherwise than `SamplingRequest` does.
FIELDS = {"inputs": "prompt", "top_n_tokens": "logprobs"}


@generation_route
async def completions(incoming: IncomingRequest) -> Response:
    """`/v1/completions`: the texts that go on from one prompt or several."""
    body = await incoming.read(CompletionRequest)
    if incoming.service.settings.openai_errors:
        check_openai_bounds(body)
    if body.stream:
        batch = await _prepare(incoming.service, body, incoming.arrived)
        return EventStream(
            partial(_stream, batch), incoming.error_record, done=True, headers=stream_headers(*batch.jobs)
        )
    completion, headers = await run_until_disconnect(
        incoming.http.receive, _complete(incoming.service, body, incoming.arrived)
    )
    return json_answer(completion, headers)


@dataclass(frozen=True, slots=True)
class _Ids:
    """That tokens are wanted; those of the prompt, where they belong."""

    prompt: list[int] | None


@dataclass(slots=True)
class _Batch:
    """The sequences of a request: those of the first prompt, then those of the second."""

    service: Service
    body: CompletionRequest
    jobs: list[GenerationJob]
    each: int  # jobs of one prompt

    @property
    def head(self) -> dict[str, Any]:
        """What an answer, or each of its chunks, begins with."""
        head: dict[str, Any] = drawn(
            "beginning",
            lambda: {
                "id": f"cmpl-{uuid.uuid4().hex}",
                "created": int(time.time()),
                "model": self.service.shown_model(self.body.model),
                "system_fingerprint": f"{self.service.version}-native",
            },
        )
        request_context.current().name_answer(head["id"], head["model"])
        return head

    def given_ids(self, job: GenerationJob, *, is_first: bool = True) -> _Ids | None:
        """The tokens of the prompt, in the first chunk of a choice; None where no tokens are wanted."""
        if not self.body.return_token_ids:
            return None
        return _Ids(list(job.request.input_ids) if is_first else None)

    def text(self, job: GenerationJob) -> CompletionText:
        """Makes the text of one sequence."""
        body = self.body
        return CompletionText(
            job.request.stopping.stop_sequences,
            echo=job.request.inputs if body.echo else None,
            num_top=body.logprobs,
            is_prompt_only=body.max_tokens == 0,
            shows_special=job.request.shows_special,
            shows_stop=job.request.shows_stop,
        )

    def usage(self, num_tokens: int) -> Usage:
        """Tokens of all prompts, each counted once, and of all completions."""
        return self._usage(self.jobs[:: self.each], num_tokens)

    def usage_so_far(self, index: int) -> Usage:
        """Tokens of the prompt of one sequence, and of its completion so far."""
        job = self.jobs[index]
        return self._usage([job], job.num_tokens)

    def _usage(self, firsts: Sequence[GenerationJob], num_tokens: int) -> Usage:
        prompt = sum(len(job.request.input_ids) for job in firsts)
        completion = 0 if self.body.max_tokens == 0 else num_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(job.num_cached_tokens for job in firsts),
                cached_tokens_by_tier=CachedByTier.of(*(job.cached_by_tier for job in firsts)),
            ),
        )


async def _prepare(service: Service, body: CompletionRequest, arrived: Arrival) -> _Batch:
    body.check(service.settings.max_best_of)
    prompts, each = body.prompts, body.num_sequences
    _check_count(service, len(prompts), each)
    jobs = []
    for place, prompt in enumerate(prompts):
        max_tokens = 1 if body.max_tokens == 0 else body.max_tokens  # a shard gives one token at least
        sampling = body.sampling(max_tokens=max_tokens, top_logprobs=body.logprobs)
        if each > (body.n or 1):  # the likeliest are chosen by them
            sampling = replace(sampling, raw_logprobs=True)
        if body.seed is not None:  # the sequences of a request have the seeds that follow its own
            sampling = replace(sampling, seed=(body.seed + place * each) % U64_RANGE)
        job = await _job(service, body, sampling, prompt, arrived)
        jobs += job.siblings(each)
    check_prompt_scores(jobs, "logprobs" if body.prompt_logprobs is None else "prompt_logprobs")
    return _Batch(service, body, jobs, len(jobs) // len(prompts))


def _check_count(service: Service, num_prompts: int, each: int) -> None:
    settings = service.settings
    if num_prompts > settings.max_client_batch_size:
        raise BatchSizeExceeded(
            f"`prompt` may hold at most {settings.max_client_batch_size} prompts. Given: {num_prompts}", "prompt"
        )
    if num_prompts * each > settings.max_concurrent_requests:
        raise InvalidRequest(
            f"`n` times the number of prompts must be <= {settings.max_concurrent_requests}. "
            f"Given: {num_prompts * each}",
            "n",
        )


async def _job(
    service: Service, body: CompletionRequest, sampling: SamplingRequest, prompt: GivenPrompt, arrived: Arrival
) -> GenerationJob:
    text = prompt.text
    if prompt.ids is not None:
        _check_ids(prompt.ids, service.tokenizer.num_tokens)
        text = await service.tokenizer.decode(prompt.ids)
    given = Prompt(text, add_special_tokens=body.add_special_tokens is not False, ids=prompt.ids)
    job = await prepare(service, sampling, given, stream=bool(body.stream), arrived=arrived, names=FIELDS | body.names)
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        job.request = replace(job.request, prefill_logprobs=True, prompt_logprobs=wanted)
    return job


def _check_ids(ids: Sequence[int], num_tokens: int) -> None:
    unknown = next((token_id for token_id in ids if token_id >= num_tokens), None)
    if unknown is not None:
        raise InvalidRequest(f"`prompt` names tokens by id, >= 0 and < {num_tokens}. Given: {unknown}", "prompt")


# Whole


async def _complete(service: Service, body: CompletionRequest, arrived: Arrival) -> tuple[Completion, dict[str, str]]:
    batch = await _prepare(service, body, arrived)
    answers = await collect_all(batch.jobs)
    usage = batch.usage(sum(answer.finished.num_tokens for answer in answers))
    best = _best(batch, answers)
    if (body.echo and body.logprobs is not None) or body.prompt_logprobs is not None:
        choices = await asyncio.to_thread(_choices, batch, best)  # long prompts have many: others go on meanwhile
    else:
        choices = _choices(batch, best)
    timings = timings_of(batch.jobs, answers).told() if body.timings else None
    completion = Completion(**batch.head, choices=choices, usage=usage, timings=timings)
    return completion, summed_headers(batch.jobs, answers)


def _best(batch: _Batch, answers: Sequence[Answer]) -> list[tuple[GenerationJob, Answer]]:
    """For each prompt its `n` answers, likeliest first where there are more to choose from."""
    each, n = batch.each, batch.body.n or 1
    pairs = list(zip(batch.jobs, answers, strict=True))
    groups = [pairs[start : start + each] for start in range(0, len(pairs), each)]
    if each > n:
        groups = [sorted(group, key=lambda pair: pair[1].mean_logprob, reverse=True)[:n] for group in groups]
    return [(job, completion) for group in groups for job, answer in group for completion in completed(job, answer)]


def _choices(batch: _Batch, best: Sequence[tuple[GenerationJob, Answer]]) -> list[CompletionChoice]:
    choices = [
        _choice(index, _text(batch, job, answer), batch.given_ids(job)) for index, (job, answer) in enumerate(best)
    ]
    if batch.body.prompt_logprobs is not None:
        for choice, (_, answer) in zip(choices, best, strict=True):
            choice.prompt_logprobs = prompt_logprobs(answer.generations[0], batch.body.prompt_logprobs)
    return choices


def _text(batch: _Batch, job: GenerationJob, answer: Answer) -> Addition:
    text = batch.text(job)
    return joined([text.feed(generation) for generation in answer.generations])


def _choice(index: int, addition: Addition, ids: _Ids | None = None) -> CompletionChoice:
    """One choice of an answer or of a chunk; `ids` where those of the tokens are wanted."""
    reason = None if addition.finished is None else addition.finished.openai_reason
    return CompletionChoice(
        index=index,
        text=addition.text,
        logprobs=addition.logprobs,
        finish_reason=reason,
        prompt_token_ids=ids.prompt if ids else None,
        token_ids=list(addition.token_ids) if ids else None,
    )


# Streamed


async def _stream(batch: _Batch, put: Put) -> None:
    """For each sequence its text as it comes, and last why it ended; then, if asked, a count of tokens.

    As TGI does, the last chunk counts where a client does not say whether to.
    """
    head, is_continuous = batch.head, batch.body.continuous_usage
    texts = [batch.text(job) for job in batch.jobs]
    held = HOLE if is_continuous else None
    more = [  # chunks of nothing but text, one template for each sequence
        Template(CompletionChunk.model_construct(**head, choices=[_choice(index, Addition(HOLE, None))], usage=held))
        for index in range(len(texts))
    ]
    num_tokens, num_running = 0, len(batch.jobs)
    body, begun = batch.body, set[int]()

    def take(index: int, generation: Generation) -> None:
        nonlocal num_tokens, num_running
        addition = texts[index].feed(generation)
        if addition.finished is not None:
            num_tokens += addition.finished.num_tokens
            num_running -= 1
        elif addition.logprobs is None and not body.return_token_ids:
            if addition.text:
                text = addition.text
                so_far = batch.usage_so_far(index) if is_continuous else None
                put(more[index].fill_all(text) if so_far is None else more[index].fill_before(text, so_far))
            return
        elif not addition.text and not (addition.logprobs and addition.logprobs.tokens) and not body.return_token_ids:
            return
        counts = not num_running and batch.body.stream_options is None
        usage = batch.usage(num_tokens) if counts else batch.usage_so_far(index) if is_continuous else None
        ids = batch.given_ids(batch.jobs[index], is_first=index not in begun)
        begun.add(index)
        put(CompletionChunk(**head, choices=[_choice(index, addition, ids)], usage=usage))

    timings = await stream_all(batch.jobs, take)
    if body.include_usage or body.timings:
        count = batch.usage(num_tokens) if body.include_usage else None
        put(CompletionChunk(**head, choices=[], usage=count, timings=timings.told() if body.timings else None))
