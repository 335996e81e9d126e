"""Preemption: the victim among running sequences when blocks are missing or a key is short of its share. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2s

from funitel.router.core.request import Sequence, is_background
from funitel.router.scheduler.prefill import PrefillPlanner, num_rows
from funitel.router.scheduler.waiting_queue import FairShares


def _at_random(sequence: Sequence, turn: int) -> float:
    return int.from_bytes(blake2s(f"{turn} {sequence.id}".encode(), digest_size=4).digest(), "little")


PREFERENCES: dict[str, Callable[[Sequence, int], float]] = {
    "newest": lambda sequence, turn: 0.0,
    "longest": lambda sequence, turn: len(sequence.blocks),
    "random": _at_random,
}
"""By name, the number of a sequence of which the largest is preempted, behind all other rules; in each turn another."""


class PreemptionPolicy:
    """Chooses a victim among `running`; changes nothing. Of equally urgent ones of a key it is as `victim` says."""

    def __init__(
        self, victim: str, shares: FairShares, prefill: PrefillPlanner, running: Mapping[int, Sequence]
    ) -> None:
        self._victim = victim
        self._num_chosen = 0
        self._shares = shares
        self._prefill = prefill
        self._running = running

    def victim_for_growth(self) -> Sequence:
        """Return the victim when blocks are missing for what running sequences compute next: of the heaviest key."""
        return self._last(self._running.values(), self._blocks_held())

    def victim_for_waiting(self) -> Sequence | None:
        """Return the victim for the next waiting sequence, where another key has more than its share."""
        found = self._prefill.next_schedulable(Counter())
        if found is None:
            return None
        waiting, prefix = found
        if not self._prefill.has_slots(num_rows(waiting)):
            taken = Counter(sequence.request.key for sequence in self._running.values())
            return self._victim_for(waiting, 1, taken, dict.fromkeys(self._running, 1))
        needed = self._prefill.needed_blocks(waiting, prefix)
        if not self._prefill.has_blocks(needed, prefix):
            sizes = {sequence.id: len(sequence.blocks) for sequence in self._running.values()}
            return self._victim_for(waiting, needed, self._blocks_held(), sizes)
        return None

    def _victim_for(
        self, waiting: Sequence, needed: int, taken: Counter[bytes], sizes: Mapping[int, int]
    ) -> Sequence | None:
        """Return a victim of a key that was given more, and still has as much taken without the victim.

        Background sequences are victims of any other, however little they have.

        Args:
            waiting: the sequence that would enter.
            needed: how much it would take, of what is short.
            taken: how much of it each key has.
            sizes: how much of it each running sequence has.
        """
        level, least = self._shares.level(waiting.request.key), taken[waiting.request.key] + needed
        may_take_all = not is_background(waiting.request.key)
        richer = [
            sequence
            for sequence in self._running.values()
            if self._shares.level(key := sequence.request.key) > level
            and (taken[key] - sizes[sequence.id] >= least or (may_take_all and is_background(key)))
        ]
        return self._last(richer, taken) if richer else None

    def _blocks_held(self) -> Counter[bytes]:
        """Count the blocks that the sequences of each key hold."""
        held: Counter[bytes] = Counter()
        for sequence in self._running.values():
            held[sequence.request.key] += len(sequence.blocks)
        return held

    def _last(self, sequences: Iterable[Sequence], taken: Mapping[bytes, int]) -> Sequence:
        """Return the first victim: of background keys, else all, that with most taken and given; its least urgent.

        Among these `victim` chooses.
        """

        def rank(sequence: Sequence) -> tuple[float, ...]:
            request = sequence.request
            given = self._shares.tokens_of(request.key)
            is_behind = is_background(request.key)
            chosen = preference(sequence, self._num_chosen)
            return is_behind, taken[request.key], given, request.priority, chosen, sequence.arrived, sequence.id

        preference = PREFERENCES[self._victim]
        self._num_chosen += 1
        return max(sequences, key=rank)
