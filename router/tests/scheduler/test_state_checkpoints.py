"""Where states of models with recurrent layers are saved, and which sequences begin from them."""

import pytest
from sequences import BLOCK, FakeShard

from funitel.proto.step import SamplingParams, StateSave, StepResult, StoppingParams
from funitel.router.core.request import Request, Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.kv_cache.state_slots import StateSlots
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.scheduler.state_checkpoints import DECODE_INTERVAL, FIRST_DISTANCE

COMMON = tuple(range(1000))


def sequence(number: int, input_ids: tuple[int, ...], max_new_tokens: int = 2) -> Sequence:
    return Sequence(
        number,
        Request(
            input_ids=input_ids,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        ),
    )


def make_scheduler(state_slots: int, *, num_blocks: int = 3000, budget: int = 200, has_cache: bool = True) -> Scheduler:
    policy = SchedulerPolicy(max_batch_prefill_tokens=budget, has_prefix_cache=has_cache)
    return Scheduler(policy, BlockPool(num_blocks, BLOCK, state_slots=state_slots))


def step(scheduler: Scheduler, shard: FakeShard) -> tuple[StepPlan, StepResult]:
    scheduler.preempt()
    shard.retain(set(scheduler.running))
    plan = scheduler.schedule()
    assert plan is not None
    result = shard.step(plan)
    scheduler.commit(plan, result, 0.01)
    return plan, result


def run(scheduler: Scheduler, shard: FakeShard, *sequences: Sequence) -> list[StateSave]:
    """Add sequences and compute until all have ended; returns what was saved."""
    saves: list[StateSave] = []
    for each in sequences:
        scheduler.add(each)
    while scheduler.running or scheduler.waiting:
        plan, _ = step(scheduler, shard)
        saves += [save for each in (*plan.starts, *plan.rows) for save in each.state_saves]
    return saves


def test_checkpoints_of_a_prompt_lie_ever_farther_before_its_last_block() -> None:
    scheduler = make_scheduler(100)
    saves = run(scheduler, FakeShard(), sequence(0, COMMON))
    last = len(COMMON) - BLOCK  # the last token is always computed
    distances = [FIRST_DISTANCE * 2**i for i in range(4)]
    assert [save.position for save in saves] == [*(last - each for each in reversed(distances)), last]
    assert len({save.slot for save in saves}) == len(saves)
    assert scheduler.blocks.states.num_cached == len(saves)
    assert scheduler.blocks.states.num_used == 0


@pytest.mark.parametrize("num_own", [1, 10, 50, 100, 300])
def test_a_prompt_with_another_end_computes_about_twice_that_and_the_next_only_its_own(num_own: int) -> None:
    scheduler, shard = make_scheduler(100), FakeShard()
    prompts = [sequence(i, (*COMMON, *[5000 + i] * num_own)) for i in range(3)]
    for each in prompts:
        run(scheduler, shard, each)
    first, second, third = (each.num_prompt - each.num_cached for each in prompts)
    assert first == len(COMMON) + num_own
    assert second <= 2 * num_own + FIRST_DISTANCE + 2 * BLOCK
    assert third <= num_own + BLOCK


