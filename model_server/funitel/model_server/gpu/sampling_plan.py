"""What the rows of a batch ask of sampling, laid out on the device once and good for every step of the same rows."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.gpu.row_states import RowStates
from funitel.model_server.noise import mixed_seeds
from funitel.model_server.scores import keep_min_p, keep_top_k, keep_top_p, keep_typical_p, log_of
from funitel.model_server.sequences import Row
from funitel.model_server.uploads import upload
from funitel.proto.step import SamplingParams

MORE_TOPS = 16
"""Tokens that are fetched of a row beyond those it asks for, so that ties with the last are among them."""

Ask = Callable[[SamplingParams], float | None]  # what a row asks for, if it does
Keep = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
_KEEPS: tuple[tuple[Keep, Ask], ...] = (
    (keep_top_k, lambda p: p.top_k or None),
    (keep_top_p, lambda p: p.top_p if p.top_p < 1.0 else None),
    (keep_min_p, lambda p: log_of(p.min_p) if p.min_p > 0.0 else None),
    (keep_typical_p, lambda p: p.typical_p if p.typical_p < 1.0 else None),
)


@dataclass(frozen=True, slots=True)
class Some:
    """Some rows of a matrix."""

    rows: list[int]
    index: torch.Tensor | None  # the same on the device; None: all rows, in order

    @classmethod
    def of(cls, rows: list[int], num_rows: int, device: torch.device) -> "Some | None":
        """None for no rows."""
        if not rows:
            return None
        is_all = len(rows) == num_rows
        return cls(rows, None if is_all else upload(np.array(rows, dtype=np.int64), device))

    def of_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """These rows: a copy, or the matrix itself where they are all of it."""
        return matrix if self.index is None else matrix.index_select(0, self.index)

    def put(self, matrix: torch.Tensor, values: torch.Tensor) -> None:
        """Replace these rows in place."""
        if self.index is None:
            matrix.copy_(values)
        else:
            matrix.index_copy_(0, self.index, values)


@dataclass(frozen=True, slots=True)
class Kept:
    """A rule for which tokens stay, with what rows of those that are drawn ask of it: [rows, 1]."""

    some: Some
    keep: Keep
    values: torch.Tensor
    most: float


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties, the lines of their counts, and each penalty [rows, 1] float32."""

    some: Some
    places: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows whose token is drawn: temperatures [rows, 1], seeds as the noise takes them, and which tokens stay."""

    some: Some
    temperatures: torch.Tensor
    seeds: np.ndarray
    kept: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class Biases:
    """What is added to single scores: rows, token ids and values, each [num_biases]."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The plan of some rows, by what they ask for. `slots` [rows] are their places in the sequence table."""

    rows: tuple[Row, ...]
    slots: torch.Tensor
    penalties: Penalties | None
    biases: Biases | None
    draws: Draws | None
    raw: Some | None  # whose log-probabilities are the model's own
    tops: Some | None  # of which likely tokens are wanted beside the chosen one
    num_tops: int  # that are fetched of each

    @classmethod
    def of(cls, rows: Sequence[Row], states: RowStates) -> "SamplingPlan":
        """Lay out what `rows` ask for."""
        device, params = states.device, [row.start.sampling for row in rows]
        vocab_size = states.counts.shape[2]

        def some(is_one: Callable[[Row], object]) -> Some | None:
            return Some.of([i for i, row in enumerate(rows) if is_one(row)], len(rows), device)

        most = max((row.sampling.top_n for row in rows), default=0)
        return cls(
            rows=tuple(rows),
            slots=upload(np.array([row.index for row in rows], dtype=np.int64), device),
            penalties=_penalties(rows, some(lambda row: row.start.sampling.has_penalties), states),
            biases=_biases(params, device),
            draws=_draws(params, some(lambda row: row.start.sampling.is_sampled), device),
            raw=some(lambda row: row.start.sampling.raw_logprobs and row.start.sampling.changes_scores),
            tops=some(lambda row: row.sampling.top_n),
            num_tops=min(vocab_size, most + MORE_TOPS),
        )

    def is_of(self, rows: Sequence[Row]) -> bool:
        """Whether it is the plan of just these rows."""
        return len(rows) == len(self.rows) and all(map(operator.is_, rows, self.rows))


def _penalties(rows: Sequence[Row], some: Some | None, states: RowStates) -> Penalties | None:
    if some is None:
        return None
    asked = [rows[i].start.sampling for i in some.rows]
    places = np.array([states.place_of(rows[i]) for i in some.rows], dtype=np.int64)
    columns = [
        [getattr(p, f"{name}_penalty") for p in asked] for name in ("repetition", "frequency", "presence", "count")
    ]
    values = upload(np.array(list(columns), dtype=np.float32), states.device)[:, :, None]
    return Penalties(some, upload(places, states.device), *values)


def _biases(params: Sequence[SamplingParams], device: torch.device) -> Biases | None:
    each = [(i, token_id, value) for i, p in enumerate(params) for token_id, value in p.logit_bias]
    if not each:
        return None
    rows, ids, values = zip(*each, strict=True)
    row_index, id_index = upload(np.array([rows, ids], dtype=np.int64), device)
    return Biases(row_index, id_index, upload(np.array(values, dtype=np.float32), device))


def _draws(params: Sequence[SamplingParams], some: Some | None, device: torch.device) -> Draws | None:
    if some is None:
        return None
    asked = [params[i] for i in some.rows]
    temperatures = upload(np.array([[p.temperature] for p in asked], dtype=np.float32), device)
    found = (_kept(asked, keep, value_of, device) for keep, value_of in _KEEPS)
    kept = tuple(each for each in found if each is not None)
    return Draws(some, temperatures, mixed_seeds([p.seed for p in asked]), kept)


def _kept(asked: Sequence[SamplingParams], keep: Keep, value_of: Ask, device: torch.device) -> Kept | None:
    values = {i: value for i, p in enumerate(asked) if (value := value_of(p)) is not None}
    some = Some.of(list(values), len(asked), device)
    if some is None:
        return None
    dtype = np.int64 if keep is keep_top_k else np.float32
    column = np.array(list(values.values()), dtype=dtype)[:, None]
    return Kept(some, keep, upload(column, device), max(values.values()))
