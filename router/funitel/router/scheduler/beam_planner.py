"""Beam planning: the beams of a search as rows of one step each, over shared blocks with copy-on-write. Pure.

A sequence that searches computes its prompt as any other does. From then on it is a running sequence that computes
nothing itself, and holds the blocks and states of its beams. In each step its beams are rows of their own, which begin
behind all but their last token and end with the step; the shards drop them then. What they bring is not their token but
the likeliest ones, of which the search chooses. A beam that goes on keeps its blocks. One that goes on twice shares its
full blocks, and the last one, partly filled, is copied; with it the state of a model with recurrent layers.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import count
from math import inf

from funitel.proto.step import BlockCopy, Generation, SequenceStart, StoppingParams
from funitel.router.core.beam_group import BeamEnding, BeamGroup, distinct
from funitel.router.core.beam_search import Beam
from funitel.router.core.request import Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.decode import RunningSet
from funitel.router.scheduler.plan import BeamStep
from funitel.router.scheduler.prefill import PrefillPlanner
from funitel.router.scheduler.state_checkpoints import StateCheckpoints
from funitel.router.scheduler.waiting_queue import FairShares

FIRST_ROW_ID = 2**63  # sequences have smaller ids


class BeamPlanner:
    """Plans the steps of the sequences in `running.searching`, and takes their results."""

    def __init__(
        self,
        blocks: BlockPool,
        shares: FairShares,
        running: RunningSet,
        prefill: PrefillPlanner,
        checkpoints: StateCheckpoints | None,
    ) -> None:
        self._blocks = blocks
        self._shares = shares
        self._running = running
        self._searching = running.searching
        self._prefill = prefill
        self._checkpoints = checkpoints
        self._row_ids = count(FIRST_ROW_ID)

    # Planning -------------------------------------------------------------------------------------------------------

    def missing_blocks(self) -> int:
        """Blocks to be granted before every search can go on."""
        return sum(self._num_missing(sequence, _group(sequence)) for sequence in self._searching.values())

    def _num_missing(self, sequence: Sequence, group: BeamGroup) -> int:
        if group.rows:
            return 0
        is_partial = sequence.num_computed % self._blocks.block_size > 0
        num_beams = len(group.search.beams)
        return num_beams - len(group.parents) if is_partial else num_beams

    def plan(self, load: StepLoad, held: Container[int] = ()) -> BeamStep | None:
        """Let every search that waits for no result take its next step, which is added to `load`; None without any.

        Those of the ids in `held`, and of other micro-batches than the one that is planned, sit it out.
        """
        starts: list[SequenceStart] = []
        copies: list[BlockCopy] = []
        rows: list[tuple[Sequence, tuple[int, ...]]] = []
        for sequence in self._searching.values():
            group = _group(sequence)
            if group.rows or sequence.id in held or sequence.micro_batch != self._running.micro_batch:
                continue
            begun = self._starts(sequence, group, copies)
            starts += begun
            group.rows = tuple(start.request_id for start in begun)
            rows.append((sequence, group.rows))
            load.num_decodes += len(begun)
            load.decode_context += len(begun) * (sequence.num_computed + 1)
            self._shares.charge(sequence, len(begun))
        return BeamStep(tuple(starts), tuple(copies), tuple(rows)) if rows else None

    def _starts(self, sequence: Sequence, group: BeamGroup, copies: list[BlockCopy]) -> list[SequenceStart]:
        """Give each beam its blocks and its state, and describe its row."""
        cached = sequence.num_computed
        base = self._prefill.to_start(sequence, 1)
        starts, tables, slots = [], [], []
        seen: set[int] = set()
        for beam in group.search.beams:
            is_first = beam.parent not in seen
            seen.add(beam.parent)
            table = self._table(group.tables[beam.parent], cached, copies, is_first=is_first)
            source = slot = 0
            if group.slots:
                source = group.slots[beam.parent]
                slot = source if is_first else group.spare_slots.pop()
                slots.append(slot)
            tables.append(table)
            starts.append(_row(base, next(self._row_ids), beam, table, cached, slot, source))
        group.tables, group.slots = tables, slots
        sequence.blocks[:] = distinct(tables)
        return starts

    def _table(self, parent: list[int], cached: int, copies: list[BlockCopy], *, is_first: bool) -> list[int]:
        """The blocks of a beam that goes on behind `cached` tokens; all but the first have their own last block."""
        num_full, num_partial = divmod(cached, self._blocks.block_size)
        if not num_partial:
            return [*parent, *self._blocks.allocate(1)]
        if is_first:
            return parent
        (block,) = self._blocks.allocate(1)
        copies.append(BlockCopy(parent[num_full], 0, is_load=False, to_block=block))
        return [*parent[:num_full], block]

    # Results --------------------------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, generation: Generation) -> BeamEnding | None:
        """Begin the search of a sequence with what its prompt brought; returns the answer if that is all."""
        group = _group(sequence)
        sequence.output_ids.clear()
        sequence.estimated_seconds = 0.0  # until a first token, which comes only with the last
        group.opening = generation
        group.tables = [list(sequence.blocks)]
        if self._checkpoints is not None:
            group.slots = [self._checkpoints.hand_over(sequence)]
        self._searching[sequence.id] = sequence
        return self._advance(sequence, group, [generation])

    def commit(self, step: BeamStep, by_id: Mapping[int, Generation]) -> list[tuple[Sequence, Generation]]:
        """Take a step's result into account; returns the sequences that have ended, and their answers.

        Searches that have left or begun again since the step was planned are skipped.
        """
        ended: list[tuple[Sequence, Generation]] = []
        for sequence, rows in step.rows:
            group = _group(sequence)
            if group.rows is not rows:
                continue
            group.rows = ()
            sequence.num_computed += 1
            found = [by_id[row] for row in rows]
            broken = next((each for each in found if not sum(each.tokens.logprobs) < inf), None)
            if broken is not None:
                sequence.is_broken = True
                ended.append((sequence, broken))
                continue
            ending = self._advance(sequence, group, found)
            if ending is not None:
                ended.append((sequence, ending))
        return ended

    def _advance(self, sequence: Sequence, group: BeamGroup, found: list[Generation]) -> BeamEnding | None:
        """Let a search choose of what a step brought, and free what no beam goes on from."""
        search = group.search
        search.advance([generation.top_tokens[0] for generation in found])
        if search.is_over:
            return group.ending(sequence.id)
        sequence.output_ids[:] = search.beams[0].ids[:-1]  # all that is computed
        parents = group.parents
        kept = distinct(group.tables[parent] for parent in sorted(parents))
        self._blocks.free(sorted(set(sequence.blocks).difference(kept)))
        sequence.blocks[:] = kept
        group.spare_slots += [slot for place, slot in enumerate(group.slots) if place not in parents]
        return None


def _group(sequence: Sequence) -> BeamGroup:
    assert sequence.beams is not None, "it does not search"
    return sequence.beams


def _row(
    base: SequenceStart, row_id: int, beam: Beam, table: list[int], cached: int, slot: int, source: int
) -> SequenceStart:
    """A row that computes the last token of a beam, and ends."""
    return replace(
        base,
        request_id=row_id,
        stopping=StoppingParams(max_new_tokens=len(beam.ids) + 1, ignore_eos=True),
        output_ids=beam.ids,
        blocks=tuple(table),
        cache_len=cached,
        prefill_logprobs=False,
        prompt_logprobs=None,
        state_slot=slot,
        state_from=source,
    )
