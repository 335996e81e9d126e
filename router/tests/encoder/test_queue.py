"""Which texts go together next: by tokens, shared between requests, each text once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.proto.step import EncoderInput, EncoderTask
from funitel.router.encoder.queue import PRIORITY_TOKENS, EncoderQueue, Submission


def submission(id: int, lengths: list[int], task: EncoderTask = EncoderTask.EMBED, priority: int = 0) -> Submission:
    return Submission(id, task, [EncoderInput(input_ids=(0,) * length) for length in lengths], priority)


def shown(queue: EncoderQueue) -> list[tuple[int, int]]:
    return [(text.submission.id, text.place) for text in queue.plan()]


def test_the_longest_texts_of_a_request_go_first_and_fill_the_budget() -> None:
    queue = EncoderQueue(max_tokens=10)
    queue.add(submission(0, [3, 6, 3, 1, 4]))
    assert (queue.num_texts, queue.num_tokens) == (5, 17)
    assert shown(queue) == [(0, 1), (0, 4)]
    assert shown(queue) == [(0, 0), (0, 2), (0, 3)]
    assert shown(queue) == []
    assert (queue.num_texts, queue.num_tokens) == (0, 0)


def test_a_text_beyond_the_budget_goes_alone() -> None:
    queue = EncoderQueue(max_tokens=4)
    queue.add(submission(0, [9, 2]))
    assert shown(queue) == [(0, 0)]
    assert shown(queue) == [(0, 1)]


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    queue = EncoderQueue(max_tokens=10)
    queue.add(submission(0, [5] * 100))
    queue.plan()
    queue.add(submission(1, [5]))
    assert (1, 0) in shown(queue) + shown(queue)


def test_a_newcomer_does_not_go_before_all_that_has_begun() -> None:
    queue = EncoderQueue(max_tokens=10)
    queue.add(submission(0, [5] * 100))
    for _ in range(10):
        queue.plan()
    queue.add(submission(1, [5] * 100))
    ids = [id for _ in range(10) for id, _ in shown(queue)]
    assert 8 <= ids.count(0) <= 12


def test_a_step_of_priority_is_a_lead() -> None:
    queue = EncoderQueue(max_tokens=PRIORITY_TOKENS)
    queue.add(submission(0, [64] * 64))
    queue.add(submission(1, [64] * 64, priority=-1))
    assert {id for id, _ in shown(queue)} == {1}
    assert {id for id, _ in shown(queue)} == {0, 1}


def test_a_batch_has_one_task() -> None:
    queue = EncoderQueue(max_tokens=100)
    queue.add(submission(0, [3, 3]))
    queue.add(submission(1, [3], EncoderTask.FILL))
    queue.add(submission(2, [3]))
    assert sorted(shown(queue)) == [(0, 0), (0, 1), (2, 0)]
    assert shown(queue) == [(1, 0)]


def test_a_batch_has_so_many_texts_at_most() -> None:
    queue = EncoderQueue(max_tokens=100, max_texts=2)
    queue.add(submission(0, [1, 1, 1]))
    assert [len(shown(queue)), len(shown(queue))] == [2, 1]


def test_what_nobody_wants_is_forgotten() -> None:
    queue = EncoderQueue(max_tokens=3)
    gone, stays = submission(0, [3, 3]), submission(1, [2])
    queue.add(gone)
    queue.add(stays)
    texts = queue.plan()
    queue.remove(gone)
    queue.give_back(texts)
    assert shown(queue) == [(1, 0)]
    assert (queue.num_texts, queue.num_tokens) == (0, 0)


def test_what_is_given_back_waits_again() -> None:
    queue = EncoderQueue(max_tokens=100)
    queue.add(submission(0, [3, 4]))
    texts = queue.plan()
    queue.give_back(texts)
    assert queue.num_tokens == 7
    assert sorted(shown(queue)) == [(0, 0), (0, 1)]


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=9), max_size=9), st.integers(1, 50))
def test_every_text_goes_once_within_the_budget(requests: list[list[int]], budget: int) -> None:
    queue = EncoderQueue(budget)
    for id, lengths in enumerate(requests):
        queue.add(submission(id, lengths))
    seen = []
    while batch := queue.plan():
        tokens = sum(len(text.input.input_ids) for text in batch)
        assert tokens <= budget or len(batch) == 1
        seen += [(text.submission.id, text.place) for text in batch]
    assert sorted(seen) == [(id, place) for id, lengths in enumerate(requests) for place in range(len(lengths))]
    assert (queue.num_texts, queue.num_tokens) == (0, 0)


@pytest.mark.parametrize(("lengths", "priority"), [([50] * 20, 0), ([50], 1)])
def test_nobody_waits_for_ever_behind_newcomers(lengths: list[int], priority: int) -> None:
    """Sixteen clients whose next request follows each answer; a batch holds eight of their texts."""
    queue = EncoderQueue(max_tokens=400)
    slow = submission(0, lengths, priority=priority)
    queue.add(slow)
    for i in range(1, 17):
        queue.add(submission(i, [50]))
    newest = 16
    for _ in range(400):
        for text in queue.plan():
            if text.submission is not slow:
                newest += 1
                queue.add(submission(newest, [50]))
    assert not slow.waiting
