"""Background sequences, those of batches: what holds of them beside others in every part of the scheduler."""

from typing import Any

import pytest
from queues import waiting
from sequences import BLOCK, FakeShard, make_sequence

from funitel.proto.errors import Overloaded
from funitel.router.core.request import Sequence, background_key, is_background
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.admission import Admission, InFlight, Reservations
from funitel.router.scheduler.background import ALONE_SECONDS, QUIET_STEPS, BackgroundShare
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.cost.step_cost import StepCostModel
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.scheduler.waiting_queue import FairShares

BATCH = background_key(b"a")


class Loop:
    """A scheduler over a shard, a step at a time."""

    def __init__(self, num_blocks: int = 200, **policy: Any) -> None:
        self.scheduler = Scheduler(
            SchedulerPolicy(**{"max_batch_prefill_tokens": 64} | policy), BlockPool(num_blocks, BLOCK)
        )
        self.shard = FakeShard()

    def step(self) -> StepPlan | None:
        self.scheduler.preempt()
        self.shard.retain(set(self.scheduler.running))
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.commit(plan, self.shard.step(plan), 0.01)
        return plan

    def add(self, sequence_id: int, prompt_len: int = 8, max_new_tokens: int = 50, key: bytes = b"a") -> Sequence:
        sequence = make_sequence(sequence_id, prompt_len, max_new_tokens, key=key)
        self.scheduler.add(sequence)
        return sequence


def test_a_background_key_is_none_of_an_owner() -> None:
    assert is_background(background_key(b""))
    assert is_background(BATCH)
    assert not is_background(b"")
    assert not is_background(b"a" * 16)


def test_others_go_first_however_long_a_batch_has_waited() -> None:
    old = make_sequence(0, 8, 5, key=BATCH)
    new = make_sequence(1, 8, 5, key=b"a", priority=100)
    new.arrived = 1e6
    queue, shares = waiting(old, new)
    shares.charge(new, 1_000_000)
    assert queue.first() is new
    assert queue.in_order(2) == [new, old]
    assert {each.id for each in queue.ahead_of(make_sequence(2, 8, 5, key=BATCH))} == {0, 1}
    assert queue.ahead_of(make_sequence(3, 8, 5, key=b"b")) == []
    assert (queue.num_foreground, queue.num_foreground_tokens, queue.num_prompt_tokens) == (1, 8, 16)
    queue.remove(new)
    assert (queue.num_foreground, queue.num_foreground_tokens) == (0, 0)


def test_what_a_batch_was_given_moves_no_other_key() -> None:
    shares = FairShares()
    batch, other = make_sequence(0, 8, 5, key=BATCH), make_sequence(1, 8, 5, key=b"a")
    shares.join(BATCH)
    shares.charge(batch, 100_000)
    shares.join(b"a")
    assert shares.tokens_of(b"a") == 0
    shares.charge(other, 10)
    shares.join(b"b")
    assert shares.tokens_of(b"b") == 10
    shares.leave(b"a")
    shares.leave(b"b")
    assert shares.tokens_of(b"a") == 0  # nobody of that kind is left
    assert shares.tokens_of(BATCH) == 100_000
    assert shares.num_busy[True]


def test_batches_sit_out_until_another_has_its_first_token() -> None:
    loop = Loop(max_batch_prefill_tokens=16)
    batch = loop.add(0, key=BATCH)
    for _ in range(3):
        loop.step()
    assert len(batch.output_ids) >= 2
    known = len(batch.output_ids)
    other = loop.add(1, prompt_len=40)
    steps = 0
    while not other.output_ids:
        plan = loop.step()
        assert plan is not None
        assert set(plan.computed) == {1}
        assert [(row.request_id, row.chunk_len) for row in plan.rows if row.request_id == 0] == [(0, 0)]
        steps += 1
    assert steps == 3  # 40 tokens, 16 a step: as many as without the batch
    assert len(batch.output_ids) == known
    loop.step()
    assert (len(other.output_ids), len(batch.output_ids)) == (2, known + 1)


