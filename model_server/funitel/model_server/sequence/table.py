"""The sequence table, the state of each running sequence on a shard, one row each; and the cached batches of rows.

A batch is a list of rows: concatenating is list addition, filtering is selection.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.sampling.grammar import FollowerState
from funitel.model_server.sampling.sampler import SamplingState
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher
from funitel.model_server.sequence.media_plan import MediaPlan
from funitel.model_server.sequence.output_records import SequenceRecord
from funitel.proto.errors import InvalidRequest, UnknownBatch
from funitel.proto.step import CachedBatch, FinishReason, RowUpdate, SequenceStart, StateSave
from funitel.proto.takeover.state import HeldBatch, HeldRow

HeldBatches = tuple[HeldBatch, ...]
"""All batches of a shard, as another router is told of them."""


class Gain(Protocol):
    """What drafts have gained in a row, see `speculation/gain`."""

    def next_width(self, limit: int) -> int:
        """How many drafts to ask for in this step, at most `limit`; counts the step."""

    def observe(self, num_drafts: int, num_accepted: int, most: int) -> None:
        """Take into account how many drafts of a step were accepted, where at most `most` may be asked for."""


@dataclass(slots=True)
class SequenceState:
    """One sequence. `tokens` are prompt and completion; KV is computed for the first `num_cached` of them.

    Where an encoder reads the prompt, that is the first `source_len` tokens, and the decoder begins behind them.
    """

    index: int  # place in the table
    start: SequenceStart
    tokens: list[int]
    prompt_len: int  # the tokens that the completion comes behind
    num_cached: int
    sampling: SamplingState
    detokenizer: Detokenizer
    stops: StopMatcher
    prompt_top: int | None = None  # so many likeliest tokens at each place of the prompt are wanted; None: no scores
    num_blocks: int = 0
    finish_reason: FinishReason | None = None
    prompt_scores: list[np.ndarray] = field(default_factory=list)  # see `executor/prompt_scores`
    grammar: FollowerState | None = None  # on the rank that samples
    source_len: int = 0
    is_over: bool = False  # it takes part in no further step
    has_left: bool = False  # its batch has ended
    num_placeholders: int = 0  # tokens that a device has sampled, or will have, and the host does not know yet
    state_saves: tuple[StateSave, ...] = ()  # in the next step
    speculate: int = 0  # drafts that it asks for in a step, at most
    gain: Gain | None = None
    counts_place: int | None = None  # where the device counts its tokens, see `gpu_sampling/plan`
    adapter: PlacedAdapter | None = None
    media: MediaPlan | None = None  # None: the prompt is text
    record: SequenceRecord | None = None  # of its outputs; None: they are not kept, or another rank does

    @property
    def request_id(self) -> int:
        """Id the router knows the sequence by."""
        return self.start.request_id

    def take(self, token_id: int) -> None:
        """Append the next completion token."""
        self.tokens.append(token_id)
        self.sampling.push(token_id)

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to compute; the last may be a placeholder for one that only the device knows."""
        tokens = self.tokens[self.num_cached : self.num_cached + count]
        if len(tokens) < count:
            tokens.append(-1 - self.index)  # see `ForwardBatch.build`
        return tokens

    @property
    def num_pending(self) -> int:
        """Known tokens without KV yet: one for a decoding row, none for a finished one.

        More in a prompt, and after tokens that were forced.
        """
        return 0 if self.is_over else len(self.tokens) + self.num_placeholders - self.num_cached

    @property
    def owes_prompt_scores(self) -> bool:
        """Whether scores of its prompt were asked for and no step that brings its first token was launched."""
        return self.prompt_top is not None and self.num_generated + self.num_placeholders == 0

    @property
    def is_scored_first(self) -> bool:
        """Whether scores of its prompt come with the next token that it takes."""
        return self.prompt_top is not None and self.num_generated == 0

    @property
    def num_generated(self) -> int:
        """Completion tokens so far."""
        return len(self.tokens) - self.prompt_len


