"""Beam search: which continuations of several beams live on, which have ended, and when it is over. Pure.

The rules are those of `generate(num_beams=..., do_sample=False)` of transformers. Of all continuations of all beams the
likeliest are looked at, so many that enough of them do not end. Those among the first `width` that end become
hypotheses, scored by the sum of their log-probabilities over their length to the power of the length penalty; of the
others the `width` likeliest are the next beams.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from funitel.proto.step import FinishReason, Tokens

EarlyStopping = bool | Literal["never"]
CHARACTER_TOKENS = 4  # tokens that one character takes at most


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """A beam search as a request asks for it.

    `early_stopping`: True ends it once there are `width` hypotheses; False where the best beam, as long as it is, is no
    better than the worst of them; "never" where it could not become better either. `decode` gives the text of tokens,
    for stop strings.
    """

    width: int
    num_returned: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_sequences: tuple[str, ...] = ()
    min_new_tokens: int = 0  # before which nothing ends a beam
    decode: Callable[[Sequence[int]], str] | None = None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a beam."""
        return self.eos_token_ids | self.stop_token_ids

    @property
    def num_kept(self) -> int:
        """Continuations that are looked at in a step: enough of them are no end token."""
        return max(2, 1 + len(self.end_token_ids)) * self.width

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that a step must tell of each beam."""
        return self.num_kept + (len(self.end_token_ids) if self.min_new_tokens else 0)


@dataclass(frozen=True, slots=True)
class _Link:
    """The last token of a beam, behind those before it."""

    before: "_Link | None"
    token_id: int
    logprob: float
    top: Tokens  # the candidates at its place


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens of a completion and the sum of their log-probabilities; `parent` is the place of the beam it goes on."""

    ids: tuple[int, ...]
    sum_logprobs: float
    parent: int = 0
    last: _Link | None = None

    def _links(self) -> Iterator[_Link]:
        link = self.last
        while link is not None:
            yield link
            link = link.before


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completion that has ended; `tops` are the candidates at each place, the likeliest first."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[Tokens, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class _Ended:
    beam: Beam
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """One search: give `advance` the candidates of each of `beams`, until it is over."""

    def __init__(self, params: BeamParams) -> None:
        self.beams: list[Beam] = [Beam((), 0.0)]
        self.is_over = False
        self._params = params
        self._ended: list[_Ended] = []  # the best `width`, best first

    @property
    def num_tokens(self) -> int:
        """Tokens of each beam."""
        return len(self.beams[0].ids) if self.beams else 0

    def advance(self, tops: Sequence[Tokens]) -> None:
        """Take one more token in each beam.

        Args:
            tops: for each beam, its likeliest next tokens, `num_candidates` of them or the whole vocabulary.
        """
        params = self._params
        length = self.num_tokens + 1
        beams: list[Beam] = []
        for place, (sum_logprobs, parent, token_id, logprob) in enumerate(self._likeliest(tops, length)):
            before = self.beams[parent]
            ids = (*before.ids, token_id)
            reason = self._finish_reason(ids)
            if reason is None and len(beams) == params.width:
                continue
            if reason is not None and place >= params.width:
                continue
            beam = Beam(ids, sum_logprobs, parent, _Link(before.last, token_id, logprob, tops[parent]))
            if reason is None:
                beams.append(beam)
            else:
                self._ended.append(_Ended(beam, sum_logprobs / length**params.length_penalty, reason))
        self._ended.sort(key=lambda ended: -ended.score)
        del self._ended[params.width :]
        self.beams = beams
        self.is_over = self._is_over(length)

    def _likeliest(self, tops: Sequence[Tokens], length: int) -> list[tuple[float, int, int, float]]:
        """The likeliest continuations of all beams: sum of log-probabilities, beam, token and its log-probability."""
        params = self._params
        barred = params.end_token_ids if length <= params.min_new_tokens else frozenset()
        found = [
            (beam.sum_logprobs + logprob, parent, token_id, logprob)
            for parent, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for token_id, logprob in zip(top.ids, top.logprobs, strict=True)
            if token_id not in barred and logprob > -inf
        ]
        found.sort(key=lambda each: (-each[0], each[1], each[2]))
        return found[: params.num_kept]

    def _finish_reason(self, ids: tuple[int, ...]) -> FinishReason | None:
        params = self._params
        if len(ids) >= params.max_new_tokens:
            return FinishReason.LENGTH
        if ids[-1] in params.end_token_ids:
            return FinishReason.EOS_TOKEN
        if params.stop_sequences and len(ids) > params.min_new_tokens and self._has_stop(ids):
            return FinishReason.STOP_SEQUENCE
        return None

    def _has_stop(self, ids: tuple[int, ...]) -> bool:
        """Whether a stop is in the text, which had none before its last token."""
        assert self._params.decode is not None, "stops need texts"
        longest = max(map(len, self._params.stop_sequences))
        text = self._params.decode(ids[-CHARACTER_TOKENS * (longest + 2) :])
        return any(stop in text for stop in self._params.stop_sequences)

    def _is_over(self, length: int) -> bool:
        params = self._params
        if not self.beams or length >= params.max_new_tokens:
            return True
        if len(self._ended) < params.width:
            return False
        if params.early_stopping is True:
            return True
        is_longest = params.early_stopping == "never" and params.length_penalty > 0.0
        best_length = params.max_new_tokens if is_longest else length
        best_score: float = self.beams[0].sum_logprobs / best_length**params.length_penalty
        return best_score <= self._ended[-1].score

    def hypotheses(self) -> list[Hypothesis]:
        """The best completions, best first, once it is over."""
        return [_hypothesis(ended) for ended in self._ended[: self._params.num_returned]]


def _hypothesis(ended: _Ended) -> Hypothesis:
    links = list(ended.beam._links())[::-1]
    return Hypothesis(
        ended.beam.ids,
        tuple(link.logprob for link in links),
        tuple(link.top for link in links),
        ended.score,
        ended.finish_reason,
    )
