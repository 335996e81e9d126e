"""Which replica gets a sequence."""

import pytest

from funitel.router.engine.interface import ReplicaLoad
from funitel.router.replica_set.load_balancer import choose_replica


@pytest.mark.parametrize(
    ("standings", "chosen", "why"),
    [
        ([(0, 0), (0, 0)], 0, "equals: the first"),
        ([(10, 0), (9, 0), (9, 0)], 1, "nothing is computed anywhere: the least loaded"),
        ([(0, 0), (0, 16)], 1, "the longest beginning"),
        ([(0, 32), (0, 48), (0, 16)], 1, "the longest of several"),
        ([(0, 0), (400, 100)], 1, "a lead in load that the beginning makes up for"),
        ([(0, 0), (401, 100)], 0, "overloaded"),
        ([(10_000, 0), (10_401, 100)], 0, "overloaded is meant relative to the least loaded"),
        ([(10_000, 0), (10_400, 100)], 1, "and not in absolute numbers"),
        ([(0, 0), (900, 100), (300, 80)], 2, "the next longest when the longest is overloaded"),
        ([(50, 100), (20, 100), (30, 100)], 1, "equal beginnings: the least loaded"),
    ],
)
def test_place(standings: list[tuple[int, int]], chosen: int, why: str) -> None:
    assert choose_replica([ReplicaLoad(*standing) for standing in standings]) == chosen, why


@pytest.mark.parametrize(
    ("standings", "chosen", "why"),
    [
        ([(0, 0, False), (0, 0, True)], 1, "the one with the adapter"),
        ([(0, 0, False), (512, 0, True)], 1, "a lead in load that loading it would cost"),
        ([(0, 0, False), (513, 0, True)], 0, "overloaded"),
        ([(0, 16, False), (0, 0, True)], 0, "the longest beginning comes first"),
        ([(9, 0, True), (8, 0, True)], 1, "both have it: the least loaded"),
    ],
)
def test_place_of_a_sequence_with_an_adapter(standings: list[tuple[int, int, bool]], chosen: int, why: str) -> None:
    assert choose_replica([ReplicaLoad(*standing) for standing in standings]) == chosen, why


def test_an_only_replica_gets_everything() -> None:
    assert choose_replica([ReplicaLoad(10**9, 0)]) == 0