class SequenceTable:
    """Preallocated block tables [capacity, max_blocks] and the rows that use them; grows by doubling up to `max_rows`.

    `max_rows` is None where nothing bounds them. `on_release` is told of each place that is given back.
    """

    on_release: Callable[[int], None] | None = None

    def __init__(self, max_blocks: int, capacity: int = 64) -> None:
        self.reset(max_blocks, capacity)

    def reset(self, max_blocks: int, capacity: int = 64, max_rows: int | None = None) -> None:
        """Forget all rows."""
        self.max_blocks = max_blocks
        self.max_rows = max_rows
        capacity = capacity if max_rows is None else min(capacity, max_rows)
        self._blocks = np.zeros((capacity, max_blocks), dtype=np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._blocks) - len(self._free)

    def take(self) -> int:
        """A free place.

        Raises:
            InvalidRequest: there is none, and there may be no more.
        """
        if not self._free:
            capacity = len(self._blocks)
            grown = 2 * capacity if self.max_rows is None else min(2 * capacity, self.max_rows)
            if grown == capacity:
                raise InvalidRequest(f"this shard has room for the states of {capacity} sequences, all of it is taken")
            self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks[: grown - capacity])])
            self._free = list(range(grown - 1, capacity - 1, -1))
        return self._free.pop()

    def release(self, rows: Iterable[SequenceState]) -> None:
        """Give the places of `rows` back."""
        places = [row.index for row in rows]
        self._free.extend(places)
        if self.on_release is not None:
            for place in places:
                self.on_release(place)

    def grant(self, row: SequenceState, blocks: Sequence[int]) -> None:
        """Append blocks to a row's block table.

        Raises:
            InvalidRequest: more blocks than the longest sequence needs.
        """
        end = row.num_blocks + len(blocks)
        if end > self.max_blocks:
            raise InvalidRequest(f"request {row.request_id} has {end} blocks, at most {self.max_blocks} are allowed")
        self._blocks[row.index, row.num_blocks : end] = blocks
        row.num_blocks = end

    def block_table(self, row: SequenceState) -> np.ndarray:
        """Blocks of a row, in order: [num_blocks] int32."""
        table: np.ndarray = self._blocks[row.index, : row.num_blocks]
        return table


class _EndedBatch(NamedTuple):
    """A batch of which all requests have ended in a step, and how many steps had begun with it."""

    batch_id: int
    request_ids: frozenset[int]
    num_steps: int


