"""Give the generations of several sequences on in an order that depends on each of them alone. Pure.

The first of each sequence comes before the second of any, and so on. Bytes of an answer do not depend on the steps that
brought them, nor on sequences that were preempted meanwhile: another router gives them on in the same order.
"""

from collections import deque
from collections.abc import Callable

from funitel.proto.step import Generation


class RoundRobin:
    """Generations of `count` sequences; each is given to `give` with the place of its sequence, in its turn."""

    def __init__(self, count: int, give: Callable[[int, Generation], None]) -> None:
        self._waiting: list[deque[Generation]] = [deque() for _ in range(count)]
        self._places = list(range(count))  # of sequences that have not ended
        self._turn = 0  # which of these is next
        self._give = give

    def put(self, place: int, generation: Generation) -> None:
        """Take the next generation of a sequence; give on what can be."""
        self._waiting[place].append(generation)
        while self._places and (waiting := self._waiting[self._places[self._turn]]):
            generation, place = waiting.popleft(), self._places[self._turn]
            if generation.finished is None:
                self._turn += 1
            else:
                del self._places[self._turn]
            if self._turn >= len(self._places):
                self._turn = 0
            self._give(place, generation)
