"""The decoding strategy of one sequence: which stages it takes part in, and what it remembers.

A row with a strategy passes `begin` once its masks are applied, then temperature, top-k, top-p, min-p and typical-p as
any other, then `narrow`. All that a strategy remembers is a function of the sequence's tokens, save mirostat's mu.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch

from funitel.model_server.sampling.gumbel_noise import uniform
from funitel.model_server.sampling.strategy_penalties import IsBreaker, dry_penalties, fsd_penalties
from funitel.model_server.sampling.strategy_truncation import (
    best_ids,
    keep_below_top_choices,
    keep_best,
    keep_by_surprise,
    keep_by_zipf,
    keep_tail_free,
    keep_top_n_sigma,
    probabilities,
)
from funitel.model_server.sampling.token_history import TokenHistory
from funitel.proto.step import SamplingParams
from funitel.proto.strategy import DecodingStrategy

XTC_STREAM, FSD_STREAM = 1, 2  # of random numbers beside the noise of tokens

Keep = Callable[[torch.Tensor], torch.Tensor]


class StrategyState:
    """A strategy and what it remembers of its sequence."""

    def __init__(
        self,
        params: SamplingParams,
        strategy: DecodingStrategy,
        token_ids: Iterable[int],
        num_produced: int,
        mirostat_mu: float | None,
        has_text: Callable[[int, str], bool],
    ) -> None:
        """`token_ids` are prompt and completion, the last `num_produced` of them the completion."""
        self._params = params
        self._strategy = strategy
        is_looked_at = bool(strategy.dry_multiplier or strategy.fsd_alpha)
        self._history = TokenHistory(token_ids if is_looked_at else ())
        self._num_produced = num_produced
        self._is_breaker = _breakers(strategy.dry_sequence_breakers, has_text)
        self.follows_tokens = strategy.follows_tokens
        self.mu = (2 * strategy.mirostat_tau if mirostat_mu is None else mirostat_mu) if strategy.mirostat else None
        self.surprise = 0.0  # of the token that will be pushed next, in bits, for mirostat

    def push(self, token_id: int) -> None:
        """Take a new completion token into account. One that was forced has no surprise."""
        self._history.push(token_id)
        self._num_produced += 1
        if self.mu is not None:
            strategy = self._strategy
            self.mu -= strategy.mirostat_eta * (self.surprise - strategy.mirostat_tau)
            self.surprise = 0.0

    def observe(self, nats: float) -> None:
        """Note the surprise of the token that will be pushed next, under the distribution that it was drawn from."""
        self.surprise = nats / math.log(2.0)

    def begin(self, scores: torch.Tensor, position: int) -> int | None:
        """Apply DRY and top-n-sigma to one row of scores [vocab_size], in place; a token, if FSD chooses it now."""
        strategy = self._strategy
        if not bool((scores > -torch.inf).any()):
            return None
        if strategy.dry_multiplier and strategy.dry_penalty_last_n:
            tokens, penalties = dry_penalties(strategy, self._history, self._is_breaker)
            if len(tokens):
                scores[tokens.tolist()] -= torch.from_numpy(penalties).to(scores)
        if strategy.fsd_alpha and not self._draws(position):
            return self._most_fitting(scores)
        if strategy.top_n_sigma:
            _apply(scores, keep_top_n_sigma(scores, strategy.top_n_sigma))
        return None

    def narrow(self, scores: torch.Tensor, position: int) -> None:
        """Apply max-k, TFS, XTC or mirostat to one row of scores at its temperature [vocab_size], in place."""
        strategy = self._strategy
        if not bool((scores > -torch.inf).any()):
            return
        if strategy.max_k:
            _apply(scores, keep_best(scores, strategy.max_k))
        if strategy.tfs_z < 1.0:
            _apply(scores, keep_tail_free(scores, strategy.tfs_z))
        if strategy.xtc_probability and uniform(self._params.seed, position, XTC_STREAM) < strategy.xtc_probability:
            _apply(scores, keep_below_top_choices(scores, strategy.xtc_threshold))
        if self.mu is not None:
            keep = keep_by_zipf if strategy.mirostat == 1 else keep_by_surprise
            _apply(scores, keep(scores, self.mu))

    def _draws(self, position: int) -> bool:
        """Whether randomized FSD draws the token instead of choosing it."""
        is_early = self._num_produced < self._strategy.fsd_random_tokens
        return is_early and uniform(self._params.seed, position, FSD_STREAM) < 0.5

    def _most_fitting(self, scores: torch.Tensor) -> int:
        """FSD's choice: of the k likeliest, the one with the best of probability less penalty."""
        strategy = self._strategy
        probs = probabilities((scores.double() - scores.max()) / self._params.temperature)
        order = best_ids(probs, strategy.fsd_k)
        candidates: list[int] = order.tolist()
        likelihoods: list[float] = probs[order].tolist()
        penalties = fsd_penalties(strategy, self._history, candidates)
        alpha = strategy.fsd_alpha
        fits = [
            (1 - alpha) * p - alpha * penalty if p > 0.0 else -math.inf
            for p, penalty in zip(likelihoods, penalties, strict=True)
        ]
        return candidates[max(range(len(fits)), key=fits.__getitem__)]


def begin_all(
    strategies: Mapping[int, StrategyState], scores: torch.Tensor, positions: Sequence[int]
) -> dict[int, int]:
    """`begin` for some rows of scores [rows, vocab_size]; the tokens that are chosen by that, by row."""
    begun = {row: state.begin(scores[row], positions[row]) for row, state in strategies.items()}
    return {row: token_id for row, token_id in begun.items() if token_id is not None}


def narrow_all(
    strategies: Mapping[int, StrategyState], without: Container[int], scores: torch.Tensor, positions: Sequence[int]
) -> None:
    """`narrow` for some rows of scores [rows, vocab_size]."""
    for row, state in strategies.items():
        if row not in without:
            state.narrow(scores[row], positions[row])


def _apply(scores: torch.Tensor, is_kept: torch.Tensor) -> None:
    scores.masked_fill_(~is_kept, -torch.inf)


def _breakers(texts: tuple[str, ...], has_text: Callable[[int, str], bool]) -> IsBreaker:
    """Whether one of the texts is within that of a token, looked up once for each token."""
    known: dict[int, bool] = {}

    def is_breaker(token_id: int) -> bool:
        found = known.get(token_id)
        if found is None:
            found = known[token_id] = any(has_text(token_id, text) for text in texts)
        return found

    return is_breaker
