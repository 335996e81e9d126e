"""Sample tokens and log-probabilities from logits, batched, in TGI's order of logits processors.

The order: watermark, logit bias, penalties, grammar, timestamps, temperature, top-k, top-p, min-p, typical-p;
`strategies` say where their stages come. Log-probabilities are those after all of it, or of the model's own scores
where `raw_logprobs` asks for them.

Noise is a function of (seed, position, token id) alone, so a seeded sequence draws the same tokens whatever shares its
batch, and after being resumed elsewhere. Runs on rank 0 only.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.gumbel_noise import noise_key
from funitel.model_server.sampling.logits_processors import (
    LogitsProcessors,
    TorchLogitsProcessors,
    are_broken,
    logprobs_of,
)
from funitel.model_server.sampling.strategy import StrategyState, begin_all, narrow_all
from funitel.model_server.sampling.transcript_rules import prefer_timestamps
from funitel.proto.step import SamplingParams

HASH_KEY = 15485863


@dataclass(frozen=True, slots=True)
class Watermark:
    """Favours a part of the vocabulary at each step, picked by the last token.

    Source: Kirchenbauer et al., "A Watermark for Large Language Models" (arXiv 2301.10226), with TGI's seeding, so that
    detectors written for it go on working. The permutation is drawn on the CPU whatever the model runs on.

    `gamma` is the favoured share of the vocabulary, `delta` what its scores gain."""

    gamma: float = 0.5
    delta: float = 2.0

    def apply(self, scores: torch.Tensor, last_token: int) -> None:
        """Favour the tokens that `last_token` picks in one row of scores [vocab_size], in place."""
        green = self.green_ids(last_token, scores.shape[0]).to(scores.device)
        scores[green] += self.delta

    def green_ids(self, last_token: int, vocab_size: int) -> torch.Tensor:
        """The favoured tokens: [gamma * vocab_size] int64."""
        generator = seeded_generator(HASH_KEY * last_token)
        return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * self.gamma)]


DEFAULT_WATERMARK = Watermark()  # TGI's settings
IN_TORCH = TorchLogitsProcessors()


def _has_no_text(token_id: int, text: str) -> bool:
    """Of a sequence without a tokenizer."""
    return False


@dataclass(slots=True)
class SamplingState:
    """What sampling one sequence depends on: its parameters, its last token and, for penalties, all it holds.

    What steps ask of every row is worked out once: whether single scores are edited, whether the token is drawn, and
    whether the host must know the last token before the next is chosen.
    """

    params: SamplingParams
    top_n: int = 0
    watermark: Watermark = DEFAULT_WATERMARK
    strategy: StrategyState | None = None
    edits_scores: bool = field(init=False)
    is_sampled: bool = field(init=False)
    takes_likeliest: bool = field(init=False)  # without rules the best of the model's own scores, and no other is told
    wants_raw: bool = field(init=False)
    follows_tokens: bool = field(init=False)
    has_mu: bool = field(init=False)  # mirostat's
    is_told_in_words: bool = field(init=False)  # to other ranks: there is more to tell than a token
    first_timestamp: int | None = field(init=False, default=None)  # of a transcript with such: see `transcript_rules`
    _remembers: bool = field(init=False)
    _last: int = 0
    _seen: Counter[int] = field(default_factory=Counter)  # prompt and completion
    _produced: Counter[int] = field(default_factory=Counter)  # completion

    def __post_init__(self) -> None:
        params, strategy = self.params, self.strategy
        remembers = strategy is not None and strategy.follows_tokens
        self.edits_scores = params.edits_scores or strategy is not None
        self.is_sampled = params.is_sampled
        self.takes_likeliest = not (self.edits_scores or self.is_sampled or self.top_n)
        self.wants_raw = params.raw_logprobs and params.changes_scores
        self.follows_tokens = params.is_masked or params.watermark or remembers
        self.has_mu = strategy is not None and strategy.mu is not None
        self.is_told_in_words = bool(self.top_n) or params.is_masked or self.has_mu
        self._remembers = params.has_penalties or remembers

    @classmethod
    def over(
        cls,
        params: SamplingParams,
        top_n: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        watermark: Watermark = DEFAULT_WATERMARK,
        *,
        mirostat_mu: float | None = None,
        has_text: Callable[[int, str], bool] = _has_no_text,
    ) -> "SamplingState":
        """State of a sequence that holds these tokens already.

        Args:
            params: of the sequence.
            top_n: likeliest tokens that are told beside each.
            prompt_ids: tokens before the completion.
            output_ids: tokens of the completion.
            watermark: of this server.
            mirostat_mu: what mirostat had come to with `output_ids`; None where there are none.
            has_text: whether a text is within that of a token.
        """
        last = output_ids or prompt_ids or (0,)
        strategy = None
        if params.strategy is not None:
            tokens = chain(prompt_ids, output_ids)
            strategy = StrategyState(params, params.strategy, tokens, len(output_ids), mirostat_mu, has_text)
        state = cls(params, top_n, watermark, strategy, last[-1])
        if params.has_penalties:
            state._seen.update(prompt_ids)
            state._seen.update(output_ids)
            state._produced.update(output_ids)
        return state

    def push(self, token_id: int) -> None:
        """Take a new completion token into account."""
        self._last = token_id
        if self._remembers:
            if self.params.has_penalties:
                self._seen[token_id] += 1
                self._produced[token_id] += 1
            if self.strategy is not None:
                self.strategy.push(token_id)

    def take_back(self, token_ids: Sequence[int], last: int) -> None:
        """Undo `push` of the latest tokens, behind which the last one is `last`; there must be no strategy."""
        self._last = last
        if self.params.has_penalties:
            for counter in (self._seen, self._produced):
                counter.subtract(token_ids)
                for token_id in token_ids:
                    if not counter[token_id]:
                        del counter[token_id]

    @property
    def mu(self) -> float:
        """What mirostat has come to, of a row that has it."""
        assert self.strategy is not None
        assert self.strategy.mu is not None
        return self.strategy.mu

    def held(self) -> tuple[tuple[list[int], list[int]], ...]:
        """Where penalties need it, the tokens held and how often: those of the whole sequence, of the completion."""
        return tuple((list(counter), list(counter.values())) for counter in (self._seen, self._produced))

    def favoured(self, vocab_size: int) -> np.ndarray:
        """The tokens that the watermark favours next: ids, int64."""
        ids: np.ndarray = self.watermark.green_ids(self._last, vocab_size).numpy()
        return ids

    def process(self, scores: torch.Tensor) -> None:
        """Apply watermark, bias and penalties to one row [vocab_size], in place."""
        params = self.params
        if params.watermark:
            self.watermark.apply(scores, self._last)
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            scores[list(ids)] += torch.tensor(biases, dtype=scores.dtype, device=scores.device)
        if params.has_penalties:
            self._penalise(scores)

    def _penalise(self, scores: torch.Tensor) -> None:
        params = self.params
        if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0:
            ids, counts = _as_tensors(self._seen, scores.device)
            values = scores[ids]
            if params.repetition_penalty != 1.0:
                penalty = params.repetition_penalty
                values = torch.where(values < 0, values * penalty, values / penalty)
            scores[ids] = values - params.frequency_penalty * counts / counts.sum()
        if self._produced and (params.presence_penalty != 0.0 or params.count_penalty != 0.0):
            ids, counts = _as_tensors(self._produced, scores.device)
            scores[ids] -= params.presence_penalty + params.count_penalty * counts


def _as_tensors(counter: Counter[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor(list(counter.keys()), dtype=torch.int64, device=device)
    counts = torch.tensor(list(counter.values()), dtype=torch.float32, device=device)
    return ids, counts


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, its log-probability, and the most likely alternatives.

    `is_cut`: the sequence ends here although its grammar is not satisfied, for nothing can follow.
    """

    id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    is_cut: bool = False

    @classmethod
    def forced(cls, token_id: int, *, with_top: bool) -> "SampledToken":
        """A token that alone could follow: it is certain."""
        return cls(token_id, 0.0, (token_id,), (0.0,)) if with_top else cls(token_id, 0.0)


