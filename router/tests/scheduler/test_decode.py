"""What running sequences compute, and for how many steps nothing is asked about them."""

import pytest
from sequences import BLOCK, FakeShard, make_sequence

from funitel.router.core.request import Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.cost.step_cost import StepCostModel
from funitel.router.scheduler.decode import RunningSet
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.scheduler.waiting_queue import FairShares


def make_scheduler(*sequences: Sequence, num_blocks: int = 50) -> tuple[Scheduler, FakeShard]:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=100), BlockPool(num_blocks, BLOCK))
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler, FakeShard()


def step(scheduler: Scheduler, shard: FakeShard) -> StepPlan | None:
    scheduler.preempt()
    shard.retain(set(scheduler.running))
    plan = scheduler.schedule()
    if plan is not None:
        scheduler.commit(plan, shard.step(plan), 0.01)
    return plan


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "foreseen", "grants"),
    [
        (5, 10, [0, 2, 1, 0, 3, 2, 1, 0, 1, 0], [4, 8]),
        (4, 3, [0, 1, 0], [1]),
        (8, 6, [0, 3, 2, 1, 0, 0], [1, 5]),
        (3, 2, [0, 0], []),
        (3, 1, [0], []),
    ],
)
def test_a_sequence_just_decodes_until_it_needs_a_block_or_is_at_its_end(
    prompt_len: int, max_new_tokens: int, foreseen: list[int], grants: list[int]
) -> None:
    sequence = make_sequence(0, prompt_len, max_new_tokens)
    scheduler, shard = make_scheduler(sequence)
    for number, count in enumerate(foreseen):
        scheduler.preempt()
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.computed == {0: 1 if number else prompt_len}
        assert sequence.num_plain_steps == count
        assert [(len(row.blocks), row.chunk_len) for row in plan.rows] == [(1, None)] * (number in grants)
        assert len(sequence.blocks) == -(-(prompt_len + number) // BLOCK)
        scheduler.commit(plan, shard.step(plan), 0.01)
    assert scheduler.schedule() is None
    assert (len(sequence.output_ids), scheduler.blocks.num_used) == (max_new_tokens, 0)


@pytest.mark.parametrize(
    ("num_computed", "count", "has_more"), [(0, 0, True), (4, 1, False), (5, 1, True), (7, 1, True), (8, 1, False)]
)
def test_a_sequence_that_holds_more_than_it_decodes_has_more_to_compute(
    num_computed: int, count: int, has_more: bool
) -> None:
    sequence, shares = make_sequence(0, 5, 20), FairShares()
    sequence.output_ids = [7] * 4 if num_computed > 4 else []
    sequence.num_computed = num_computed
    shares.join(sequence.request.key)
    running = RunningSet(BlockPool(50, BLOCK), shares, None)
    running.enter(sequence)
    part = running.decode()
    assert (part.computed, part.with_pending) == ({0: count}, [sequence] * has_more)


def test_the_load_of_a_step_is_of_all_that_decode_and_charged_to_their_keys() -> None:
    sequences = [
        make_sequence(i, length, 20, key=key) for i, (length, key) in enumerate(((5, b"a"), (7, b"a"), (2, b"b")))
    ]
    scheduler, shard = make_scheduler(*sequences)
    plan = step(scheduler, shard)
    assert plan is not None
    assert plan.load == StepLoad(0, 0, 14, 15 + 28 + 3, 0)
    for number in range(1, 19):
        plan = step(scheduler, shard)
        assert plan is not None
        assert plan.computed == {0: 1, 1: 1, 2: 1}
        assert plan.load == StepLoad(3, 14 + 3 * number)
        assert (scheduler.shares.tokens_of(b"a"), scheduler.shares.tokens_of(b"b")) == (12 + 2 * number, 2 + number)


def test_no_budget_is_worked_out_where_all_just_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, shard = make_scheduler(make_sequence(0, 6, 9))
    step(scheduler, shard)
    monkeypatch.delattr(StepCostModel, "budget")
    plan = step(scheduler, shard)
    assert plan is not None
    assert plan.computed == {0: 1}


def test_one_that_ends_with_a_step_in_flight_computes_nothing() -> None:
    ending, other = make_sequence(0, 5, 2), make_sequence(1, 5, 9)
    scheduler, shard = make_scheduler(ending, other)
    plans = [scheduler.schedule() for _ in range(3)]
    assert [plan.computed for plan in plans if plan] == [{0: 5, 1: 5}, {0: 1, 1: 1}, {1: 1}]
    for plan in plans:
        assert plan is not None
        scheduler.commit(plan, shard.step(plan), 0.01)
        shard.retain(set(scheduler.running))
    assert (len(ending.output_ids), len(other.output_ids)) == (2, 3)
    assert list(scheduler.running) == [1]


def test_a_sequence_that_leaves_gives_its_blocks_back_once() -> None:
    first, second, waiting = make_sequence(0, 9, 9), make_sequence(1, 5, 9), make_sequence(2, 9, 9)
    scheduler, shard = make_scheduler(first, second, num_blocks=6)
    step(scheduler, shard)
    scheduler.add(waiting)
    assert scheduler.blocks.num_used == 5
    for _ in range(2):
        scheduler.remove(first)
        assert (scheduler.blocks.num_used, list(scheduler.running), first.blocks) == (2, [1], [])
        assert scheduler.shares.sequences_of(b"") == 2
    assert list(scheduler.waiting) == [waiting]
    scheduler.remove(waiting)
    assert not list(scheduler.waiting)
    scheduler.remove(second)
    assert scheduler.blocks.num_used == 0
    assert scheduler.schedule() is None


def test_steps_that_are_forgotten_are_planned_again() -> None:
    sequence = make_sequence(0, 5, 9)
    scheduler, shard = make_scheduler(sequence)
    step(scheduler, shard)
    step(scheduler, shard)
    assert sequence.num_plain_steps
    plans = [scheduler.schedule() for _ in range(2)]
    assert all(plans)
    scheduler.abandon()
    assert (sequence.in_flight, sequence.num_plain_steps, sequence.num_computed) == ([], 0, 6)
    step(scheduler, shard)
    assert (sequence.num_computed, len(sequence.output_ids)) == (7, 3)
