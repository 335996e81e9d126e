"""Checkpoints of recurrent states: which slots a sequence has, and after which tokens its state is saved. Pure.

A prefix of a model with recurrent layers can be used only where its state was saved. States are large, so few are: of a
prompt that at its last full block, and those ever farther before it, each distance twice the one before; that where its
cached blocks end, since other prompts may part there; and in a completion one every `DECODE_INTERVAL` tokens, in place
of the one before. A prompt that differs from an earlier one in its last n tokens so computes some 2 n tokens.
"""

from collections.abc import Iterator

from funitel.proto.step import StateSave
from funitel.router.core.request import Sequence, StateRow
from funitel.router.kv_cache.state_slots import StateSlots

FIRST_DISTANCE = 64  # tokens between the last checkpoint of a prompt and the one before
DECODE_INTERVAL = 128  # tokens between checkpoints of a completion
MAX_SHARE = 1 / 8  # of all slots, for the checkpoints of one prompt
MIN_CHECKPOINTS = 2  # of one prompt, whatever their share is


class StateCheckpoints:
    """Gives sequences slots in `states`, and saves their states at borders of blocks.

    Args:
        states: the slots.
        block_size: tokens of a block.
        has_cache: whether states are saved at all.
    """

    def __init__(self, states: StateSlots, block_size: int, *, has_cache: bool) -> None:
        self._states = states
        self._block_size = block_size
        self._has_cache = has_cache
        self._max_of_prompt = max(MIN_CHECKPOINTS, int(states.num_slots * MAX_SHARE))
        self._interval = -(-DECODE_INTERVAL // block_size) * block_size

    def has_slots(self, count: int) -> bool:
        """Whether so many more sequences can have a slot."""
        return count <= self._states.num_free

    def usable_blocks(self, sequence: Sequence, num_blocks: int) -> int:
        """Of the first `num_blocks` blocks of a sequence, those up to the last checkpoint."""
        size, states = self._block_size, self._states
        return next((i for i in range(num_blocks, 0, -1) if self._key(sequence, i * size) in states), 0)

    def is_expected(self, sequence: Sequence, num_blocks: int, other: Sequence) -> bool:
        """Whether `other`, which runs, will save a state beyond `num_blocks` that a waiting sequence may begin from."""
        if other.state is None:
            return False
        least = max(num_blocks * self._block_size, other.num_computed)
        return any(
            least < each < sequence.num_known and self._key(sequence, each) == self._key(other, each)
            for each in other.state.borders
        )

    def _key(self, sequence: Sequence, position: int) -> bytes:
        """Key of the state after `position` tokens, a border of blocks: that of the block before it."""
        return sequence.block_key(position // self._block_size - 1, self._block_size)

    # A sequence's life ----------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, num_matched: int) -> None:
        """Give a sequence that enters behind `sequence.num_cached` tokens a slot; `num_matched` blocks are cached."""
        if sequence.num_cached:
            key = self._key(sequence, sequence.num_cached)
            row = StateRow(*self._states.allocate_from(key), num_known=sequence.num_known)
        else:
            slot = self._states.allocate()
            assert slot is not None, "no slot is free for a sequence that enters"
            row = StateRow(slot, num_known=sequence.num_known)
        if self._has_cache:
            row.borders = self._borders(sequence, num_matched)
        sequence.state = row

    def leave(self, sequence: Sequence) -> None:
        """Take back the slots of a sequence that leaves; saves that are not committed are lost."""
        row = sequence.state
        if row is not None:
            self.forget_saves(sequence)
            self._states.release(row.slot)
            sequence.state = None

    def forget_saves(self, sequence: Sequence) -> None:
        """Forget the saves of steps that may not have been carried out."""
        row = sequence.state
        if row is not None:
            for save in row.saves:
                self._states.release(save.slot)
            row.saves.clear()

    # Saving ---------------------------------------------------------------------------------------------------------

    def is_due(self, sequence: Sequence, begin: int, end: int) -> bool:
        """Whether a state is to be saved by a step that computes tokens from `begin` up to `end`."""
        return sequence.state is not None and any(self._due(sequence.state, begin, end))

    def next_due(self, computed: int) -> int:
        """Return the next number of tokens of a completion, above `computed`, after which its state may be saved."""
        return (computed // self._interval + 1) * self._interval

    def save(self, sequence: Sequence, begin: int, end: int) -> tuple[StateSave, ...]:
        """Plan the saves of a step that computes the tokens from `begin` up to `end`, as far as slots can be had."""
        row = sequence.state
        if row is None:
            return ()
        saves = []
        for position in self._due(row, begin, end):
            slot = self._states.allocate()
            if slot is None:
                break
            saves.append(StateSave(position, slot))
        row.saves += saves
        return tuple(saves)

    def publish(self, sequence: Sequence) -> None:
        """Make the states known that committed steps have saved."""
        row = sequence.state
        while row is not None and row.saves and row.saves[0].position <= sequence.num_computed:
            save = row.saves.pop(0)
            key = self._key(sequence, save.position)
            self._states.publish(save.slot, key)
            if save.position > row.num_known:  # of the completion
                if row.latest is not None and row.latest != key:
                    self._states.withdraw(row.latest)
                row.latest = key

    def _due(self, row: StateRow, begin: int, end: int) -> Iterator[int]:
        """Token counts above `begin` up to `end` after which a state is to be saved, in order."""
        if not self._has_cache:
            return
        if row.saves:  # with drafts, a step may get less far than was planned for
            begin = max(begin, row.saves[-1].position)
        yield from (position for position in row.borders if begin < position <= end)
        first = max(begin, row.num_known) // self._interval + 1
        yield from range(first * self._interval, end + 1, self._interval)

    def _borders(self, sequence: Sequence, num_matched: int) -> tuple[int, ...]:
        """Token counts after which the state of the tokens that a sequence enters with is to be saved, in order."""
        size, begin = self._block_size, sequence.num_cached
        last = (sequence.num_known - 1) // size * size
        borders, distance = [last, num_matched * size], FIRST_DISTANCE
        while distance < last - begin:
            borders.append((last - distance) // size * size)
            distance *= 2
        kept = dict.fromkeys(each for each in borders if each > begin and self._key(sequence, each) not in self._states)
        return tuple(sorted(list(kept)[: self._max_of_prompt]))
