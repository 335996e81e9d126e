"""`LLM.beam_search`: the likeliest completions of prompts, several at once, in vLLM's words."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import tokenizers

from funitel.llm.prompts import EncodedPrompt, numbered, room_for
from funitel.llm.sampling import is_int
from funitel.proto.errors import FunitelError, Incomplete, InvalidRequest
from funitel.proto.step import SamplingParams, StoppingParams
from funitel.router.core.beam_group import BeamEnding
from funitel.router.core.beam_search import BeamParams, EarlyStopping, Hypothesis
from funitel.router.core.request import Adapter, Limits, Request
from funitel.router.engine.engine import Engine
from funitel.router.serving.beam_request import MAX_LENGTH_PENALTY, needed_blocks, searched
from funitel.router.text.tokenizer import TokenCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are searched.

    Attributes:
        beam_width: beams of each prompt, and completions that are returned.
        max_tokens: maximum of tokens in a completion.
        ignore_eos: whether beams go on after the model's end token.
        temperature: only 0 here: the log-probabilities are the model's own.
        length_penalty: a completion's score is the sum of its log-probabilities over its length to this power.
        early_stopping: True ends the search once there are `beam_width` completions; False where the best beam is no
            better than the worst of them; "never" where it could not become better either.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        """Check the values; raises InvalidRequest, which names the parameter."""
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            _require(is_int(value, 1), name, f"must be an integer >= 1, given {value!r}")
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", f"must be a bool, given {self.ignore_eos!r}")
        _require(self.temperature == 0, "temperature", f"must be 0 in a beam search, given {self.temperature!r}")
        penalty = self.length_penalty
        _require(
            isinstance(penalty, int | float) and isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY,
            "length_penalty",
            f"must be a number from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, given {penalty!r}",
        )
        early = self.early_stopping
        _require(
            isinstance(early, bool) or early == "never",
            "early_stopping",
            f"must be True, False or 'never', given {early!r}",
        )


def _require(condition: bool, name: str, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"{name} {rule}", name)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One completion of a prompt.

    Attributes:
        tokens: those of the prompt and of the completion.
        text: the same as text, special tokens included.
        cum_logprob: sum of the log-probabilities of the completion's tokens.
        logprobs: those of each of its tokens.
        score: `cum_logprob` over the length to the power of the length penalty; by it completions are ordered.
        finish_reason: `stop` at the model's end of text, `length` at `max_tokens` or the context's end.
    """

    tokens: tuple[int, ...]
    text: str
    cum_logprob: float
    logprobs: tuple[float, ...]
    score: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The completions of a prompt, best first."""

    sequences: tuple[BeamSearchSequence, ...]


def beam_requests(
    prompts: Sequence[EncodedPrompt], params: BeamSearchParams, limits: Limits, adapter: Adapter | None = None
) -> list[Request]:
    """Make the request of each prompt, with an adapter if one is given.

    Raises:
        InvalidRequest: a prompt leaves no room, the beams never fit, or the model has none.
    """
    if params.beam_width > limits.max_beams:
        most = limits.max_beams
        rule = f"must be <= {most}, given {params.beam_width}" if most else "is not supported by this model"
        raise InvalidRequest(f"beam_width {rule}", "beam_width")
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            max_new_tokens = room_for(prompt, params.max_tokens, limits)
            size = limits.block_size
            needed = needed_blocks(len(prompt.ids), max_new_tokens, params.beam_width, size) * size
            if needed > limits.pool_tokens:
                raise InvalidRequest(
                    f"beam_width {params.beam_width} needs {needed} tokens of the KV pool, which has "
                    f"{limits.pool_tokens}",
                    "beam_width",
                )
        except FunitelError as error:
            raise numbered("prompt", index, error) from error
        request = Request(
            input_ids=prompt.ids,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=max_new_tokens, ignore_eos=params.ignore_eos),
            adapter=adapter,
        )
        beams = BeamParams(
            width=params.beam_width,
            num_returned=params.beam_width,
            max_new_tokens=max_new_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_ids=frozenset() if params.ignore_eos else limits.eos_token_ids,
        )
        requests.append(searched(request, beams))
    return requests


async def search_beams(
    engine: Engine, requests: Sequence[Request], tokenizer: tokenizers.Tokenizer
) -> list[BeamSearchOutput]:
    """Run the searches side by side; a failure or cancellation cancels all of them.

    Raises:
        FunitelError: the first failure, with the index of its prompt.
    """
    await engine.health()
    codec = TokenCodec(tokenizer)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_search(engine, index, each, codec)) for index, each in enumerate(requests)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _search(engine: Engine, index: int, request: Request, codec: TokenCodec) -> BeamSearchOutput:
    try:
        async with engine.submit(request) as stream:
            ending = await stream.last()
    except FunitelError as error:
        raise numbered("prompt", index, error) from None
    if not isinstance(ending, BeamEnding):
        raise Incomplete("the stream ended without the end of its beam search")
    return BeamSearchOutput(tuple(_sequence(each, request, codec) for each in ending.hypotheses))


def _sequence(hypothesis: Hypothesis, request: Request, codec: TokenCodec) -> BeamSearchSequence:
    tokens = (*request.input_ids, *hypothesis.ids)
    return BeamSearchSequence(
        tokens,
        codec.decode(tokens),
        sum(hypothesis.logprobs),
        hypothesis.logprobs,
        hypothesis.score,
        hypothesis.finish_reason.openai,
    )
