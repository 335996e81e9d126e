"""The result copy: what the host learns of a step, in one copy off the device that begins with it and is read later."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from funitel.model_server.gpu_sampling.plan import SamplingPlan
from funitel.model_server.sampling.sampler import SampledToken, top_of


class Copy(Protocol):
    """A copy to the host in flight."""

    def wait(self) -> np.ndarray:
        """The numbers, once they are there; may be called again."""


class HostCopy:
    """A copy of numbers on a device [count] into pinned memory, behind all that was launched before it."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._there = numbers.clone()
            return
        self._there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._there.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # what waits sleeps
        self._event.record()

    def wait(self) -> np.ndarray:
        """See `Copy`."""
        if self._event is not None:
            self._event.synchronize()
        there: np.ndarray = self._there.numpy()
        return there


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """What sampling found for some rows, on the device; of `plan.tops` also the best of each, and all of its scores."""

    plan: SamplingPlan
    tokens: torch.Tensor  # [rows] int64
    logprobs: torch.Tensor  # [rows] float32, NaN where scores are broken
    nats: torch.Tensor | None = None  # [rows of mirostat] float32: how surprising the tokens were
    normalisers: torch.Tensor | None = None  # [tops] float32
    top_ids: torch.Tensor | None = None  # [tops, num_tops] int64
    top_scores: torch.Tensor | None = None  # [tops, num_tops] float32, the best first
    scores: torch.Tensor | None = None  # [tops, vocab_size] float32

    def numbers(self) -> torch.Tensor:
        """All that the host is to know, as float64, which holds every id and every float32: [count]."""
        parts = [self.tokens, self.logprobs, self.nats, self.normalisers, self.top_ids, self.top_scores]
        return torch.cat([part.double().flatten() for part in parts if part is not None])

    def read(self, numbers: np.ndarray) -> list[SampledToken]:
        """The tokens of the rows, of `numbers` on the host. Once only: strategies take note of them."""
        plan, count = self.plan, len(self.plan.rows)
        ids, logprobs = numbers[:count].astype(np.int64).tolist(), numbers[count : 2 * count].tolist()
        tops: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        begin = 2 * count
        if plan.strategies is not None and plan.strategies.observed is not None:
            begin += plan.strategies.observe(numbers[begin:])
        if plan.tops is not None:
            size, num_tops = len(plan.tops.rows), plan.num_tops
            rest = numbers[begin : begin + size * (1 + 2 * num_tops)]
            normalisers = rest[:size].astype(np.float32)
            top_ids, top_scores = rest[size:].reshape(2, size, num_tops)
            for place, row in enumerate(plan.tops.rows):
                best = top_scores[place].astype(np.float32), top_ids[place].astype(np.int64)
                tops[row] = self._top(place, plan.rows[row].sampling.top_n, *best, normalisers[place])
        return [
            SampledToken(token_id, logprob, *tops.get(row, ((), ())))
            for row, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True))
        ]

    def _top(
        self, place: int, top_n: int, scores: np.ndarray, ids: np.ndarray, normaliser: np.float32
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The most likely tokens of a row, as `top_of` gives them, from the best of its scores."""
        assert self.scores is not None
        threshold = scores[min(top_n, len(scores)) - 1]
        if scores[-1] == threshold > -np.inf and len(scores) < self.scores.shape[1]:  # more may be as likely
            return top_of(self.scores[place].cpu(), float(normaliser), top_n)
        is_in = (scores >= threshold) & (scores > -np.inf)
        scores, ids = scores[is_in], ids[is_in]
        order = np.lexsort((ids, -scores))
        return tuple(ids[order].tolist()), tuple((scores[order] - normaliser).tolist())


def read_plain(numbers: np.ndarray) -> list[SampledToken]:
    """The tokens of rows that want nothing but a token, where the plan is another rank's."""
    ids, logprobs = numbers.reshape(2, -1)
    pairs: Sequence[tuple[float, float]] = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return [SampledToken(int(token_id), logprob) for token_id, logprob in pairs]