def test_a_prompt_of_a_batch_waits_for_the_prompt_of_another() -> None:
    loop = Loop(max_batch_prefill_tokens=16)
    batch = loop.add(0, prompt_len=48, key=BATCH)
    loop.step()
    other = loop.add(1, prompt_len=30, key=b"b")
    before = batch.num_computed
    while not other.output_ids:
        loop.step()
    assert batch.num_computed == before
    for _ in range(10):
        loop.step()
    assert batch.output_ids


def test_another_does_not_wait_for_a_prefix_that_a_batch_computes() -> None:
    loop = Loop(max_batch_prefill_tokens=16)
    loop.add(0, prompt_len=48, key=BATCH)
    loop.step()
    other = loop.add(1, prompt_len=44)
    loop.step()
    assert other.was_started
    for _ in range(3):
        loop.step()
    assert other.output_ids


@pytest.mark.parametrize("policy", [{"max_batch_size": 2}, {}])
def test_batches_are_preempted_for_any_other(policy: dict[str, Any]) -> None:
    loop = Loop(num_blocks=200 if policy else 12, **policy)
    batch = [loop.add(i, prompt_len=16, max_new_tokens=4, key=BATCH) for i in range(2)]
    loop.step()
    assert len(loop.scheduler.running) == 2
    others = [loop.add(i, prompt_len=16, max_new_tokens=4, key=b"b") for i in (2, 3)]
    for _ in range(3):
        loop.step()
    assert all(other.output_ids for other in others)
    assert loop.scheduler.num_preempted >= 1
    for _ in range(60):
        loop.step()
    assert all(len(each.output_ids) == 4 for each in (*batch, *others))


def test_growth_takes_blocks_of_batches_first() -> None:
    loop = Loop(num_blocks=14)
    other = loop.add(0, prompt_len=24, max_new_tokens=20)
    batch = loop.add(1, prompt_len=16, max_new_tokens=20, key=BATCH)
    for _ in range(30):
        loop.step()
    assert loop.scheduler.num_preempted
    assert len(other.output_ids) == 20
    assert other.num_repeated == 0
    for _ in range(30):
        loop.step()
    assert len(batch.output_ids) == 20


def test_batches_take_no_place_of_others() -> None:
    reservations = Reservations()
    held = [reservations.hold(BATCH) for _ in range(3)]
    reservations.hold(b"a")
    assert reservations.in_flight(b"a") == InFlight(1, 1)
    assert reservations.in_flight(BATCH) == InFlight(4, 3)
    for each in held:
        each.release()
    assert reservations.in_flight(BATCH) == InFlight(1, 0)


def test_a_full_server_refuses_batches_and_displaces_none_for_them() -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=64), BlockPool(50, BLOCK))
    for i in range(4):
        scheduler.add(make_sequence(i, 8, 5, key=b"a"))
    admission = Admission(4, max_queued_tokens=32, has_several_keys=True)
    batch = make_sequence(9, 8, 5, key=BATCH)
    with pytest.raises(Overloaded, match="at most 4"):
        admission.check(batch, InFlight(4, 0), scheduler)
    with pytest.raises(Overloaded, match="prompt tokens"):
        admission.check(batch, InFlight(0, 0), scheduler)


def test_the_target_of_the_first_token_refuses_no_batch() -> None:
    loop = Loop()
    for i in range(8):
        loop.add(i, prompt_len=64)
    admission = Admission(100, target_seconds=1e-9)
    for _ in range(20):
        loop.step()
    with pytest.raises(Overloaded, match="first token"):
        admission.check(make_sequence(98, 64, 4, key=b"b"), InFlight(8, 0), loop.scheduler)
    assert admission.check(make_sequence(99, 64, 4, key=BATCH), InFlight(8, 0), loop.scheduler) is None


def test_prompts_of_batches_do_not_count_as_queued_for_others() -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=64), BlockPool(50, BLOCK))
    for i in range(4):
        scheduler.add(make_sequence(i, 8, 5, key=BATCH))
    admission = Admission(4, max_queued_tokens=32)
    assert admission.check(make_sequence(9, 30, 5, key=b"a"), InFlight(0, 0), scheduler) is None


