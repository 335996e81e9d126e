"""What drafts gain: how many a row may have in a step, by how many of its own and of its class were accepted.

Nothing here depends on a clock, so every rank counts alike, and texts never depend on it.
"""

from collections.abc import Hashable
from dataclasses import dataclass

MAX_WAIT = 64  # steps without drafts after a row's drafts were rejected again and again
PRIOR = 0.5  # share of a class's drafted steps that gain, before any was counted
LEARNING = 1 / 32  # of what is known of a class, by each drafted step
POOR = 0.2  # share below which new rows of a class begin to wait


@dataclass(slots=True)
class ClassGain:
    """Of the requests of one class, the share of drafted steps in which some draft was accepted, by a moving mean."""

    share: float = PRIOR

    def observe(self, num_accepted: int) -> None:
        """Take a drafted step into account."""
        self.share += LEARNING * ((num_accepted > 0) - self.share)


@dataclass(slots=True)
class RowGain:
    """Of one row: it waits twice as long each time that all its drafts are rejected, and asks for fewer after some."""

    of_class: ClassGain
    width: int  # drafts that it asks for next
    wait: int = 0  # steps that it has yet to do without
    num_misses: int = 0  # in a row

    def next_width(self, limit: int) -> int:
        """How many drafts to ask for in this step, at most `limit`; counts the step."""
        if self.wait:
            self.wait -= 1
            return 0
        return min(self.width, limit)

    def observe(self, num_drafts: int, num_accepted: int, most: int) -> None:
        """Take into account how many drafts of a step were accepted, where at most `most` may be asked for."""
        self.of_class.observe(num_accepted)
        if not num_accepted:
            self.num_misses += 1
            self.wait = min(1 << self.num_misses, MAX_WAIT)
            self.width = max(1, self.width // 2)
            return
        self.num_misses = 0
        self.width = min(most, 2 * self.width if num_accepted == num_drafts else num_accepted + 1)


class Gains:
    """The classes of requests, and what a new row begins with."""

    def __init__(self) -> None:
        self.classes: dict[Hashable, ClassGain] = {}

    def begin(self, key: Hashable, most: int) -> RowGain:
        """The gain of a new row of a class, which may have at most `most` drafts."""
        of_class = self.classes.setdefault(key, ClassGain())
        row = RowGain(of_class, most)
        if of_class.share < POOR:
            row.num_misses, row.width = 3, max(1, most // 2)
            row.wait = 1 << row.num_misses
        return row
