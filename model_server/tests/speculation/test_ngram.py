"""Drafts by lookup are what followed the longest match, however tokens came in."""

import random

import numpy as np
import pytest

from funitel.model_server.speculation.interface import DraftRow
from funitel.model_server.speculation.ngram import MAX_MATCH, MAX_PLACES, MIN_MATCH, NgramDrafter, NgramIndex


def expected(tokens: list[int], limit: int) -> list[int]:
    """The definition, by looking at every place."""
    tail = tuple(tokens[-MIN_MATCH:])
    places = [end for end in range(MIN_MATCH, len(tokens)) if tuple(tokens[end - MIN_MATCH : end]) == tail]
    best, longest = 0, 0
    for place in places[::-1][:MAX_PLACES]:
        size = 0
        while size < min(MAX_MATCH, place) and tokens[place - 1 - size] == tokens[-1 - size]:
            size += 1
        if size > longest:
            best, longest = place, size
    return tokens[best : best + min(limit, longest)] if best else []


@pytest.mark.parametrize("num_kinds", [1, 2, 5, 50])
def test_drafts_are_what_followed_the_longest_match(num_kinds: int) -> None:
    source = random.Random(num_kinds)
    for length in (0, 1, 2, 3, 10, 200):
        index, tokens = NgramIndex(), [source.randrange(num_kinds) for _ in range(length)]
        for _ in range(30):
            limit = source.randint(1, 10)
            assert index.drafts(tokens, limit) == expected(tokens, limit)
            tokens += [source.randrange(num_kinds) for _ in range(source.randint(1, 4))]


def test_a_phrase_of_the_prompt_is_continued_as_there() -> None:
    phrase = list(range(100, 120))
    tokens = [1, 2, *phrase, 3, 4, 5, *phrase[:6]]
    assert NgramIndex().drafts(tokens, 4) == phrase[6:10]
    assert NgramIndex().drafts([1, 2, *phrase, 3, 4, *phrase[:2]], 8) == phrase[2:4]  # a short match says little
    assert NgramIndex().drafts(list(range(50)), 8) == []


def test_the_latest_of_equal_places_is_taken() -> None:
    assert NgramIndex().drafts([7, 8, 1, 0, 7, 8, 2, 9, 7, 8], 1) == [2]


def row(request_id: int, tokens: list[int], limit: int = 4) -> DraftRow:
    return DraftRow(request_id, tokens, np.zeros(1, np.int32), limit)


def test_rows_have_their_own_tokens_and_those_that_ended_are_forgotten() -> None:
    drafter = NgramDrafter()
    one, two = [1, 2, 3, 9, 1, 2], [1, 2, 4, 9, 1, 2]
    assert drafter.propose([row(1, one, 1), row(2, two, 1)]) == [[3], [4]]
    drafter.forget_all_but(frozenset({1, 2}))
    assert len(drafter._indexes) == 2
    for request_id in range(3, 8):
        drafter.propose([row(request_id, one)])
    drafter.forget_all_but(frozenset({2}))
    assert set(drafter._indexes) == {2}
    two += [4, 9]
    assert drafter.propose([row(2, two, 2)]) == [[1, 2]]


def test_another_sequence_of_the_same_id_gets_drafts_of_its_own() -> None:
    drafter = NgramDrafter()
    drafter.propose([row(1, list(range(30)))])
    assert drafter.propose([row(1, [5, 6, 7, 5, 6], 1)]) == [[7]]
