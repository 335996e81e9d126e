"""Decoding strategies of rows on a device: each row passes its own; a token that one chooses replaces the sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.gpu_sampling.ops import Chosen, RowSubset
from funitel.model_server.sampling.strategy import StrategyState, begin_all, narrow_all
from funitel.model_server.sequence.table import SequenceState


@dataclass(frozen=True, slots=True)
class BegunStrategies:
    """The strategies of one step, once the masks are applied; of rows with a token chosen, their scores then."""

    states: Mapping[int, StrategyState]
    positions: np.ndarray
    tokens: Mapping[int, int]
    scores: Mapping[int, torch.Tensor]

    def narrow(self, scores: torch.Tensor) -> None:
        """Leave tokens out of rows [rows, vocab_size], in place."""
        narrow_all(self.states, self.tokens, scores, self.positions.tolist())

    def put(self, scores: torch.Tensor, chosen: Chosen) -> None:
        """Replace tokens, in place, and what was made of the scores of their rows."""
        for row, token_id in self.tokens.items():
            scores[row] = self.scores[row]
            chosen.tokens[row] = token_id
            chosen.scores[row] = scores[row, token_id]
            chosen.normalisers[row] = scores[row : row + 1].logsumexp(dim=-1)[0]


@dataclass(frozen=True, slots=True)
class RowStrategies:
    """Rows with a strategy, by place, and those of them that must learn how surprising their tokens were."""

    states: Mapping[int, StrategyState]
    observed: RowSubset | None

    @classmethod
    def of(cls, rows: Sequence[SequenceState], device: torch.device) -> "RowStrategies | None":
        """None where no row has one."""
        states = {i: row.sampling.strategy for i, row in enumerate(rows) if row.sampling.strategy is not None}
        if not states:
            return None
        observed = [i for i, state in states.items() if state.mu is not None]
        return cls(states, RowSubset.of(observed, len(rows), device))

    def begin(self, scores: torch.Tensor, positions: np.ndarray) -> BegunStrategies:
        """Begin a step with scores [rows, vocab_size], which are changed in place."""
        for row in self.states:
            scores[row].nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        tokens = begin_all(self.states, scores, positions.tolist())
        return BegunStrategies(self.states, positions, tokens, {row: scores[row].clone() for row in tokens})

    def observe(self, numbers: np.ndarray) -> int:
        """Take how surprising the tokens were from the beginning of `numbers`; how many those are."""
        rows = [] if self.observed is None else self.observed.rows
        for row, nats in zip(rows, numbers.tolist(), strict=False):
            self.states[row].observe(nats)
        return len(rows)
