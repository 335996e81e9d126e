"""The sampler of a GPU, which never makes the host wait: tokens stay on the device, where the next step reads them.

It does what `sampler.sample` does, in that order and with the same noise, over all rows at once. Masks of grammars and
the watermark are brought by the caller. Rows with a decoding strategy pass it one by one, in torch; some make the host
wait for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.gpu_sampling.ops import Draws, ScoreMaths
from funitel.model_server.gpu_sampling.plan import RowStates, SamplingPlan
from funitel.model_server.gpu_sampling.result_copy import SampledBatch
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.gumbel_noise import noise_keys
from funitel.model_server.sampling.sampler import Watermark
from funitel.model_server.sequence.table import SequenceState

_BITS = 32  # of a word of a mask


class DeviceSampler:
    """Chooses tokens on the device of `states` and keeps these up to date."""

    def __init__(self, states: RowStates, maths: ScoreMaths) -> None:
        self.maths = maths
        self._states = states

    def sample(
        self,
        logits: torch.Tensor,
        plan: SamplingPlan,
        positions: np.ndarray,
        masks: TokenMasks | None = None,
        marks: TokenMasks | None = None,
        delta: float = 0.0,
    ) -> SampledBatch:
        """Choose the next token of every row of `plan`.

        Args:
            logits: [rows, vocab_size] float32; changed in place.
            plan: of the rows.
            positions: [rows], index in its sequence of the token that each row is about to get.
            masks: tokens that grammars allow, of rows that have one.
            marks: tokens that the watermark favours, of rows that have it, and by how much it does.
        """
        is_broken = ~(logits.amax(dim=1) < torch.inf)
        raw = None if plan.raw is None else plan.raw.of_matrix(logits).clone()
        self._edit(logits, plan, positions, marks, delta)
        if masks is not None:
            allowed, rows = self._bits(masks, logits.shape[1]), self._rows(masks)
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, -torch.inf))
        keys = None if plan.draws is None else self._keys(plan.draws, positions)
        strategies = None if plan.strategies is None else plan.strategies.begin(logits, positions)
        chosen = self.maths.choose(logits, plan.draws, keys, None if strategies is None else strategies.narrow)
        tokens, scores, normalisers = chosen.tokens, chosen.scores, chosen.normalisers
        if strategies is not None:
            strategies.put(logits, chosen)
        observed = plan.strategies and plan.strategies.observed
        nats = observed.of_matrix(normalisers - scores) if observed else None
        if plan.raw is not None and raw is not None:
            raw.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
            plan.raw.put(logits, raw)
            plan.raw.put(scores, raw.gather(1, plan.raw.of_matrix(tokens)[:, None])[:, 0])
            plan.raw.put(normalisers, raw.logsumexp(dim=-1))
        logprobs = (scores - normalisers).masked_fill_(is_broken, torch.nan)
        self._states.push(plan.slots, tokens)
        if plan.penalties is not None:
            self._states.count(plan.penalties.places, plan.penalties.some.of_matrix(tokens))
        if plan.tops is None:
            return SampledBatch(plan, tokens, logprobs, nats)
        tops = plan.tops.of_matrix(logits).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        best = tops.topk(plan.num_tops, dim=-1)
        return SampledBatch(
            plan, tokens, logprobs, nats, plan.tops.of_matrix(normalisers), best.indices, best.values, tops
        )

    def _edit(
        self, scores: torch.Tensor, plan: SamplingPlan, positions: np.ndarray, marks: TokenMasks | None, delta: float
    ) -> None:
        """Watermark, biases and penalties, in place."""
        if marks is not None:
            is_green, rows = self._bits(marks, scores.shape[1]), self._rows(marks)
            marked = scores.index_select(0, rows)
            scores.index_copy_(0, rows, torch.where(is_green, marked + delta, marked))
        if (biases := plan.biases) is not None:
            places = biases.rows, biases.ids
            scores.index_put_(places, scores[places] + biases.values)
        if (penalties := plan.penalties) is not None:
            counted = (positions - plan.source_lens)[penalties.some.rows]
            lengths = upload(counted.astype(np.float32)[:, None], scores.device)
            self.maths.penalise(scores, penalties, self._states.counts, lengths)

    def _keys(self, draws: Draws, positions: np.ndarray) -> torch.Tensor:
        """Which rows are drawn, and the upper and lower halves of the keys of their noise: [3, rows] int32."""
        rows = draws.some.rows
        keys = noise_keys(draws.seeds, positions[rows])
        lines = np.zeros((3, len(positions)), dtype=np.uint32)
        lines[:, rows] = np.ones_like(keys), keys >> np.uint64(32), keys & np.uint64(0xFFFFFFFF)
        return upload(lines.view(np.int32), self._states.device)

    def _rows(self, masks: TokenMasks) -> torch.Tensor:
        return upload(np.array(masks.rows, dtype=np.int64), self._states.device)

    def _bits(self, masks: TokenMasks, vocab_size: int) -> torch.Tensor:
        """Masks as [rows, vocab_size] bool."""
        words = upload(masks.bits, self._states.device)
        places = torch.arange(_BITS, dtype=torch.int32, device=words.device)
        return ((words[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size].bool()


DueRow = tuple[SequenceState, int | None]
"""A row due a token, and which that must be; None where it is sampled."""


@dataclass(slots=True)
class Due:
    """Of a step's logits: the rows due a token, and places of those to be sampled."""

    rows: list[DueRow] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

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
    has_logits: Sequence[bool],
    forced: Callable[[SequenceState], int | None],
) -> Due:
    """Which rows are due a token. Of a row that the host follows it is known by now whether it has ended."""
    due = Due()
    with_logits = [each for each, has in zip(active, has_logits, strict=True) if has]
    for place, (row, count) in enumerate(with_logits):
        has_ended = row.finish_reason is not None and row.sampling.follows_tokens
        if row.num_pending != count or has_ended:
            continue
        token_id = forced(row)
        due.rows.append((row, token_id))
        if token_id is None:
            due.places.append(place)
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
        if counted and self._parallel.is_root:
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
