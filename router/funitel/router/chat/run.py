"""Run a chat: check it, render it, generate its choices and stream their parts."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from funitel.proto.errors import InvalidRequest, ToolError
from funitel.proto.step import Generation
from funitel.router.chat.answer import ChatAnswer
from funitel.router.chat.call import ChatCall
from funitel.router.chat.choice import Choice
from funitel.router.chat.parts import ChatUsage, Part
from funitel.router.chat.prompt import ChatPrompt, render_prompt
from funitel.router.core import request_context
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.media import num_repeated
from funitel.router.serving.prepare import NO_NAMES, GenerationJob, Prompt, check_prompt_scores, prepare
from funitel.router.serving.run import (
    Answer,
    answer_headers,
    collect_all,
    completed,
    stream_all,
    stream_headers,
    summed_headers,
    timings_of,
)
from funitel.router.serving.service import Service
from funitel.router.serving.timings import AnswerTimings

_TOOL_GRAMMAR = "tools.parameters"  # the field at fault where a grammar made of tools cannot be kept


@dataclass(slots=True)
class PreparedChat:
    """A chat that was checked and waits to run. Run it once, either way."""

    call: ChatCall
    prompt: ChatPrompt
    jobs: list[GenerationJob]
    first: Generation | None = None  # the first of a whole answer, with the scores of the prompt if they were wanted
    timings: AnswerTimings | None = None  # of a whole answer
    choices: list[Choice] = field(default_factory=list)  # of a stream, once it runs

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return list(self.jobs[0].request.input_ids)

    @property
    def stream_headers(self) -> dict[str, str]:
        """Response headers of a streamed answer."""
        return stream_headers(*self.jobs)

    async def stream(self, take: Callable[[int, Part], None]) -> AnswerTimings:
        """Generate every choice side by side; give `take` their parts as they come, with the index of their choice.

        Leaving early cancels all. An error that ends one choice, or one of `take`, ends all and is raised.
        """
        choices = self.choices = [self._choice(job, index) for index, job in enumerate(self.jobs)]

        def feed(index: int, generation: Generation) -> None:
            for part in choices[index].feed(generation):
                take(index, part)

        return await stream_all(self.jobs, feed)

    def usage(self, index: int) -> ChatUsage:
        """Tokens of one choice of a stream, so far."""
        return self.choices[index].usage

    async def run(self) -> tuple[list[ChatAnswer], dict[str, str]]:
        """Generate every choice; return them in order, and the response headers."""
        answers = await collect_all(self.jobs)
        self.first = answers[0].generations[0]
        self.timings = timings_of(self.jobs, answers)
        each = [
            (job, found) for job, answer in zip(self.jobs, answers, strict=True) for found in completed(job, answer)
        ]
        whole = [_assembled(self._choice(job, index), answer) for index, (job, answer) in enumerate(each)]
        if len(self.jobs) == 1:
            return whole, answer_headers(self.jobs[0], answers[0])
        return whole, summed_headers(self.jobs, answers)

    def _choice(self, job: GenerationJob, index: int) -> Choice:
        call = self.call
        return Choice(
            job,
            self.prompt,
            index,
            top_logprobs=call.sampling.top_n_tokens,
            parallel_calls=call.allows_several_calls,
            wants_token_ids=call.wants_token_ids,
        )


def _assembled(choice: Choice, answer: Answer) -> ChatAnswer:
    return ChatAnswer.of(part for generation in answer.generations for part in choice.feed(generation))


async def prepare_chat(
    service: Service, call: ChatCall, *, stream: bool, arrived: Arrival, names: Mapping[str, str] = NO_NAMES
) -> PreparedChat:
    """Render and tokenize a conversation and check what is asked of it.

    Args:
        service: the router's.
        call: the conversation and what is asked.
        stream: whether `parts` will be used rather than `run`.
        arrived: when the request came, its key and its deadline.
        names: the API's names of fields that it calls otherwise than `SamplingRequest` and `ChatCall` do; for errors.

    Raises:
        NotReady: the shards do not answer yet.
        InvalidRequest: a value breaks a rule.
        ToolError: tools are asked for that are not there, or together with a grammar that is no JSON schema.
        TemplateError: the model has no template, or it refused the messages.
    """
    check_count(call.n, service)
    prompt = await render_prompt(service, call, names)
    sampling = replace(call.sampling, grammar=prompt.grammar)
    text = Prompt(prompt.text, call.add_special_tokens, plain=prompt.plain, media=prompt.media)
    field = names.get("grammar", "grammar")
    if prompt.tools:  # a grammar is made of their schemas
        names = {**names, "grammar": _TOOL_GRAMMAR}
    try:
        job = await prepare(service, sampling, text, stream=stream, arrived=arrived, names=names)
    except InvalidRequest as error:
        if error.param != _TOOL_GRAMMAR:
            raise
        if call.grammar is not None:  # raises if the response format is at fault
            await service.grammars.check(call.grammar, field)
        message = re.sub(r"/\$defs/tool\d+", "", error.message)  # references as the client wrote them
        raise ToolError(f"the `parameters` of `tools`: {message}", "tools") from error
    request_context.current().operation = "chat"
    jobs = job.siblings(call.n)
    check_prompt_scores(jobs, "prompt_logprobs")
    # Images take megabytes, and are not needed any more: the request has what was made of them.
    return PreparedChat(replace(call, messages=()), replace(prompt, media=()), jobs)


def check_count(n: int, service: Service) -> None:
    """Raise InvalidRequest for more sequences than can ever run at once."""
    max_n = service.settings.max_concurrent_requests
    if not 0 < n <= max_n:
        raise InvalidRequest(f"`n` must be > 0 and <= {max_n}. Given: {n}", "n")


async def count_prompt_tokens(service: Service, call: ChatCall, names: Mapping[str, str]) -> int:
    """Return how many tokens the prompt of a conversation has; raises as `prepare_chat` does."""
    prompt = await render_prompt(service, call, names)
    field = names.get("inputs", "inputs")
    return await service.tokenizer.count(prompt.text, field, plain=prompt.plain) + num_repeated(prompt.media)
