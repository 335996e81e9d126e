"""Sampling of a step's tokens on the device: which rows are due one, what it is, and that every rank knows it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.device.upload import upload
from funitel.model_server.gpu_sampling.ops import ScoreMaths
from funitel.model_server.gpu_sampling.plan import SamplingPlan
from funitel.model_server.gpu_sampling.result_copy import SampledBatch
from funitel.model_server.gpu_sampling.row_state import RowStates
from funitel.model_server.gpu_sampling.sampler import DeviceSampler, follows_tokens
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.sampler import token_logprobs
from funitel.model_server.sampling.watermark import Watermark
from funitel.model_server.sequence.table import SequenceState

DueRow = tuple[SequenceState, int | None]
"""A row due a token, and which that must be; None where it is sampled."""


@dataclass(slots=True)
class Due:
    """Of a step's logits: the rows due a token, places of those to be sampled, and log-probabilities of prompts."""

    rows: list[DueRow] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    prompts: list[tuple[SequenceState, torch.Tensor]] = field(default_factory=list)

    @property
    def sampled(self) -> list[SequenceState]:
        """The rows with a token to be sampled."""
        return [row for row, token_id in self.rows if token_id is None]

    @property
    def forced(self) -> list[tuple[SequenceState, int]]:
        """The other rows, with their tokens."""
        return [(row, token_id) for row, token_id in self.rows if token_id is not None]


def due_of(
    active: Sequence[tuple[SequenceState, int]],
    wanted: Sequence[str],
    logits: torch.Tensor | None,
    forced: Callable[[SequenceState], int | None],
) -> Due:
    """Which rows are due a token. Of a row that the host follows it is known by now whether it has ended."""
    due, at = Due(), 0
    for (row, count), which in zip(active, wanted, strict=True):
        num_logits = {"none": 0, "last": 1, "all": count}[which]
        at += num_logits
        if which == "all" and logits is not None:
            first = row.num_cached + 1
            following = row.tokens[first : first + count]  # the token after each computed one, if known
            ids = upload(np.array(following, dtype=np.int64), logits.device)
            own = logits[at - count : at - count + len(following)]
            due.prompts.append((row, token_logprobs(own, ids)))
        has_ended = row.finish_reason is not None and follows_tokens(row.start.sampling)
        if num_logits and row.num_pending == count and not has_ended:
            token_id = forced(row)
            due.rows.append((row, token_id))
            if token_id is None:
                due.places.append(at - 1)
    return due


class StepSampler:
    """Samples the tokens of steps, on the rank that has logits."""

    def __init__(self, states: RowStates, maths: ScoreMaths, parallel: TensorParallel, watermark: Watermark) -> None:
        self._states = states
        self._sampler = DeviceSampler(states, maths)
        self._parallel = parallel
        self._watermark = watermark
        self._plan: SamplingPlan | None = None  # of the rows that were sampled last

    def sample(self, rows: Sequence[SequenceState], places: Sequence[int], logits: torch.Tensor) -> SampledBatch:
        """Sample for rows, each of which has its logits at one of the places."""
        if len(places) < len(logits):
            logits = logits.index_select(0, upload(np.array(places, dtype=np.int64), logits.device))
        if self._plan is None or not self._plan.is_of(rows):
            self._plan = SamplingPlan.of(rows, self._states, self._sampler.maths)
        positions = np.array([len(row.tokens) + row.num_placeholders for row in rows], dtype=np.int64)
        vocab_size = logits.shape[1]
        masks = TokenMasks.of([row.grammar for row in rows], vocab_size)
        marked = {i: row.sampling.favoured(vocab_size) for i, row in enumerate(rows) if row.start.sampling.watermark}
        marks = TokenMasks.naming(marked, vocab_size)
        return self._sampler.sample(logits, self._plan, positions, masks, marks, self._watermark.delta)

    def force(self, forced: Sequence[tuple[SequenceState, int]]) -> None:
        """Have rows go on with tokens that must follow; on every rank."""
        if not forced:
            return
        numbers = np.array([(row.index, token_id) for row, token_id in forced], dtype=np.int64).T.copy()
        slots, tokens = upload(numbers, self._states.device)
        self._states.push(slots, tokens)
        counted = [(self._states.place_of(row), token) for row, token in forced if row.start.sampling.has_penalties]
        if counted and self._parallel.rank == 0:
            self._states.count(*upload(np.array(counted, dtype=np.int64).T.copy(), self._states.device))

    def shared(self, due: Sequence[SequenceState], sampled: SampledBatch | None, *, in_words: bool) -> torch.Tensor:
        """What was sampled, as numbers on the device; on every rank, unless they share it in words."""
        num_numbers = 0 if in_words else 2 * len(due)
        device = self._states.device
        numbers = torch.zeros(num_numbers, dtype=torch.float64, device=device) if sampled is None else sampled.numbers()
        if self._parallel.size == 1 or in_words or not due:
            return numbers
        self._parallel.broadcast(numbers)
        if sampled is None:
            slots = upload(np.array([row.index for row in due], dtype=np.int64), device)
            self._states.push(slots, numbers[: len(due)].long())
        return numbers
