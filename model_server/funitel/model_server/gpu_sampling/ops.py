"""The heavy part of sampling on a device: penalties, filters, choices over whole vocabularies, in torch or Triton."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.device.probe_or_fall_back import probe_or_fall_back, reason_of
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.sampling.gumbel_noise import gumbel_of, mixed_seeds
from funitel.model_server.sampling.logits_processors import (
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical_p,
    log_of,
)
from funitel.proto.step import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowSubset:
    """Rows of a matrix by their places, which the device knows too: [rows] int64."""

    rows: list[int]
    index: torch.Tensor
    is_all: bool  # all rows, in order

    @classmethod
    def of(cls, rows: list[int], num_rows: int, device: torch.device) -> "RowSubset | None":
        """Rows out of so many, in order; None for none."""
        if not rows:
            return None
        return cls(rows, upload(np.array(rows, dtype=np.int64), device), len(rows) == num_rows)

    def of_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """These rows: a copy, or the matrix itself where they are all of it."""
        return matrix if self.is_all else matrix.index_select(0, self.index)

    def put(self, matrix: torch.Tensor, values: torch.Tensor) -> None:
        """Replace these rows in place."""
        if self.is_all:
            matrix.copy_(values)
        else:
            matrix.index_copy_(0, self.index, values)


Ask = Callable[[SamplingParams], float | None]  # what a row asks for, if it does
Keep = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
_TYPICAL: tuple[Keep, Ask] = (keep_typical_p, lambda p: p.typical_p if p.typical_p < 1.0 else None)
_KEEPS: tuple[tuple[Keep, Ask], ...] = (
    (keep_top_k, lambda p: p.top_k or None),
    (keep_top_p, lambda p: p.top_p if p.top_p < 1.0 else None),
    (keep_min_p, lambda p: log_of(p.min_p) if p.min_p > 0.0 else None),
    _TYPICAL,
)
Narrow = Callable[[torch.Tensor], None]
_EVERY_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties, the lines of their counts [rows], and each penalty [rows, 1] float32."""

    some: RowSubset
    places: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that draw a token, their seeds as the noise takes them, and what they ask for as `lay_out` gave it."""

    some: RowSubset
    seeds: np.ndarray
    filters: Any


@dataclass(frozen=True, slots=True)
class Chosen:
    """The token of every row [rows] int64, its score, and the log of the sum of exponentials [rows] float32."""

    tokens: torch.Tensor
    scores: torch.Tensor
    normalisers: torch.Tensor


class ScoreMaths(Protocol):
    """Works on scores [rows, vocab_size] float32, contiguous; every row's result depends on that row alone."""

    def lay_out(self, asked: Sequence[SamplingParams], device: torch.device) -> Any:
        """What rows that are drawn ask for, as `choose` reads it."""

    def penalise(self, scores: torch.Tensor, penalties: Penalties, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Apply penalties, in place; `counts` as `RowStates` has them, `lengths` [rows, 1] float32 in tokens."""

    def choose(
        self, scores: torch.Tensor, draws: Draws | None, keys: torch.Tensor | None, narrow: Narrow | None = None
    ) -> Chosen:
        """Filter the rows that are drawn, in place, and choose a token for each row.

        `keys` [3, rows] int32: whether a row is drawn, and the upper and lower half of the key of its noise. `narrow`
        is called with the scores of all rows behind the filters, to leave further tokens out in place.
        """


@dataclass(frozen=True, slots=True)
class TokenFilter:
    """A rule for which tokens stay, with what some of the rows that are drawn ask of it [rows, 1]."""

    some: RowSubset
    keep: Keep
    values: torch.Tensor
    most: float

    @classmethod
    def of(
        cls, asked: Sequence[SamplingParams], keep: Keep, value_of: Ask, device: torch.device
    ) -> "TokenFilter | None":
        """None where no row asks for it."""
        values = {i: value for i, p in enumerate(asked) if (value := value_of(p)) is not None}
        some = RowSubset.of(list(values), len(asked), device)
        if some is None:
            return None
        dtype = np.int64 if keep is keep_top_k else np.float32
        column = np.array(list(values.values()), dtype=dtype)[:, None]
        return cls(some, keep, upload(column, device), max(values.values()))

    def apply(self, scores: torch.Tensor) -> None:
        """Leave tokens out, in place."""
        self.some.put(scores, self.keep(self.some.of_matrix(scores), self.values, self.most))


class TorchMaths:
    """By torch's operators, as `TorchLogitsProcessors` and `SamplingState` do it: the same bits on the same device."""

    def lay_out(self, asked: Sequence[SamplingParams], device: torch.device) -> Any:
        """See `ScoreMaths`."""
        temperatures = upload(np.array([[p.temperature] for p in asked], dtype=np.float32), device)
        kept = (TokenFilter.of(asked, keep, value_of, device) for keep, value_of in _KEEPS)
        return temperatures, [each for each in kept if each is not None]

    def penalise(self, scores: torch.Tensor, penalties: Penalties, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """See `ScoreMaths`."""
        x = penalties.some.of_matrix(scores)
        seen, produced = counts.index_select(0, penalties.places).float().unbind(1)
        repeated = torch.where(x < 0, x * penalties.repetition, x / penalties.repetition)
        x = torch.where(seen > 0, repeated - penalties.frequency * seen / lengths, x)
        x = torch.where(produced > 0, x - (penalties.presence + penalties.count * produced), x)
        penalties.some.put(scores, x)

    def choose(
        self, scores: torch.Tensor, draws: Draws | None, keys: torch.Tensor | None, narrow: Narrow | None = None
    ) -> Chosen:
        """See `ScoreMaths`."""
        scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        noisy = scores
        if draws is not None and keys is not None:
            temperatures, kept = draws.filters
            warped = apply_temperature(draws.some.of_matrix(scores), temperatures)
            for each in kept:
                each.apply(warped)
            draws.some.put(scores, warped)
            if narrow is not None:
                narrow(scores)
                warped = draws.some.of_matrix(scores)
            _, first, second = (draws.some.of_matrix(line[:, None]) for line in keys)
            drawn = warped + gumbel_of(first, second, scores.shape[1])
            if draws.some.is_all:
                noisy = drawn
            else:
                noisy = scores.index_copy(0, draws.some.index, drawn)
        tokens = noisy.argmax(dim=-1)
        return Chosen(tokens, scores.gather(1, tokens[:, None])[:, 0], scores.logsumexp(dim=-1))


class TritonMaths:
    """By our kernels, which sort nothing and read each row a few times; typical-p stays torch's."""

    def __init__(self, num_processors: int) -> None:
        # Triton: seconds to import, and there with torch's builds for GPUs only
        from funitel.model_server.gpu_sampling import kernels

        self._kernels = kernels
        self._num_processors = num_processors

    def lay_out(self, asked: Sequence[SamplingParams], device: torch.device) -> Any:
        """See `ScoreMaths`."""
        top_ks = np.array([min(p.top_k or _EVERY_TOKEN, _EVERY_TOKEN) for p in asked], dtype=np.int32)
        floors = [log_of(p.min_p) if p.min_p > 0.0 else -np.inf for p in asked]
        columns = np.array([[p.temperature for p in asked], [p.top_p for p in asked], floors], dtype=np.float32)
        has_filters = bool((top_ks < _EVERY_TOKEN).any()), bool((columns[1] < 1.0).any())
        return upload(top_ks, device), upload(columns, device), has_filters, TokenFilter.of(asked, *_TYPICAL, device)

    def penalise(self, scores: torch.Tensor, penalties: Penalties, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """See `ScoreMaths`."""
        self._kernels.penalise(
            scores,
            penalties.some.index,
            counts,
            penalties.places,
            lengths,
            (penalties.repetition, penalties.frequency, penalties.presence, penalties.count),
        )

    def choose(
        self, scores: torch.Tensor, draws: Draws | None, keys: torch.Tensor | None, narrow: Narrow | None = None
    ) -> Chosen:
        """See `ScoreMaths`."""
        if draws is not None:
            top_ks, (temperatures, top_ps, floors), (has_top_k, has_top_p), typical = draws.filters
            self._kernels.warp(
                scores,
                draws.some.index,
                temperatures,
                top_ks if has_top_k else None,
                top_ps if has_top_p else None,
                floors,
            )
            if typical is not None:
                warped = draws.some.of_matrix(scores)
                typical.apply(warped)
                draws.some.put(scores, warped)
            if narrow is not None:
                narrow(scores)
        return Chosen(*self._kernels.choose(scores, keys, self._num_processors))


_PROBE_TOKENS, _PROBE_BOUND = 5000, 1e-3  # of the vocabulary; the relative error of scores and sums


def choose_maths(device: torch.device) -> ScoreMaths:
    """The kernels, or torch with a warning that says why."""

    def probe() -> ScoreMaths:
        maths = TritonMaths(torch.cuda.get_device_properties(device).multi_processor_count)
        check(maths, device)
        logger.info("sampling runs in Triton kernels")
        return maths

    def fall_back(error: Exception) -> ScoreMaths:
        logger.warning("sampling runs in torch, without the Triton kernels: %s", reason_of(error))
        return TorchMaths()

    return probe_or_fall_back(probe, fall_back)


def check(maths: ScoreMaths, device: torch.device) -> None:
    """Raise ValueError unless it penalises, filters and chooses as torch does; compiles the kernels on the way."""
    asked = [SamplingParams(temperature=0.7, top_k=40), SamplingParams(top_p=0.9, min_p=0.001)]
    found, expected = (_tried(each, asked, device) for each in (maths, TorchMaths()))
    for name, ours, theirs in zip(("tokens", "scores", "sums", "penalties"), found, expected, strict=True):
        if not torch.allclose(ours.float(), theirs.float(), rtol=_PROBE_BOUND, atol=_PROBE_BOUND):
            raise ValueError(f"of a probe {name} are not what torch computes")


def _tried(maths: ScoreMaths, asked: list[SamplingParams], device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = seeded_generator(0)
    scores = (torch.randn(3, _PROBE_TOKENS, generator=generator) * 3).to(device)
    counts = torch.randint(0, 3, (1, 2, _PROBE_TOKENS), generator=generator, dtype=torch.int32).to(device)
    one = torch.full((1, 1), 1.3, device=device)
    some, drawn = RowSubset.of([1], 3, device), RowSubset.of([0, 2], 3, device)
    assert some is not None
    assert drawn is not None
    penalties = Penalties(some, torch.zeros(1, dtype=torch.int64, device=device), one, one, one, one)
    maths.penalise(scores, penalties, counts, 9 * one)
    penalised = scores.clone()
    keys = torch.tensor([[1, 0, 1], [7, 0, 8], [9, 0, 10]], dtype=torch.int32, device=device)
    draws = Draws(drawn, mixed_seeds(np.arange(2).tolist()), maths.lay_out(asked, device))
    chosen = maths.choose(scores, draws, keys)
    return chosen.tokens, chosen.scores, chosen.normalisers, penalised
