"""Micro-batches over pipeline stages: turns, places, and what is in flight of each."""

from funitel.proto.step import Generation, SamplingParams, StepResult, StoppingParams, Tokens
from funitel.router.core.request import Request, Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler


def scheduler_of(num_micro_batches: int, max_steps_each: int = 1, max_prefill: int = 64) -> Scheduler:
    policy = SchedulerPolicy(
        max_batch_prefill_tokens=max_prefill, num_micro_batches=num_micro_batches, max_steps_each=max_steps_each
    )
    return Scheduler(policy, BlockPool(1000, 4))


def queue(scheduler: Scheduler, *ids: int, num_tokens: int = 5, max_new_tokens: int = 20) -> None:
    for sequence_id in ids:
        request = Request(
            input_ids=tuple(range(num_tokens)),
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        )
        scheduler.add(Sequence(sequence_id, request))


def answer(scheduler: Scheduler, plan: StepPlan) -> None:
    due = [
        i for i, count in plan.computed.items() if i in scheduler.running and scheduler.running[i].num_pending == count
    ]
    generations = tuple(Generation(i, Tokens((7,), (-0.5,), ("x",), (False,))) for i in due)
    scheduler.commit(plan, StepResult(generations=generations, batch=None), 0.01)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_sequences_are_divided_evenly_and_take_turns() -> None:
    scheduler = scheduler_of(2)
    queue(scheduler, *range(1, 7))
    first, second = planned(scheduler), planned(scheduler)
    assert first.micro_batch != second.micro_batch
    assert len(first.computed) == len(second.computed) == 3
    assert not first.computed.keys() & second.computed.keys()
    assert scheduler.schedule() is None  # each waits for its tokens
    answer(scheduler, first)
    third = planned(scheduler)
    assert third.micro_batch == first.micro_batch
    assert third.computed.keys() == first.computed.keys()
    assert scheduler.schedule() is None
    answer(scheduler, second)
    assert planned(scheduler).computed.keys() == second.computed.keys()


def test_two_steps_of_one_are_in_flight_where_that_is_allowed() -> None:
    scheduler = scheduler_of(2, max_steps_each=2)
    queue(scheduler, 1, 2)
    steps = [planned(scheduler) for _ in range(4)]
    assert [step.micro_batch for step in steps[:2]] == [step.micro_batch for step in steps[2:]]
    assert scheduler.schedule() is None


def test_a_new_sequence_enters_the_smaller_one() -> None:
    scheduler = scheduler_of(2)
    queue(scheduler, 1, 2, 3)
    first, second = planned(scheduler), planned(scheduler)
    assert sorted([len(first.computed), len(second.computed)]) == [1, 2]
    answer(scheduler, first)
    answer(scheduler, second)
    queue(scheduler, 4)
    for _ in range(8):  # some steps are measured without prompts
        answer(scheduler, planned(scheduler))
    places = [sequence.micro_batch for sequence in scheduler.running.values()]
    assert len(places) == 4
    assert places.count(0) == places.count(1) == 2


def test_one_sequence_is_alone_in_its_steps() -> None:
    scheduler = scheduler_of(3)
    queue(scheduler, 1)
    plan = planned(scheduler)
    assert scheduler.schedule() is None
    answer(scheduler, plan)
    assert planned(scheduler).micro_batch == plan.micro_batch


def test_chunks_of_a_prompt_are_in_flight_together() -> None:
    scheduler = scheduler_of(2, max_steps_each=2, max_prefill=8)
    queue(scheduler, 1, num_tokens=24)
    first, second = planned(scheduler), planned(scheduler)
    assert first.computed == {1: 8}
    assert second.computed == {1: 8}


def test_all_end_whatever_the_turns() -> None:
    scheduler = scheduler_of(3, max_steps_each=2)
    queue(scheduler, *range(1, 12), max_new_tokens=1)
    steps: list[StepPlan] = []
    for _ in range(100):
        while (plan := scheduler.schedule()) is not None:
            steps.append(plan)
        if not steps:
            break
        step = steps.pop(0)
        answer(scheduler, step)
        for sequence in tuple(scheduler.running.values()):
            if len(sequence.output_ids) >= 1:
                scheduler.remove(sequence)
    assert not scheduler.running
    assert not scheduler.waiting
