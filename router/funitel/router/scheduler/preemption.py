"""Who gives way: which running sequence is preempted when blocks are missing or a key is short of its share. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from funitel.router.core.request import Sequence
from funitel.router.scheduler.prefill import PrefillPlanner
from funitel.router.scheduler.waiting_queue import FairShares


class PreemptionPolicy:
    """Chooses among `running`; changes nothing."""

    def __init__(self, shares: FairShares, entrance: PrefillPlanner, running: Mapping[int, Sequence]) -> None:
        self._shares = shares
        self._entrance = entrance
        self._running = running

    def to_growth(self) -> Sequence:
        """Who gives way when blocks are missing for what running sequences compute next: of the key with most."""
        return self._last(self._running.values(), self._blocks_held())

    def to_newcomer(self) -> Sequence | None:
        """Who gives way to the next newcomer, where another key has had more than its share of what is taken."""
        found = self._entrance.next_ready(Counter())
        if found is None:
            return None
        newcomer, prefix = found
        if not self._entrance.has_slot():
            taken = Counter(sequence.request.key for sequence in self._running.values())
            return self._richer_than(newcomer, 1, taken, dict.fromkeys(self._running, 1))
        needed = self._entrance.missing_blocks(newcomer, prefix)
        if not self._entrance.has_blocks(needed, prefix):
            sizes = {sequence.id: len(sequence.blocks) for sequence in self._running.values()}
            return self._richer_than(newcomer, needed, self._blocks_held(), sizes)
        return None

    def _richer_than(
        self, newcomer: Sequence, needed: int, taken: Counter[bytes], sizes: Mapping[int, int]
    ) -> Sequence | None:
        """Who gives way to a newcomer: of a key that was given more, and still has as much taken without the sequence.

        Args:
            newcomer: whose turn it is.
            needed: how much it would take, of whatever is short.
            taken: how much of it each key has.
            sizes: how much of it each running sequence has.
        """
        level, most = self._shares.level(newcomer.request.key), taken[newcomer.request.key] + needed
        richer = [
            sequence
            for sequence in self._running.values()
            if self._shares.level(sequence.request.key) > level
            and taken[sequence.request.key] - sizes[sequence.id] >= most
        ]
        return self._last(richer, taken) if richer else None

    def _blocks_held(self) -> Counter[bytes]:
        """How many blocks the sequences of each key hold."""
        held: Counter[bytes] = Counter()
        for sequence in self._running.values():
            held[sequence.request.key] += len(sequence.blocks)
        return held

    def _last(self, sequences: Iterable[Sequence], taken: Mapping[bytes, int]) -> Sequence:
        """Who gives way first: of the key that has taken most and was given most, the least urgent, then the newest."""

        def place(sequence: Sequence) -> tuple[float, ...]:
            request = sequence.request
            given = self._shares.tokens_of(request.key)
            return taken[request.key], given, request.priority, sequence.arrived, sequence.id

        return max(sequences, key=place)