def test_the_next_turn_of_a_chat_begins_behind_the_answer() -> None:
    scheduler, shard = make_scheduler(100), FakeShard()
    first = sequence(0, COMMON, max_new_tokens=3 * DECODE_INTERVAL)
    saves = run(scheduler, shard, first)
    in_completion = [save.position for save in saves if save.position > len(COMMON)]
    assert len(in_completion) == 3
    assert [each % DECODE_INTERVAL for each in in_completion] == [0, 0, 0]
    following = sequence(1, (*COMMON, *first.output_ids, 77, 78, 79))
    run(scheduler, shard, following)
    assert following.num_cached == in_completion[-1]
    kept = [first.block_key(each // BLOCK - 1, BLOCK) in scheduler.blocks.states for each in in_completion]
    assert kept == [False, False, True]  # each in place of the one before


def test_sequences_of_a_common_prefix_wait_for_its_checkpoint() -> None:
    scheduler, shard = make_scheduler(100, budget=400), FakeShard()
    prompts = [sequence(i, (*COMMON, *[5000 + i] * 20)) for i in range(8)]
    run(scheduler, shard, *prompts)
    computed = [each.num_prompt - each.num_cached for each in prompts]
    assert computed[0] == 1020
    assert computed[1] <= 2 * 20 + FIRST_DISTANCE + 2 * BLOCK
    assert max(computed[2:]) <= 20 + BLOCK


def test_a_preempted_sequence_is_resumed_behind_its_last_checkpoint() -> None:
    scheduler, shard = make_scheduler(100), FakeShard()
    only = sequence(0, COMMON, max_new_tokens=400)
    scheduler.add(only)
    while len(only.output_ids) < 300:
        step(scheduler, shard)
    scheduler.preempt_all()
    step(scheduler, shard)
    assert 0 < only.num_known - only.num_cached <= DECODE_INTERVAL + BLOCK
    run(scheduler, shard)


def test_with_a_single_slot_the_checkpoint_becomes_the_working_state() -> None:
    slots = StateSlots(1)
    slot = slots.allocate()
    assert slot == 1
    assert slots.allocate() is None
    slots.publish(slot, b"a")
    assert slots.allocate_from(b"a") == (1, 1)
    assert b"a" not in slots
    assert slots.num_free == 0


def test_no_more_sequences_run_than_there_are_slots_and_all_finish() -> None:
    scheduler, shard = make_scheduler(3), FakeShard()
    prompts = [sequence(i, (*[9000 + i] * 30,), max_new_tokens=300) for i in range(12)]
    for each in prompts:
        scheduler.add(each)
    most = 0
    while scheduler.running or scheduler.waiting:
        step(scheduler, shard)
        most = max(most, len(scheduler.running))
    assert most == 3
    assert [len(each.output_ids) for each in prompts] == [300] * 12


def test_without_a_prefix_cache_nothing_is_saved() -> None:
    scheduler = make_scheduler(10, has_cache=False)
    assert run(scheduler, FakeShard(), sequence(0, COMMON, max_new_tokens=300)) == []


def test_the_checkpoints_of_one_prompt_take_a_share_of_the_slots() -> None:
    scheduler = make_scheduler(24)
    saves = run(scheduler, FakeShard(), sequence(0, COMMON))
    assert [save.position for save in saves] == [996 - 128, 996 - 64, 996]


def test_the_state_behind_an_evicted_block_is_forgotten() -> None:
    scheduler, shard = make_scheduler(100, num_blocks=260), FakeShard()
    run(scheduler, shard, sequence(0, COMMON))
    before = scheduler.blocks.states.num_cached
    run(scheduler, shard, sequence(1, (*[7] * 1000,)))
    keys = [sequence(0, COMMON).block_key(i, BLOCK) for i in range(249)]
    assert sum(each in scheduler.blocks.states for each in keys) < before
    assert scheduler.blocks.states.num_used == 0


def test_the_state_of_a_broken_sequence_is_shared_with_none() -> None:
    scheduler, shard = make_scheduler(100), FakeShard()
    prompt = COMMON[: 6 * BLOCK + 1]
    run(scheduler, shard, sequence(0, prompt))
    states = scheduler.blocks.states
    assert states is not None
    for i in range(6):  # the blocks are still there
        states.withdraw(sequence(0, prompt).block_key(i, BLOCK))
    shard.retain(set())
    broken = sequence(1, prompt)
    scheduler.add(broken)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.starts[0].state_saves
    result = shard.step(plan)
    result.generations[0].tokens.logprobs = (float("nan"),)
    scheduler.commit(plan, result, 0.01)
    assert broken.is_broken
    assert states.num_cached == 0
    assert states.num_used == 0


def test_saves_of_steps_that_failed_are_lost_and_their_slots_are_free() -> None:
    scheduler = make_scheduler(100)
    only = sequence(0, COMMON)
    scheduler.add(only)
    shard = FakeShard()
    for _ in range(4):
        step(scheduler, shard)
    plan = scheduler.schedule()
    assert plan is not None
    assert any(each.state_saves for each in (*plan.starts, *plan.rows))
    scheduler.abandon()
    scheduler.preempt_all()
    assert scheduler.blocks.states.num_used == 0
    shard.retain(set())
    run(scheduler, shard)
    assert len(only.output_ids) == 2
