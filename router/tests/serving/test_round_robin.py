"""Generations of several sequences are given on in one order, whenever they come."""

import random

import pytest

from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens
from funitel.router.serving.round_robin import RoundRobin


def sequence(place: int, count: int) -> list[Generation]:
    found = [Generation(place, Tokens((step,), (0.0,), ("x",), (False,))) for step in range(count)]
    found[-1].finished = GeneratedText("", count, FinishReason.LENGTH)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_order_depends_on_the_sequences_alone(seed: int) -> None:
    lengths = (3, 1, 5)
    given: list[tuple[int, int]] = []
    turns = RoundRobin(3, lambda place, generation: given.append((place, generation.tokens.ids[0])))
    left = {place: sequence(place, count) for place, count in enumerate(lengths)}
    draw = random.Random(seed)
    while left:
        place = draw.choice(sorted(left))
        turns.put(place, left[place].pop(0))
        if not left[place]:
            del left[place]
    assert given == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2), (2, 2), (2, 3), (2, 4)]


def test_a_sequence_that_is_alone_does_not_wait() -> None:
    given: list[int] = []
    turns = RoundRobin(1, lambda place, generation: given.append(generation.tokens.ids[0]))
    for generation in sequence(0, 3):
        turns.put(0, generation)
        assert given[-1] == generation.tokens.ids[0]