class CachedBatches:
    """Rows by batch id, with their places in the sequence table.

    Args:
        block_size: tokens of a KV block.
        max_prefill_tokens: budget of a step, shared by rows for which the router leaves the number of tokens open.
    """

    def __init__(self, block_size: int, max_prefill_tokens: int) -> None:
        self.block_size = block_size
        self.max_prefill_tokens = max_prefill_tokens
        self.table = SequenceTable(max_blocks=1)
        self._rows: dict[int, list[SequenceState]] = {}
        self.num_steps = 0  # begun
        self._ended: list[_EndedBatch] = []  # in the steps before
        self.num_ended_steps = 2  # that may be planned without knowledge of an end, as a router has three in flight
        self.before_use: Callable[[int | None], None] = lambda batch_id: None  # called before a batch, or all, is used

    def has_adapter(self, adapter: PlacedAdapter) -> bool:
        """Whether a row has this adapter; may be asked from any thread."""
        return any(row.adapter is adapter for rows in tuple(self._rows.values()) for row in tuple(rows))

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._rows

    def get(self, batch_id: int) -> list[SequenceState]:
        """The rows of a batch; none of one that is unknown."""
        return self._rows.get(batch_id, [])

    def rows_of(self, batch_id: int, is_ahead: bool = False) -> list[SequenceState]:
        """The rows of a batch; none of one that ended in the steps before, if `is_ahead`.

        Raises:
            UnknownBatch: there is no such batch.
        """
        self.before_use(batch_id)
        if batch_id in self._rows:
            return self._rows[batch_id]
        if is_ahead and any(ended.batch_id == batch_id for ended in self._ended):
            return []
        raise UnknownBatch(f"Batch ID {batch_id} not found in cache")

    def put(self, batch_id: int, rows: list[SequenceState]) -> None:
        """A step begins: these are the rows of a batch now, and what ended long enough ago is forgotten."""
        self._rows[batch_id] = rows
        self.num_steps += 1
        oldest = self.num_steps - self.num_ended_steps
        if self._ended:
            self._ended = [ended for ended in self._ended if ended.num_steps > oldest]

    def pop(self, batch_id: int) -> None:
        """Forget a batch with rows that are in another one now."""
        self._rows.pop(batch_id, None)

    def drop(self, rows: Sequence[SequenceState]) -> None:
        """Drop rows, whichever batch they are in now; a batch without rows is dropped too."""
        gone = set(map(id, rows))
        for batch_id, held in tuple(self._rows.items()):
            left = [row for row in held if id(row) in gone]
            if left:
                self.table.release(left)
                self._rows[batch_id] = [row for row in held if id(row) not in gone]
                if not self._rows[batch_id]:
                    del self._rows[batch_id]

    def mark_ended(self, batch_id: int, rows: Sequence[SequenceState], num_steps: int) -> None:
        """Take a batch of these rows for one that ended in a step, with which so many had begun."""
        self._ended.append(_EndedBatch(batch_id, frozenset(row.request_id for row in rows), num_steps))

    def keep(self, batch_id: int, request_ids: Sequence[int], is_ahead: bool) -> CachedBatch:
        """Keep only `request_ids` of a batch; if `is_ahead`, without those that ended with it in the steps before.

        Raises:
            UnknownBatch: unknown batch, nothing to keep, or a request that is not in it.
        """
        rows = self.rows_of(batch_id, is_ahead)
        if not rows:
            return CachedBatch(batch_id, ())
        keep = set(request_ids)
        if not keep:
            raise UnknownBatch(f"filtering batch {batch_id} must keep at least one request")
        unknown = keep - {row.request_id for row in rows} - (self._gone if is_ahead else frozenset())
        if unknown:
            raise UnknownBatch(f"batch {batch_id} holds no request {min(unknown)}")
        self.table.release(row for row in rows if row.request_id not in keep)
        self._rows[batch_id] = [row for row in rows if row.request_id in keep]
        return self.describe(batch_id)

    def clear(self, batch_id: int | None = None) -> None:
        """Drop one batch, or all; an unknown one is no error."""
        self.before_use(batch_id)
        if batch_id is None:
            self._ended = []
        for known in list(self._rows) if batch_id is None else [batch_id]:
            self.table.release(self._rows.pop(known, []))

    def hold(self) -> HeldBatches:
        """All batches with what the router that made them knows of their rows."""
        self.before_use(None)
        return tuple(HeldBatch(batch_id, tuple(map(self._held, rows))) for batch_id, rows in self._rows.items())

    def _held(self, row: SequenceState) -> HeldRow:
        start, blocks = row.start, tuple(self.table.block_table(row).tolist())
        return HeldRow(
            row.request_id,
            start.output_key,
            blocks,
            row.num_cached,
            len(row.tokens),
            start.state_slot,
            start.adapter_id,
        )

    def describe(self, batch_id: int) -> CachedBatch:
        """What the router is told of a batch."""
        rows = self._rows[batch_id]
        held = sum(row.num_blocks for row in rows) * self.block_size
        following = self.following([row.num_pending for row in rows])
        return CachedBatch(batch_id, tuple(row.request_id for row in rows), held, following)

    def following(self, pending: Sequence[int]) -> int:
        """Tokens of a step of which nothing else is said, over rows that have so many to compute."""
        least = sum(count > 0 for count in pending)
        room = max(0, self.max_prefill_tokens - len(pending))  # beyond one token each
        return least + min(sum(pending) - least, room)

    def updates_of_rows_left(self, updates: Sequence[RowUpdate]) -> Sequence[RowUpdate]:
        """Row updates without those of rows that are gone because their batch ended in the steps before."""
        if not self._ended:
            return updates
        gone = self._gone
        return [update for update in updates if update.request_id not in gone]

    @property
    def _gone(self) -> frozenset[int]:
        """Requests of the batches that ended in the steps before."""
        return frozenset().union(*(ended.request_ids for ended in self._ended))

    def counts(
        self,
        running: Sequence[SequenceState],
        new: Sequence[SequenceState],
        updates: Sequence[RowUpdate],
        is_ahead: bool,
    ) -> list[int]:
        """Tokens each row computes in this step.

        The router says so for new rows (`start.chunk_len`, else all) and in `updates`; what it leaves open shares
        the prefill budget, at least one token each. One that plans ahead means one token exactly.
        """
        asked = {update.request_id: update.chunk_len for update in updates}
        first = [_within(row.num_pending, row.start.chunk_len) for row in new]
        budget = self.max_prefill_tokens - sum(first) - len(running) + 1
        counts = []
        for row in running:
            count = asked.get(row.request_id)
            if is_ahead:
                count = 1 if count is None else count
            elif count is None and row.num_pending > 1:
                count = max(1, min(budget, row.num_pending))
                budget -= count - 1
            counts.append(_within(row.num_pending, count))
        return counts + first

    def grant(self, rows: Sequence[SequenceState], updates: Sequence[RowUpdate]) -> None:
        """Append the blocks of `updates` to the block tables of their rows, and note which states are to be saved."""
        by_id = {row.request_id: row for row in rows}
        for update in updates:
            row = by_id[update.request_id]
            if update.speculate is not None:
                row.speculate = update.speculate
            row.state_saves = (*row.state_saves, *update.state_saves)
            self.table.grant(row, update.blocks)


def _within(pending: int, asked: int | None) -> int:
    return pending if asked is None else min(asked, pending)
