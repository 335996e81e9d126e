"""Which running sequence is preempted, one rule at a time: each case has the other rules name another sequence."""

from dataclasses import replace

import pytest
from sequences import BLOCK, FakeShard, make_sequence

from funitel.proto.step import Generation, StepResult, Tokens
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.preemption import PREFERENCES
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.settings import VICTIMS

A, B, C = b"a", b"b", b"c"
Spec = tuple[bytes, int, int, float]  # key, prompt tokens, priority, arrival


def run(*specs: Spec, charged: dict[bytes, int], num_left: int = 0, **policy: int | str) -> Scheduler:
    """A scheduler that runs these sequences, with `num_left` blocks beside theirs; keys are `charged` with more."""
    num_blocks = sum(-(-length // BLOCK) for _, length, _, _ in specs)
    chosen = SchedulerPolicy(max_batch_prefill_tokens=1000, **policy)  # type: ignore[arg-type]
    scheduler, shard = Scheduler(chosen, BlockPool(2 * num_blocks + num_left, BLOCK)), FakeShard()
    for i, (key, length, priority, arrived) in enumerate(specs):
        sequence = make_sequence(i, length, 100, key=key, priority=priority)
        sequence.arrived = arrived
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, shard.step(plan), 0.01)
    assert len(scheduler.running) == len(specs)
    for key, count in charged.items():
        scheduler.shares.charge_key(key, count)
    scheduler.blocks.allocate(scheduler.blocks.num_free - num_left)
    return scheduler


def preempted(scheduler: Scheduler, *newcomers: int) -> list[int]:
    scheduler.preempt()
    return sorted(sequence.id for sequence in scheduler.waiting if sequence.id not in newcomers)


@pytest.mark.parametrize(
    ("specs", "charged", "victim"),
    [
        pytest.param([(B, 15, -5, 0.0), (A, 8, 5, 9.0)], {A: 100}, 0, id="the key that holds most blocks"),
        pytest.param([(A, 8, -5, 0.0), (B, 7, 5, 9.0)], {A: 100}, 0, id="then the key that was given most"),
        pytest.param([(A, 8, 5, 0.0), (A, 7, -5, 9.0)], {}, 0, id="then the least urgent"),
        pytest.param([(A, 8, 0, 9.0), (A, 7, 0, 0.0)], {}, 0, id="then the newest"),
        pytest.param([(A, 8, 0, 0.0), (A, 7, 0, 0.0)], {}, 1, id="then the highest id"),
    ],
)
def test_the_victim_when_a_running_sequence_lacks_a_block(
    specs: list[Spec], charged: dict[bytes, int], victim: int
) -> None:
    scheduler = run(*specs, charged=charged)
    assert preempted(scheduler) == [victim]
    assert list(scheduler.running) == [1 - victim]
    assert scheduler.num_preempted == 1


def test_the_longest_or_any_in_place_of_the_newest() -> None:
    assert tuple(PREFERENCES) == VICTIMS
    specs: list[Spec] = [(A, 8, 0, 1.0), (A, 20, 0, 0.0), (A, 12, 0, 9.0)]
    assert preempted(run(*specs, charged={})) == [2]
    assert preempted(run(*specs, charged={}, preemption_victim="longest")) == [1]
    chosen = run(*specs, charged={}, preemption_victim="random")._preemption
    assert {chosen.victim_for_growth().id for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("victim", ["longest", "random"])
def test_other_rules_come_before_the_choice_of_a_victim(victim: str) -> None:
    specs: list[Spec] = [(A, 8, 5, 0.0), (A, 20, -5, 9.0), (B, 3, 9, 9.0)]
    for _ in range(20):
        assert preempted(run(*specs, charged={}, preemption_victim=victim)) == [0]


def test_nothing_is_preempted_while_blocks_are_left() -> None:
    scheduler = run((A, 8, 0, 0.0), (A, 8, 0, 0.0), charged={}, num_left=2)
    assert preempted(scheduler) == []
    scheduler = run((A, 8, 0, 0.0), (A, 8, 0, 0.0), charged={}, num_left=1)
    assert preempted(scheduler) == [1]


@pytest.mark.parametrize(
    ("keys", "charged", "victims"),
    [
        pytest.param([A, A], {A: 100}, [1], id="one of two of the key that was given more"),
        pytest.param([A, A, C, C, C], {A: 200, C: 100}, [4], id="the key with most sequences first"),
        pytest.param([A, A, C, C], {A: 200, C: 100}, [1], id="then the key that was given more"),
        pytest.param([A, C], {A: 100, C: 100}, [], id="no key is left without a sequence"),
        pytest.param([A, A, B], {A: 100}, [], id="as many as the others have are enough"),
        pytest.param([A, A, A, B], {A: 100}, [2], id="a key with fewer gets one more"),
        pytest.param([A, A], {B: 100}, [], id="a key that was given less keeps its slots"),
    ],
)
def test_the_victim_when_another_key_lacks_a_slot(
    keys: list[bytes], charged: dict[bytes, int], victims: list[int]
) -> None:
    scheduler = run(*[(key, 7, 0, 0.0) for key in keys], charged={}, num_left=9, max_batch_size=len(keys))
    scheduler.add(make_sequence(9, 7, 10, key=B))
    for key, count in charged.items():
        scheduler.shares.charge_key(key, count)
    assert preempted(scheduler, 9) == victims


@pytest.mark.parametrize(
    ("length", "num_left", "victims"),
    [
        pytest.param(12, 0, [1], id="half of what the other key holds"),
        pytest.param(13, 0, [], id="more than half"),
        pytest.param(12, 3, [1], id="room for the newcomer, none for a running sequence to grow"),
        pytest.param(12, 5, [], id="room"),
    ],
)
def test_the_victim_when_another_key_lacks_blocks(length: int, num_left: int, victims: list[int]) -> None:
    scheduler = run((A, 11, 0, 0.0), (A, 11, 0, 0.0), charged={A: 100}, num_left=num_left)
    scheduler.add(make_sequence(9, length, 10, key=B))
    assert preempted(scheduler, 9) == victims


def test_the_key_with_most_blocks_gives_some_to_a_newcomer_first() -> None:
    scheduler = run(*[(A, 7, 0, 0.0)] * 2, *[(C, 15, 0, 0.0)] * 2, charged={A: 200, C: 100})
    scheduler.add(make_sequence(9, 7, 10, key=B))
    assert preempted(scheduler, 9) == [3]


def test_nothing_is_preempted_for_a_key_that_was_given_as_much() -> None:
    scheduler = run((A, 7, 0, 0.0), (A, 7, 0, 0.0), charged={}, num_left=9, max_batch_size=2)
    for i in (8, 9):
        scheduler.add(make_sequence(i, 7, 10, key=B))
    scheduler.shares.charge_key(B, scheduler.shares.tokens_of(A) - scheduler.shares.tokens_of(B))
    assert scheduler.shares.level(A) == scheduler.shares.level(B)
    assert preempted(scheduler, 8, 9) == []
    scheduler.shares.charge_key(A, 1)
    assert preempted(scheduler, 8, 9) == [1]


@pytest.mark.parametrize(("is_plain", "victims"), [(False, [1]), (True, [])])
def test_a_shard_that_cannot_resume_keeps_what_it_runs(is_plain: bool, victims: list[int]) -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=100, max_batch_size=2, is_chunked=False, is_plain=is_plain)
    scheduler = Scheduler(policy, BlockPool(50, BLOCK))
    for i in range(2):
        scheduler.add(make_sequence(i, 7, 10, key=A))
    plan = scheduler.schedule()
    assert plan is not None
    answers = tuple(Generation(i, Tokens((5,), (0.0,), ("",))) for i in range(2))
    scheduler.commit(plan, StepResult(answers, None), 0.01)
    scheduler.add(make_sequence(9, 7, 10, key=B))
    assert scheduler.can_resume == (not is_plain)
    assert preempted(scheduler, 9) == victims


def test_all_that_a_preempted_sequence_had_computed_is_computed_again_at_no_charge() -> None:
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=4), BlockPool(20, BLOCK)), FakeShard()
    sequence = make_sequence(0, 11, 9)
    scheduler.add(sequence)

    def compute(num_steps: int) -> None:
        for _ in range(num_steps):
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.commit(plan, shard.step(plan), 0.01)

    compute(3)
    assert (sequence.num_computed, scheduler.shares.tokens_of(b"")) == (11, 11)
    for num_steps, repeated in ((1, 11), (2, 11)):
        scheduler.preempt_all()
        shard.retain(set())
        assert (sequence.num_computed, sequence.num_repeated, sequence.blocks) == (0, repeated, [])
        assert scheduler.waiting.num_preempted == 1
        compute(num_steps)
        assert (sequence.num_computed, sequence.num_repeated) == (4 * num_steps, 11 - 4 * num_steps)
    assert (scheduler.shares.tokens_of(b""), scheduler.shares.num_repeated) == (11, 12)


def test_b6_what_mirostat_has_come_to_goes_with_the_tokens_it_came_with() -> None:
    """Through preemption, in whatever step, and to another replica."""
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=8), BlockPool(20, BLOCK)), FakeShard()
    sequence, other = make_sequence(0, 5, 9), make_sequence(1, 5, 9)
    scheduler.add(sequence)
    scheduler.add(other)
    seen = []
    for step in range(9):
        plan = scheduler.schedule()
        assert plan is not None
        for start in plan.starts:
            expected = None if start.request_id or not start.output_ids else float(len(start.output_ids))
            assert start.mirostat_mu == expected
            seen.append(expected)
        result = shard.step(plan)
        length = len(shard.tokens[0]) - 5 if 0 in shard.tokens else 0
        scheduler.commit(plan, replace(result, memories=((0, float(length)),)), 0.01)
        if step in (3, 6):
            scheduler.preempt_all()
            shard.retain(set())
    assert len([mu for mu in seen if mu is not None]) == 2
    assert sequence.afresh().mirostat_mu == sequence.mirostat_mu == len(sequence.output_ids)
    assert other.mirostat_mu is None
