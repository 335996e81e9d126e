"""Decode: the running sequences, their blocks, and what each computes in the next step beside prompt tokens. Pure.

Most of them just decode: a token a step, in blocks they have. For how many steps that goes on is known ahead
(`Sequence.num_plain_steps`), and until then nothing is asked about them; all others are `not_plain`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from funitel.router.core.request import Sequence, is_background
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.state_checkpoints import StateCheckpoints
from funitel.router.scheduler.waiting_queue import FairShares

HELD = 0  # tokens pending of a sequence that sits the step out


@dataclass(slots=True)
class DecodePart:
    """What running sequences compute in a step: a token each that is decoding, and so far nothing of a prompt."""

    computed: dict[int, int] = field(default_factory=dict)  # tokens by id
    updates: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # blocks granted, tokens pending
    with_pending: list[Sequence] = field(default_factory=list)  # have more to compute
    load: StepLoad = field(default_factory=StepLoad)
    spare_blocks: int | None = None  # that no sequence must have; None: not counted yet
    num_reserved: int = 0  # blocks that drafts leave free
    num_held: int = 0  # of batches, that sit the step out
    held_searches: set[int] = field(default_factory=set)  # those of them with beams


class RunningSet:
    """Sequences by id, oldest first, with their blocks."""

    def __init__(
        self,
        blocks: BlockPool,
        shares: FairShares,
        checkpoints: StateCheckpoints | None,
        num_micro_batches: int = 1,
    ) -> None:
        self.micro_batch = 0  # the one that is planned
        self.sizes = [0] * num_micro_batches  # sequences of each
        self.by_id: dict[int, Sequence] = {}
        self.is_disordered = False  # some of them have entered behind newer ones
        self.searching: dict[int, Sequence] = {}  # with beams, which are rows in its place
        self._blocks = blocks
        self._checkpoints = checkpoints
        self._shares = shares
        self.num_speculating = 0  # sequences that may have drafts
        self.drafts_pay = True
        self._not_plain: dict[int, Sequence] = {}

    @property
    def not_plain(self) -> Mapping[int, Sequence]:
        """Those that do not just decode: with prompts or forced spans, in need of a block, or at their end."""
        return self._not_plain

    def enter(self, sequence: Sequence) -> None:
        """Let a sequence run that has got its blocks, in the micro-batch that is planned."""
        if not self.by_id:
            self.is_disordered = False
        elif next(reversed(self.by_id)) > sequence.id:
            self.is_disordered = True
        sequence.micro_batch = self.micro_batch
        self.sizes[self.micro_batch] += 1
        self.by_id[sequence.id] = sequence
        self.num_speculating += sequence.request.speculate > 0
        self.mark_not_plain(sequence)

    def mark_not_plain(self, sequence: Sequence) -> None:
        """Examine a sequence again in the next step: it did not go on as predicted."""
        sequence.num_plain_steps = 0
        self._not_plain[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> bool:
        """Take out a sequence, if it runs, and free its blocks; whether it did."""
        if self.by_id.pop(sequence.id, None) is None:
            return False
        self.sizes[sequence.micro_batch] -= 1
        self.num_speculating -= sequence.request.speculate > 0
        self._not_plain.pop(sequence.id, None)
        self._blocks.free(sequence.blocks)
        sequence.blocks.clear()
        if self._checkpoints is not None:
            self._checkpoints.leave(sequence)
        if sequence.beams is not None:
            self.searching.pop(sequence.id, None)
            slots = sequence.beams.restart()
            if self._checkpoints is not None:
                self._checkpoints.release(slots)
        return True

    @property
    def num_rows(self) -> int:
        """Rows that a step may have of them."""
        return len(self.by_id) + sum(beams.params.width - 1 for s in self._not_plain.values() if (beams := s.beams))

    def forget_steps(self) -> None:
        """No step is in flight any more, and what those did is not taken into account."""
        for sequence in self.by_id.values():
            sequence.in_flight.clear()
            if self._checkpoints is not None:
                self._checkpoints.forget_saves(sequence)
            self.mark_not_plain(sequence)

    def missing_blocks(self) -> int:
        """Blocks to be granted before every sequence can compute what it holds."""
        size = self._blocks.block_size
        missing = 0
        for sequence in self._not_plain.values():
            computed, pending = sequence.ahead()
            if sequence.request.speculate:
                computed = self.reach(sequence, computed)
            missing += max(0, -(-(computed + pending) // size) - len(sequence.blocks))
        return missing

    def reach(self, sequence: Sequence, computed: int) -> int:
        """Tokens that the steps in flight can have computed at most; drafts stay within the blocks that there are.

        `computed` are those without drafts.
        """
        if not sequence.request.speculate:
            return computed
        held = len(sequence.blocks) * self._blocks.block_size
        return max(computed, min(sequence.most_ahead(computed), held))

    def awaits_first_token(self) -> bool:
        """Whether a sequence that is none of a batch computes its prompt."""
        return any(
            not sequence.output_ids and not is_background(sequence.request.key) and sequence.ahead()[1] > 1
            for sequence in self._not_plain.values()
        )

    def decode(self, max_background: int | None = None, *, num_reserved: int = 0) -> DecodePart:
        """Let every decoding sequence compute a token in the next step, and grant all of them the blocks they need.

        Where micro-batches take turns, those of the one that is planned.

        One that ends with a step in flight computes nothing. Of batches the oldest compute, so many rows or one
        sequence; others are held. Drafts leave `num_reserved` blocks free.
        """
        part = DecodePart(num_reserved=num_reserved)
        computed = part.computed
        num_plain = context = num_background = 0
        charged: Counter[bytes] = Counter()
        micro_batch, is_only = self.micro_batch, len(self.sizes) == 1
        for i, sequence in self.by_id.items():
            if not is_only and sequence.micro_batch != micro_batch:
                continue
            if max_background is not None and is_background(sequence.request.key):
                is_first, num_background = not num_background, num_background + sequence.num_rows
                if not max_background or (num_background > max_background and not is_first):
                    part.num_held += 1
                    if sequence.is_searching:
                        part.held_searches.add(i)  # it has no row of its own to be held
                    else:
                        part.updates[i] = (), HELD
                    continue
            if sequence.num_plain_steps:
                sequence.num_plain_steps -= 1
                if not sequence.num_plain_steps:
                    self._not_plain[i] = sequence
                computed[i] = 1
                num_plain += 1
                context += sequence.num_computed
                charged[sequence.request.key] += 1
            else:
                self._examine(sequence, part)
        for key, count in charged.items():
            self._shares.charge_key(key, count)
        part.load.num_decodes += num_plain
        part.load.decode_context += context + num_plain
        return part

    def _examine(self, sequence: Sequence, part: DecodePart) -> None:
        begun, pending = sequence.ahead()
        if not pending:
            return
        most = begun + 1  # tokens computed with this step
        if sequence.request.speculate:
            most, granted = self._grant_drafts(sequence, begun, pending, part)
        else:
            granted = self._grant(sequence, begun + pending)
        checkpoints = self._checkpoints
        if (
            granted
            or pending > 1
            or (sequence.request.speculate and sequence.has_drafts != self.drafts_pay)
            or (checkpoints is not None and checkpoints.is_due(sequence, self.reach(sequence, begun), most))
        ):
            part.updates[sequence.id] = granted, pending
        count = part.computed[sequence.id] = int(sequence.brings_token(begun, pending))
        if pending > count:
            part.with_pending.append(sequence)
        if not count:
            return
        part.load.num_decodes += 1
        part.load.decode_context += sequence.num_known
        self._shares.charge(sequence, 1)
        if pending == 1 and sequence.num_pending == 1 and not sequence.num_repeated:
            self._mark_plain(sequence, most)

    def _mark_plain(self, sequence: Sequence, computed: int) -> None:
        """Predict how often a sequence just decodes: until it may need a block, or have its maximum length.

        With this step it has computed at most so many tokens.
        """
        end = min(sequence.max_known - 1, len(sequence.blocks) * self._blocks.block_size)
        if self._checkpoints is not None:
            end = min(end, self._checkpoints.next_due(computed) - 1)
        num_steps = (end - computed) // (1 + sequence.request.speculate)
        if num_steps > 0:
            sequence.num_plain_steps = num_steps
            del self._not_plain[sequence.id]

    def _grant_drafts(
        self, sequence: Sequence, begun: int, pending: int, part: DecodePart
    ) -> tuple[int, tuple[int, ...]]:
        """Grant what a step needs that may have drafts; blocks for these only if no other sequence needs them.

        Returns the most tokens that are computed with it, and the blocks.
        """
        if part.spare_blocks is None:
            part.spare_blocks = self._blocks.num_free - self.missing_blocks() - part.num_reserved
        granted = self._grant(sequence, self.reach(sequence, begun) + pending)
        wanted = sequence.most_ahead(begun + pending, 1)
        missing = self._blocks.blocks_for(wanted) - len(sequence.blocks)
        if 0 < missing <= part.spare_blocks:
            part.spare_blocks -= missing
            granted += self._grant(sequence, wanted)
        return min(wanted, len(sequence.blocks) * self._blocks.block_size), granted

    def _grant(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Give a sequence the blocks that its first `num_tokens` need; returns the new ones."""
        missing = self._blocks.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return ()
        granted = self._blocks.allocate(missing)
        sequence.blocks.extend(granted)
        return granted
