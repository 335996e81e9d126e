"""What rows ask of sampling, laid out on the device for every step of them, and what it remembers of each."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.gpu_sampling.ops import Draws, Penalties, RowSubset, ScoreMaths
from funitel.model_server.gpu_sampling.strategies import RowStrategies
from funitel.model_server.sampling.gumbel_noise import mixed_seeds
from funitel.model_server.sequence.table import SequenceState
from funitel.proto.step import SamplingParams

_MIN_SLOTS, _MIN_COUNTED = 1024, 8


class RowStates:
    """State by slot, the place of a row in the sequence table. What is written is seen by what is launched after it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros(_MIN_SLOTS, dtype=torch.int64, device=device)  # the last of each slot
        self.counts = torch.zeros(0, 2, vocab_size, dtype=torch.int32, device=device)  # in all, in the completion
        self._places: dict[int, int] = {}  # slot -> line of `counts`

    def reserve(self, num_slots: int) -> None:
        """Have room for so many slots."""
        if num_slots > len(self.tokens):
            grown = torch.zeros(max(num_slots, 2 * len(self.tokens)), dtype=torch.int64, device=self.device)
            grown[: len(self.tokens)] = self.tokens
            self.tokens = grown

    def place_of(self, row: SequenceState) -> int:
        """The line of a row's counts; on the first call for a row what it holds is counted there."""
        if row.counts_place is None:
            place = self._places.setdefault(row.index, len(self._places))
            self._grow(len(self._places))
            self._count(place, row)
            row.counts_place = place
        return row.counts_place

    def push(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the tokens [rows] that some slots [rows] have got."""
        self.tokens.index_copy_(0, slots, tokens)

    def count(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count completion tokens [rows] in the lines [rows] of their rows."""
        for part in range(2):
            line = self.counts[:, part]
            line[places, tokens] += 1  # a row is here once

    def _grow(self, num_places: int) -> None:
        if num_places > len(self.counts):
            shape = (max(num_places, 2 * len(self.counts), _MIN_COUNTED), *self.counts.shape[1:])
            grown = torch.zeros(shape, dtype=torch.int32, device=self.device)
            grown[: len(self.counts)] = self.counts
            self.counts = grown

    def _count(self, place: int, row: SequenceState) -> None:
        lines = self.counts[place]
        lines.zero_()
        for line, (ids, counts) in zip(lines, row.sampling.held(), strict=True):
            if ids:
                there = upload(np.array([ids, counts], dtype=np.int64), self.device)
                line.index_copy_(0, there[0], there[1].int())


MORE_TOPS = 16
"""Tokens that are fetched of a row beyond those it asks for, so that ties with the last are among them."""


@dataclass(frozen=True, slots=True)
class Biases:
    """What is added to single scores: rows, token ids and values, each [num_biases]."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The plan of some rows, by what they ask for. `slots` [rows] are their places in the sequence table."""

    rows: tuple[SequenceState, ...]
    slots: torch.Tensor
    penalties: Penalties | None
    biases: Biases | None
    draws: Draws | None
    raw: RowSubset | None  # that want the model's own log-probabilities
    tops: RowSubset | None  # of which likely tokens are wanted beside the chosen one
    num_tops: int  # that are fetched of each
    strategies: RowStrategies | None
    source_lens: np.ndarray  # [rows]: tokens before those that penalties count

    @classmethod
    def of(cls, rows: Sequence[SequenceState], states: RowStates, maths: ScoreMaths) -> "SamplingPlan":
        """Lay out what `rows` ask for."""
        device, params = states.device, [row.start.sampling for row in rows]
        vocab_size = states.counts.shape[2]

        def some(is_one: Callable[[SequenceState], object]) -> RowSubset | None:
            return RowSubset.of([i for i, row in enumerate(rows) if is_one(row)], len(rows), device)

        max_top_n = max((row.sampling.top_n for row in rows), default=0)
        return cls(
            rows=tuple(rows),
            slots=upload(np.array([row.index for row in rows], dtype=np.int64), device),
            penalties=_penalties(rows, some(lambda row: row.start.sampling.has_penalties), states),
            biases=_biases(params, device),
            draws=_draws(params, some(lambda row: row.start.sampling.is_sampled), maths, device),
            raw=some(lambda row: row.start.sampling.raw_logprobs and row.start.sampling.changes_scores),
            tops=some(lambda row: row.sampling.top_n),
            num_tops=min(vocab_size, max_top_n + MORE_TOPS),
            strategies=RowStrategies.of(rows, device),
            source_lens=np.array([row.source_len for row in rows]),
        )

    def is_of(self, rows: Sequence[SequenceState]) -> bool:
        """Whether it is the plan of just these rows."""
        return len(rows) == len(self.rows) and all(map(operator.is_, rows, self.rows))


def _penalties(rows: Sequence[SequenceState], some: RowSubset | None, states: RowStates) -> Penalties | None:
    if some is None:
        return None
    asked = [rows[i].start.sampling for i in some.rows]
    places = np.array([states.place_of(rows[i]) for i in some.rows], dtype=np.int64)
    columns = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty, p.count_penalty) for p in asked]
    values = upload(np.array(columns, dtype=np.float32).T[:, :, None].copy(), states.device)
    return Penalties(some, upload(places, states.device), *values)


def _biases(params: Sequence[SamplingParams], device: torch.device) -> Biases | None:
    each = [(i, token_id, value) for i, p in enumerate(params) for token_id, value in p.logit_bias]
    if not each:
        return None
    rows, ids, values = zip(*each, strict=True)
    row_index, id_index = upload(np.array([rows, ids], dtype=np.int64), device)
    return Biases(row_index, id_index, upload(np.array(values, dtype=np.float32), device))


def _draws(
    params: Sequence[SamplingParams], some: RowSubset | None, maths: ScoreMaths, device: torch.device
) -> Draws | None:
    if some is None:
        return None
    asked = [params[i] for i in some.rows]
    return Draws(some, mixed_seeds([p.seed for p in asked]), maths.lay_out(asked, device))