def sample(
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    positions: Sequence[int],
    masks: TokenMasks | None = None,
    maths: LogitsProcessors = IN_TORCH,
) -> list[SampledToken]:
    """Choose the next token of every row.

    With timestamps `raw_logprobs` are those of the scores behind their rules: a timestamp by itself is never likely.

    The log-probability of a row with broken scores, by the model or by masks that leave nothing, is NaN.

    Args:
        logits: [rows, vocab_size] float32; changed in place.
        states: sampling state per row.
        positions: index in its sequence of the token each row is about to get.
        masks: tokens that grammars allow, of rows that have one.
        maths: what does the heavy part.
    """
    if masks is None and all([state.takes_likeliest and state.first_timestamp is None for state in states]):
        return list(map(SampledToken, *maths.likeliest(logits)))
    is_broken = are_broken(logits)
    raw = {row: logits[row : row + 1].clone() for row, state in enumerate(states) if state.wants_raw}
    strategies: dict[int, StrategyState] | None = None
    for row, state in enumerate(states):
        if state.edits_scores:
            state.process(logits[row])
            if state.strategy is not None:
                strategies = strategies or {}
                strategies[row] = state.strategy
    # Half-precision overflow or an extreme penalty must spoil its own row only, and must not raise.
    maths.allow(logits, masks)
    sampled = [row for row, state in enumerate(states) if state.is_sampled]
    for row, state in enumerate(states):
        if state.first_timestamp is not None:
            prefer_timestamps(logits[row], state.first_timestamp)
            if row in raw:
                raw[row] = logits[row : row + 1].clone()
    if strategies is not None:
        chosen_first = begin_all(strategies, logits, positions)
        sampled = [row for row in sampled if row not in chosen_first]
    if sampled:
        maths.warp(logits, sampled, [states[row].params for row in sampled])
    if strategies is not None:
        narrow_all(strategies, chosen_first, logits, positions)
    chosen, normaliser = maths.best(logits)
    if sampled:
        keys = [noise_key(states[row].params.seed, positions[row]) for row in sampled]
        chosen[sampled] = maths.draw(logits, sampled, keys)
    if strategies is not None:
        for row, token_id in chosen_first.items():
            chosen[row] = token_id
        for row, strategy in strategies.items():
            strategy.observe(float(normaliser[row] - logits[row, chosen[row]]))
    for row, scores in raw.items():
        maths.allow(scores, None)
        logits[row] = scores[0]
        normaliser[row] = maths.best(scores)[1]
    logprobs = logprobs_of(logits, chosen, normaliser, is_broken)
    tops = [
        top_of(logits[row], float(normaliser[row]), state.top_n) if state.top_n else ((), ())
        for row, state in enumerate(states)
    ]
    return [
        SampledToken(token_id, logprob, *top)
        for token_id, logprob, top in zip(chosen.tolist(), logprobs.tolist(), tops, strict=True)
    ]


def top_of(scores: torch.Tensor, normaliser: float, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The most likely tokens of a row, best first; ties with the last are all returned, masked tokens never."""
    count = min(count, scores.shape[0])
    threshold = scores.topk(count).values[-1]
    ids = torch.nonzero((scores >= threshold) & (scores > -torch.inf))[:, 0]
    values = scores[ids]
    order = values.argsort(descending=True, stable=True)
    return tuple(ids[order].tolist()), tuple((values[order] - normaliser).tolist())
