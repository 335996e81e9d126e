"""The model runner: the pool of a rank with its host tier, and the forward of a step's rows over it."""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from funitel.model_server.device.parked_tensors import SleepState
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.executor.admit import StepBounds
from funitel.model_server.executor.interface import ActiveRow, ExecutorOptions
from funitel.model_server.executor.media_rules import choose_rules
from funitel.model_server.executor.row_rules import RowRules
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import BlockSlots, KVCache, Pools
from funitel.model_server.sequence.table import SequenceState, SequenceTable
from funitel.model_server.spec.model_spec import ModelFacts
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import BlockCopy, RowUpdate

T = TypeVar("T")

Forwarded = tuple[ForwardBatch, list[int], torch.Tensor | None]
"""A forward: the batch, the places of its rows in the sequence table, and hidden states, see `Drafter.observe`."""


class ModelRunner:
    """Runs the model of one rank. There is no pool before the warm-up."""

    def __init__(
        self,
        spec: ModelFacts,
        decoder: Forward,
        pools: Pools,
        parallel: TensorParallel,
        options: ExecutorOptions,
        rules: RowRules | None,
        table: SequenceTable,
    ) -> None:
        self.spec = spec
        self.decoder = decoder
        self.pools = pools
        self.parallel = parallel
        self.options = options
        self.rules = choose_rules(rules, pools, options.media)
        self.table = table
        self.sleep_state = SleepState(options.memory_device)
        self.cache: KVCache | None = None
        self.host: BlockSlots | None = None
        self._unwritten: set[int] = set()  # slots of this rank's file
        self.is_in_doubt = False  # a call with copies has failed
        self.scratch_slots: Sequence[int] = ()  # of the state pool, for states before drafts; no sequence's
        self.keeps_forwarded = False  # for a drafter that reads them
        self._forwarded: list[Forwarded] = []

    @property
    def pool(self) -> KVCache:
        """The pool.

        Raises:
            InvalidRequest: there is none yet.
        """
        if self.cache is None:
            raise InvalidRequest("Warmup must come before the first step")
        return self.cache

    @property
    def bounds(self) -> StepBounds:
        """What steps stay within."""
        context, states = self.spec.max_position_embeddings, self.pool.state_pool
        num_states = 0 if self.pool.max_rows is None else 1 + self.pool.max_rows
        if states is not None:
            num_states = states.num_slots - len(self.scratch_slots)
        return StepBounds(self.pool.num_blocks, self.table.max_blocks, self.options.block_size, context, num_states)

    def spans(self, active: Sequence[ActiveRow]) -> list[RowSpan]:
        """What each row computes."""
        return [self.rules.span(row, count, self.table.block_table(row)) for row, count in active]

    def forward(self, spans: Sequence[RowSpan], device_tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run one forward; logits as `Forward` gives them. `device_tokens`: see `ForwardBatch.build`."""
        batch = ForwardBatch.build(spans, self.options.block_size, self.options.device, device_tokens)
        logits = self.decoder(batch, self.pool)
        if self.keeps_forwarded:
            self._forwarded.append((batch, [span.row_index for span in batch.rows], batch.hidden))
        return logits

    def take_forwarded(self) -> list[Forwarded]:
        """The forwards since the last call, if they are kept."""
        forwarded, self._forwarded = self._forwarded, []
        return forwarded

    def wipe(self, new: Sequence[SequenceState], updates: Sequence[RowUpdate]) -> None:
        """Zero what rows are granted beyond what they find computed, where that is read before it is written."""
        if not self.options.wipes_blocks:
            return
        size = self.options.block_size
        granted = [block for row in new for block in row.start.blocks[-(-row.start.cache_len // size) :]]
        granted += [block for update in updates for block in update.blocks]
        if granted:
            self.pool.wipe(granted)

    def copy_states(self, new: Sequence[SequenceState]) -> None:
        """Give rows that begin behind a cached prefix the state after it, in their order."""
        states = self.pool.state_pool
        if states is None:
            return
        for row in new:
            if row.start.state_from not in (0, row.start.state_slot):
                states.copy(row.start.state_from, row.start.state_slot)

    def check_copies(self, copies: Sequence[BlockCopy]) -> None:
        """Raise InvalidRequest for a copy to another block, or to or from the host's memory, that cannot be made."""
        slotted = [copy for copy in copies if copy.to_block is None]
        if slotted and self.host is None:
            raise InvalidRequest(f"{len(slotted)} copies of blocks: this shard keeps none in the host's memory")
        if self.host is not None:
            self.host.check(slotted)
        for copy in copies:
            if copy.to_block is not None:
                self.pool.check_copy(copy.block, copy.to_block)

    def carrying(self, call: Callable[[], T]) -> T:
        """Make a call that brings copies. If it fails, no slot of a file is read or written before `trust`.

        For a later call may be planned over what this one was to bring, and what it writes would outlive the process.
        """
        is_done = False
        try:
            result = call()
            is_done = True
            return result
        finally:
            self.is_in_doubt |= not is_done

    def trust(self) -> None:
        """Nothing is planned any more over a call that has failed: the router begins anew."""
        self.is_in_doubt = False

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> tuple[int, ...]:
        """Make copies that were checked, in their order.

        Returns the slots that some rank has lost, the same on every rank: the step must not be computed then. A slot
        that could not be written is among them once another is to be read and cannot be.
        """
        failed: set[int] = set()
        has_loads, is_disk = False, self.host is not None and self.host.is_disk
        for copy in copies:
            if copy.to_block is not None:
                self.pool.copy(copy.block, copy.to_block)
                continue
            has_loads |= copy.is_load
            if self.host is None or (is_disk and self.is_in_doubt) or not self.host.carry_out(copy):
                (failed if copy.is_load or self.is_in_doubt else self._unwritten).add(copy.slot)
            else:
                self._unwritten.discard(copy.slot)
        if not is_disk or not (has_loads or failed):
            return ()
        lost = self._agreed_on_lost(failed) if has_loads else failed | self._unwritten
        self.is_in_doubt |= bool(lost)
        if lost:
            self._unwritten.clear()
        return tuple(sorted(lost))

    def _agreed_on_lost(self, failed: set[int]) -> set[int]:
        """Slots that any rank has lost, if it is to read one of them now."""
        if self.parallel.smallest(0 if failed else 1):
            return set()
        told = self.parallel.exchange(json.dumps(sorted(failed | self._unwritten)))
        return {slot for slots in map(json.loads, told) for slot in slots}
