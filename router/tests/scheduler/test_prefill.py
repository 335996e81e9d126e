"""How waiting sequences enter: what the shard is told of them, and whether there is room."""

from dataclasses import replace
from typing import Any

import pytest
from sequences import BLOCK, make_sequence

from funitel.proto.step import MediaInput, MediaKind, MediaSpan, SamplingParams, SequenceStart, StoppingParams
from funitel.router.core.request import RequestMedia, Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.prefill import whole_spans
from funitel.router.scheduler.scheduler import Scheduler

SAMPLING = SamplingParams(temperature=0.5, seed=3)


def make_scheduler(num_blocks: int = 50, **policy: Any) -> Scheduler:
    return Scheduler(SchedulerPolicy(**{"max_batch_prefill_tokens": 8, **policy}), BlockPool(num_blocks, BLOCK))


def resumed(**fields: Any) -> Sequence:
    """A sequence of 6 prompt tokens that has two more."""
    sequence = make_sequence(3, 6, 7, **fields)
    sequence.request = replace(sequence.request, sampling=SAMPLING)
    sequence.output_ids = [8, 9]
    return sequence


def start_of(scheduler: Scheduler, sequence: Sequence) -> SequenceStart:
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    (start,) = plan.starts
    return start


ASKED = {
    "prefill_logprobs": True,
    "prompt_logprobs": 3,
    "top_n_tokens": 2,
    "inputs": "text",
    "add_special_tokens": False,
    "request_id": "r",
}


def test_a_shard_is_told_all_of_a_sequence() -> None:
    assert start_of(make_scheduler(max_batch_prefill_tokens=5), resumed(**ASKED)) == SequenceStart(
        request_id=3,
        sampling=SAMPLING,
        stopping=StoppingParams(max_new_tokens=7),
        input_ids=(0, 1, 2, 3, 4, 5),
        output_ids=(8, 9),
        blocks=(1, 2),
        cache_len=0,
        chunk_len=5,
        prefill_logprobs=True,
        prompt_logprobs=3,
        top_n_tokens=2,
        add_special_tokens=False,
        name="r",
    )


def test_a_plain_shard_is_told_the_text_and_the_slots() -> None:
    scheduler = make_scheduler(is_chunked=False, is_plain=True)
    slots = tuple(BLOCK + i for i in range(6 + 7 - 1))  # of blocks 1, 2 and 3
    assert start_of(scheduler, resumed(**ASKED)) == SequenceStart(
        request_id=3,
        sampling=SAMPLING,
        stopping=StoppingParams(max_new_tokens=7),
        output_ids=(8, 9),
        blocks=(1, 2, 3),
        slots=slots,
        prefill_logprobs=True,
        prompt_logprobs=3,
        top_n_tokens=2,
        inputs="text",
        truncate=6,
        add_special_tokens=False,
    )


@pytest.mark.parametrize(
    ("num_ahead", "policy", "num_blocks", "fit"),
    [
        (2, {"max_batch_size": 3}, 50, True),
        (3, {"max_batch_size": 3}, 50, False),
        (4, {}, 9, True),  # a block at least for one more
        (5, {}, 10, False),
        (5, {}, 11, True),
    ],
)
def test_room_for_all_that_wait_and_one_more(
    num_ahead: int, policy: dict[str, int], num_blocks: int, fit: bool
) -> None:
    ahead = [make_sequence(i, 2 * BLOCK, 5) for i in range(num_ahead)]
    assert make_scheduler(num_blocks, **policy).ttft_estimator.behind(ahead).has_room == fit


def test_without_chunks_a_prompt_enters_whole() -> None:
    scheduler = make_scheduler(max_batch_prefill_tokens=10, is_chunked=False)
    for i, length in enumerate((6, 5)):
        scheduler.add(make_sequence(i, length, 9))
    plan = scheduler.schedule()
    assert plan is not None
    assert [(start.request_id, start.chunk_len) for start in plan.starts] == [(0, 6)]


def test_while_a_fault_is_bisected_only_those_on_trial_enter() -> None:
    scheduler = make_scheduler(max_batch_prefill_tokens=100, target_gap_seconds=9.0)
    for i in range(3):
        scheduler.add(make_sequence(i, 6, 9))
    assert scheduler.bisector.fail({0: 6, 1: 6}, 12) is None
    for entering in ([0], [1], [2]):
        plan = scheduler.schedule()
        assert plan is not None
        assert [start.request_id for start in plan.starts] == entering
        scheduler.bisector.try_other_half()


