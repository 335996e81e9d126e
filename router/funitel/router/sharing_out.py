"""Who computes prompt tokens in a step, and how many: keys take turns by what they were given. Pure."""

from collections import Counter

from funitel.proto.step import SequenceStart
from funitel.router.chunking import ChunkBudget
from funitel.router.entrance import Entrance
from funitel.router.running import Running
from funitel.router.sequence import Sequence
from funitel.router.waiting import Shares

# A longer prompt would take so many steps that those who stream beside it were slow for a while.
MOST_URGENT_TOKENS = 1024


class SharingOut:
    """Gives the budget of a step to running sequences that have more to compute and to waiting ones, in fair order."""

    def __init__(self, shares: Shares, entrance: Entrance, running: Running) -> None:
        self._shares = shares
        self._entrance = entrance
        self._running = running

    def share_out(
        self,
        budget: ChunkBudget,
        computed: dict[int, int],
        hungry: list[Sequence],
        *,
        may_enter: bool,
    ) -> list[SequenceStart]:
        """Spend `budget`; returns who enters.

        Of one key, those that run come first. The first that finds no room keeps all behind it out, and the first that
        is not urgent when the budget is spent all others.

        Args:
            budget: what may be computed.
            computed: tokens by id that the step computes already; more are added.
            hungry: running sequences that have more to compute.
            may_enter: whether waiting sequences may enter.
        """
        starts: list[SequenceStart] = []
        passed_over: Counter[bytes] = Counter()
        while True:
            found = self._entrance.next_ready(passed_over) if may_enter else None
            oldest = min(hungry, key=self._level, default=None)
            if oldest is not None and (found is None or self._level(oldest) <= self._level(found[0])):
                is_urgent = self._is_urgent(oldest, oldest.num_cached)
                if budget.is_spent and not is_urgent:
                    break
                hungry.remove(oldest)
                self._go_on(oldest, budget, computed, is_urgent=is_urgent)
            elif found is not None:
                newcomer, prefix = found
                num_cached = len(prefix) * self._entrance.block_size
                is_urgent = self._is_urgent(newcomer, num_cached)
                if budget.is_spent and not is_urgent:
                    break
                first = budget.fit(num_cached, newcomer.num_known - num_cached, is_urgent=is_urgent)
                may_enter = self._entrance.has_room(newcomer, prefix, first)
                if may_enter:
                    self._entrance.take(newcomer, prefix)
                    self._running.enter(newcomer)
                    computed[newcomer.id] = budget.take(num_cached, newcomer.num_pending, is_urgent=is_urgent)
                    self._shares.charge(newcomer, computed[newcomer.id])
                    starts.append(self._entrance.start(newcomer, computed[newcomer.id]))
            else:
                break
        return starts

    def _go_on(self, sequence: Sequence, budget: ChunkBudget, computed: dict[int, int], *, is_urgent: bool) -> None:
        """Let a running sequence take what it can of `budget`."""
        begun = computed[sequence.id]
        num_computed, pending = sequence.ahead()
        count = budget.take(num_computed + begun, pending - begun, is_urgent=is_urgent)
        computed[sequence.id] += count
        self._shares.charge(sequence, count)

    def _is_urgent(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether streams of other keys may wait longer for a prompt: a short one of a key that was given less.

        Less than each other key that has requests, even once it has been given the whole prompt.
        """
        if sequence.output_ids or sequence.num_known - num_cached > MOST_URGENT_TOKENS:
            return False
        left = sequence.num_known - max(num_cached, sequence.ahead()[0])
        return self._shares.stays_least(sequence.request.key, left)

    def _level(self, sequence: Sequence) -> tuple[int, int]:
        return self._shares.level(sequence.request.key)
