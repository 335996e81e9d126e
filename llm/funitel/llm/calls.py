"""Run the sequences of one `generate` or `chat` call on the engine; results are in the order of the prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from funitel.llm.completions import CompletionBuilder
from funitel.llm.outputs import RequestMetrics, RequestOutput
from funitel.llm.progress import CompletionProgress
from funitel.llm.prompts import EncodedPrompt, numbered, room_for
from funitel.llm.sampling import SamplingParams
from funitel.proto.errors import FunitelError, Incomplete
from funitel.proto.step import StoppingParams
from funitel.router.core.request import Adapter, Limits, Request
from funitel.router.core.stream import TokenStream
from funitel.router.engine.engine import Engine
from funitel.router.serving.run import spanning


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A validated prompt with its parameters, and a request for each of its completions."""

    index: int
    prompt: EncodedPrompt
    params: SamplingParams
    requests: tuple[Request, ...]

    @classmethod
    def of(
        cls,
        index: int,
        prompt: EncodedPrompt,
        params: SamplingParams,
        limits: Limits,
        vocab_size: int,
        banned_tokens: tuple[tuple[int, ...], ...] = (),
        adapter: Adapter | None = None,
    ) -> Self:
        """Validate a prompt's length and its parameters against the vocabulary, and make its requests.

        Raises:
            InvalidRequest: the prompt leaves no room for a completion, or a parameter exceeds the vocabulary.
        """
        try:
            params.check_vocabulary(vocab_size)
            max_new_tokens = room_for(prompt, params.max_tokens, limits)
        except FunitelError as error:
            raise numbered("prompt", index, error) from error
        stopping = StoppingParams(
            max_new_tokens=max_new_tokens, stop_sequences=params.stops, ignore_eos=params.ignore_eos
        )
        requests = [
            Request(
                input_ids=prompt.ids,
                sampling=sampling,
                stopping=stopping,
                top_n_tokens=params.logprobs or 0,
                prefill_logprobs=params.prompt_logprobs is not None,
                prompt_logprobs=params.prompt_logprobs,
                adapter=adapter,
                speculate=0 if sampling.strategy else limits.max_speculate,  # no memory of a strategy is taken back
            )
            for sampling in params.for_engine(banned_tokens)
        ]
        return cls(index, prompt, params, tuple(requests))


async def run_jobs(engine: Engine, jobs: Sequence[CompletionJob], progress: CompletionProgress) -> list[RequestOutput]:
    """Run every sequence of every job concurrently; a failure or cancellation cancels all of them.

    Raises:
        FunitelError: the first failure, with the index of its prompt.
    """
    await engine.health()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run_job(engine, job, progress)) for job in jobs]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _run_job(engine: Engine, job: CompletionJob, progress: CompletionProgress) -> RequestOutput:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_complete(engine, job, index, progress)) for index in range(len(job.requests))]
    except BaseExceptionGroup as failures:
        error = failures.exceptions[0]
        raise (numbered("prompt", job.index, error) if isinstance(error, FunitelError) else error) from None
    return output_of(job, [task.result() for task in tasks])


def output_of(job: CompletionJob, completed: Sequence[tuple[CompletionBuilder, TokenStream]]) -> RequestOutput:
    """The whole output of a job that has ended."""
    streams = [stream for _, stream in completed]
    num_tokens = sum(builder.num_tokens for builder, _ in completed)
    return RequestOutput(
        job.prompt.text,
        job.prompt.ids,
        tuple(builder.output() for builder, _ in completed),
        metrics=RequestMetrics.of(spanning([stream.timings for stream in streams]), num_tokens),
        num_cached_tokens=min(stream.num_cached_tokens for stream in streams),
        prompt_logprobs=completed[0][0].prompt_logprobs,
    )


async def _complete(
    engine: Engine, job: CompletionJob, index: int, progress: CompletionProgress
) -> tuple[CompletionBuilder, TokenStream]:
    builder = CompletionBuilder(index, job.params)
    async with engine.submit(job.requests[index]) as stream:
        async for generation in stream:
            builder.feed(generation)
            progress.count(len(generation.tokens.ids), is_last=generation.finished is not None)
            if generation.finished is not None:
                return builder, stream
    raise Incomplete("the stream ended without its last token")