@pytest.mark.parametrize(("num_free", "enters"), [(2, False), (3, True)])
def test_a_sequence_enters_where_a_block_is_left_for_each_that_runs(num_free: int, enters: bool) -> None:
    scheduler = make_scheduler(20, max_batch_prefill_tokens=100, target_gap_seconds=9.0)
    start_of(scheduler, make_sequence(0, 6, 9))
    scheduler.blocks.allocate(scheduler.blocks.num_free - num_free)
    scheduler.add(make_sequence(1, 2 * BLOCK, 9))
    plan = scheduler.schedule()
    assert plan is not None
    assert [start.request_id for start in plan.starts] == [1] * enters


def image(position: int, length: int, key: bytes = b"k") -> RequestMedia:
    given = MediaInput(key=key, kind=MediaKind.IMAGE, shape=(), values=b"", num_features=length)
    return RequestMedia(MediaSpan(key, position, length), given)


@pytest.mark.parametrize(
    ("begun", "count", "may_extend", "expected"),
    [
        (0, 4, False, 4),  # before all items
        (0, 5, True, 5),  # up to the first
        (0, 7, True, 5),  # within it: it comes later
        (0, 10, False, 10),  # with all of it
        (5, 2, True, 5),  # begins with it: all of it,
        (5, 2, False, 0),  # or none
        (7, 2, True, 3),  # behind a part that is cached
        (7, 3, False, 3),
        (5, 6, True, 5),  # up to the next one, which follows at once
        (10, 1, True, 4),
        (14, 9, False, 9),  # behind all
    ],
)
def test_a_chunk_ends_within_no_item(begun: int, count: int, may_extend: bool, expected: int) -> None:
    assert whole_spans((image(5, 5), image(10, 4)), begun, count, may_extend=may_extend) == expected


def test_a_shard_is_told_where_the_items_are() -> None:
    media = image(1, 3), image(4, 2, b"l")
    start = start_of(make_scheduler(max_batch_prefill_tokens=9), make_sequence(1, 9, 4, media=media))
    assert start.media == (MediaSpan(b"k", 1, 3), MediaSpan(b"l", 4, 2))


def test_the_first_chunk_of_a_step_is_as_large_as_its_item_and_others_wait() -> None:
    scheduler = make_scheduler(max_batch_prefill_tokens=8, has_whole_spans=True)
    for number in range(2):
        scheduler.add(make_sequence(number, 20, 4, media=(image(6, 8),)))
    computed = []
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        computed.append(plan.computed)
    assert computed == [{0: 6, 1: 2}, {0: 8, 1: 0}, {0: 6, 1: 2}]


def test_steps_that_compute_a_prompt_with_media_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(max_batch_prefill_tokens=8)
    told: list[bool] = []
    budget = scheduler.step_time.budget

    def tell(*args: Any, has_media: bool, **more: Any) -> Any:
        told.append(has_media)
        return budget(*args, has_media=has_media, **more)

    monkeypatch.setattr(scheduler.step_time, "budget", tell)
    scheduler.add(make_sequence(0, 12, 4))
    scheduler.add(make_sequence(1, 20, 4, media=(image(6, 8),)))
    while scheduler.schedule() is not None:
        pass
    assert told[0] is False  # the first prompt alone, then what is left of it beside the other
    assert told[-1] is True


def test_the_keys_of_blocks_tell_items_and_their_places_apart() -> None:
    def keys(*media: RequestMedia) -> list[bytes]:
        sequence = make_sequence(0, 24, 4, media=media)
        return [sequence.block_key(i, BLOCK) for i in range(5)]

    none, first, other = keys(), keys(image(6, 5)), keys(image(6, 5, b"l"))
    assert [a == b for a, b in zip(none, first, strict=True)] == [True, False, False, False, False]
    assert [a == b for a, b in zip(first, other, strict=True)] == [True, False, False, False, False]
    assert keys(image(5, 5))[1] != first[1]
    assert keys(image(6, 5), image(16, 4))[:4] == first[:4]
    assert keys(image(6, 5), image(16, 4))[4] != first[4]
    assert keys(image(8, 4), image(12, 4, b"l")) != keys(image(8, 4), image(12, 4))