def test_steps_of_batches_alone_are_not_planned_ahead() -> None:
    loop = Loop()
    loop.add(0, key=BATCH)
    first = loop.scheduler.schedule()
    assert first is not None
    assert loop.scheduler.schedule() is None
    loop.add(1, key=b"b")
    second = loop.scheduler.schedule()
    assert second is not None
    assert set(second.computed) == {1}
    loop.scheduler.commit(first, loop.shard.step(first), 0.01)
    loop.scheduler.commit(second, loop.shard.step(second), 0.01)


def _learnt(fixed: float, of_a_row: float) -> StepCostModel:
    costs = StepCostModel(None)
    for count in (1, 8, 2, 16, 4, 32, 1, 8) * 20:
        costs.observe(StepLoad(count, count * 10), fixed + of_a_row * count)
    return costs


def _rows(count: int, key: bytes) -> list[Sequence]:
    return [make_sequence(i, 10, 5, key=key) for i in range(count)]


def test_batches_have_a_quarter_of_a_step_beside_others_and_all_once_it_is_quiet() -> None:
    share = BackgroundShare(_learnt(0.010, 0.001))
    share.num_quiet_steps = 0
    rows, seconds = share.max_rows([*_rows(4, b"b"), *_rows(40, BATCH)])
    assert seconds == pytest.approx(1.25 * 0.014, rel=0.05)
    assert 2 <= rows <= 4  # 3.5 ms
    rows, seconds = share.max_rows(_rows(40, BATCH))
    assert seconds == pytest.approx(1.25 * 0.011, rel=0.05)
    assert 2 <= rows <= 4
    for _ in range(QUIET_STEPS):
        share.num_quiet_steps += 1
    assert share.max_rows(_rows(40, BATCH)) == (40, ALONE_SECONDS)
    rows, _ = share.max_rows(_rows(400, BATCH))
    assert 80 <= rows <= 100  # 100 ms
    share = BackgroundShare(_learnt(0.200, 0.001))
    assert share.max_rows(_rows(40, BATCH)) == (1, ALONE_SECONDS)


def test_before_anything_is_known_batches_are_not_bounded() -> None:
    share = BackgroundShare(StepCostModel(None))
    share.num_quiet_steps = 0
    assert share.max_rows([*_rows(1, b"b"), *_rows(3, BATCH)]) == (3, 0.0)


def test_rows_beyond_the_share_sit_out_oldest_first_and_all_end() -> None:
    loop = Loop(num_blocks=400)
    loop.scheduler.step_time = costs = _learnt(0.010, 0.002)
    loop.scheduler.background = BackgroundShare(costs)
    other = loop.add(0, max_new_tokens=40, key=b"b")
    batch = [loop.add(i, max_new_tokens=4, key=BATCH) for i in range(1, 9)]
    seen = set()
    for _ in range(60):
        plan = loop.step()
        if plan is not None:
            seen.add(loop.scheduler.background.num_held)
    assert max(seen) >= 4
    assert len(other.output_ids) == 40
    assert all(len(each.output_ids) == 4 for each in batch)


def test_prompts_of_batches_beside_a_stream_have_what_is_left_of_the_step() -> None:
    costs = _learnt(0.010, 0.001)
    for count in (8, 16, 32, 64, 128, 8, 16, 32) * 10:
        load = StepLoad(2, 20)
        load.add_chunk(0, count)
        costs.observe(load, 0.012 + 0.0002 * count)
    costs.observe(StepLoad(2, 20), 0.012)  # else the next step measures one
    load = StepLoad(2, 20)
    usual = costs.budget(4096, StepLoad(2, 20)).fit(0, 1000)
    of_batches = costs.budget(4096, load, most_seconds=1.25 * 0.012).fit(0, 1000)
    assert of_batches < usual
    assert 4 <= of_batches <= 18  # 3 ms
