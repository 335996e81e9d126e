"""The speculator of an executor: which rows of a step have drafts, how many, and what a drafter sees of the steps."""

import json
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.sequence.table import SequenceState, SequenceTable
from funitel.model_server.speculation.gain import Gains
from funitel.model_server.speculation.interface import Drafter, DraftRow

MAX_STEP_DRAFTS = 64  # of all rows: beyond it a step is bound by arithmetic, and a draft costs what a token does


@runtime_checkable
class KeepsRows(Protocol):
    """A drafter that keeps something of each row."""

    def forget_all_but(self, request_ids: frozenset[int]) -> None:
        """Drop what belongs to other rows."""


class SharedDrafter:
    """A drafter of which the drafts differ between ranks, by rounding: every rank gets those of rank 0."""

    def __init__(self, drafter: Drafter, parallel: TensorParallel) -> None:
        self.name = drafter.name
        self.hidden_layers = drafter.hidden_layers
        self._drafter = drafter
        self._parallel = parallel

    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """See Drafter."""
        self._drafter.observe(batch, next_ids, hidden)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        drafts = self._drafter.propose(rows)
        if self._parallel.size == 1:
            return drafts
        found: list[list[int]] = json.loads(self._parallel.share(json.dumps(drafts)))
        return found


class Speculator:
    """Chooses drafts for the rows of a step. Every rank makes the same calls and gets the same drafts.

    Args:
        drafter: makes the drafts.
        max_drafts: of a row in a step, whatever it asks for.
        observes: whether the drafter reads the forwards of the target.

    `max_step_drafts` are those of all rows of a step; fewer where each needs a slot for a state.
    """

    def __init__(self, drafter: Drafter, max_drafts: int, *, observes: bool = False) -> None:
        self.drafter = drafter
        self.max_drafts = max_drafts
        self.observes = observes
        self.max_step_drafts = MAX_STEP_DRAFTS
        self._gains = Gains()

    def propose(
        self, active: Sequence[tuple[SequenceState, int]], table: SequenceTable, block_size: int, context: int
    ) -> dict[int, list[int]]:
        """The drafts of a step, by the places of their rows in `active`; none for rows that are left out.

        A row has drafts if it decodes and asks for some, as many as its blocks, its maximum length and the model's
        `context` leave room for. Steps that score prompts have none.
        """
        asking = [i for i, (row, count) in enumerate(active) if row.speculate and count == 1]
        if not asking or any(row.owes_prompt_scores for row, _ in active):
            return {}
        share = max(1, self.max_step_drafts // len(asking))
        places, rows, left = [], [], self.max_step_drafts
        for i in asking:
            row = active[i][0]
            room = min(share, left, self._room(row, block_size, context))
            if room > 0 and (limit := self._asked(row, room)):
                left -= limit
                places.append(i)
                rows.append(DraftRow(row.request_id, row.tokens, table.block_table(row), limit))
        if isinstance(self.drafter, KeepsRows):
            self.drafter.forget_all_but(frozenset(row.request_id for row, _ in active))
        if not rows:
            return {}
        return {i: drafts for i, drafts in zip(places, self.drafter.propose(rows), strict=True) if drafts}

    def note(self, row: SequenceState, num_drafts: int, num_accepted: int) -> None:
        """Learn from a row's drafts that were verified."""
        assert row.gain is not None
        row.gain.observe(num_drafts, num_accepted, self.max_drafts)

    def _room(self, row: SequenceState, block_size: int, context: int) -> int:
        if row.num_pending != 1 or not row.num_generated or row.sampling.strategy is not None:
            return 0
        length = len(row.tokens)
        return min(
            row.speculate,
            self.max_drafts,
            min(row.num_blocks * block_size, context) - length,
            row.start.stopping.max_new_tokens - row.num_generated - 1,
        )

    def _asked(self, row: SequenceState, room: int) -> int:
        if row.gain is None:
            params = row.sampling.params
            key = params.is_sampled, bool(params.grammar)
            row.gain = self._gains.begin(key, self.max_drafts)
        return row.gain.next_width(room)


def next_ids(batch: ForwardBatch, known: Sequence[Sequence[int]], computed: Sequence[int]) -> torch.Tensor:
    """What a drafter is told: the token behind each of a batch's, [num_tokens] int64, -1 where it is not known.

    Args:
        batch: of the forward.
        known: by row, in the batch's order, all tokens that it has with this step.
        computed: by row, how many of them have keys and values; behind them are rejected drafts.
    """
    found = []
    for span, tokens, count in zip(batch.rows, known, computed, strict=True):
        end = min(span.end, count)
        following = np.array(tokens[span.start + 1 : end + 1], dtype=np.int64)
        line = np.full(len(span.tokens), -1, dtype=np.int64)
        line[: len(following)] = following
        found.append(line)
    return torch.from_numpy(np.concatenate(found)).to(batch.input_ids.device)
