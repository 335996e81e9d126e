"""Evicted blocks come back from the host: what a sequence begins behind is what its tokens say, whatever happened."""

import random
from collections import deque

import pytest

from funitel.proto.step import BlockCopy, Generation, SamplingParams, StepResult, StoppingParams, Tokens
from funitel.router.core.request import Request, Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.kv_cache.host_tier import HostTier
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler

SIZE = 4


def key(number: int) -> bytes:
    return number.to_bytes(2, "big")


def filled(allocator: BlockPool, *numbers: int) -> list[int]:
    """Blocks of known content that nobody uses."""
    blocks = []
    for number in numbers:
        blocks += allocator.allocate(1)
        allocator.publish(blocks[-1], key(number))
    allocator.free(blocks)
    return blocks


def test_evicted_content_is_saved_before_anything_else_and_loaded_into_another_block() -> None:
    allocator = BlockPool(2, SIZE, host_blocks=2)
    deep, shallow = filled(allocator, 1, 2)[::-1]
    taken = allocator.allocate(2)
    assert set(taken) == {deep, shallow}
    assert allocator.host.take_copies() == (BlockCopy(deep, 0, False), BlockCopy(shallow, 1, False))
    assert allocator.match([key(1), key(2)]) == ()
    assert allocator.match_host([key(1), key(2), key(3)]) == (key(1), key(2))
    allocator.free(taken)
    loaded = allocator.load([key(1)])
    assert allocator.host.take_copies() == (BlockCopy(loaded[0], 1, True),)
    assert allocator.match([key(1)]) == loaded
    allocator.free(loaded)
    allocator.allocate(2)
    assert allocator.host.take_copies() == ()  # it is there already


def test_what_is_to_be_loaded_is_not_overwritten_by_what_makes_room_for_it() -> None:
    allocator = BlockPool(1, SIZE, host_blocks=1)
    filled(allocator, 1)
    allocator.free(allocator.allocate(1))  # 1 is on the host
    (block,) = filled(allocator, 2)
    allocator.host.take_copies()
    assert allocator.load([key(1)]) == (block,)
    assert allocator.host.take_copies() == (BlockCopy(block, 0, True),)  # and 2 is lost
    assert allocator.match_host([key(2)]) == ()


def test_the_least_recently_used_slot_goes_first() -> None:
    tier = HostTier(2)
    for number in (1, 2):
        tier.save(key(number), number)
    tier.load(key(1), 5)
    tier.save(key(3), 3)
    assert [key(number) in tier for number in (1, 2, 3)] == [True, False, True]
    assert (len(tier), tier.num_saved, tier.num_loaded) == (2, 3, 1)
    assert tier.take_copies()[-1] == BlockCopy(3, 1, False)
    assert HostTier(0).take_copies() == ()


def test_copies_that_may_not_have_been_carried_out_are_forgotten() -> None:
    allocator = BlockPool(2, SIZE, host_blocks=4)
    filled(allocator, 1, 2)
    allocator.free(allocator.allocate(2))
    allocator.host.take_copies()
    (block,) = allocator.load([key(1)])
    allocator.free([block])  # whoever it was for has left
    allocator.forget_copies([BlockCopy(9, 0, False)])
    assert allocator.match([key(1)]) == ()
    assert allocator.match_host([key(2)]) == ()
    assert allocator.match_host([key(1)]) == (key(1),)
    assert allocator.num_free == 2
    assert len(set(allocator.allocate(2))) == 2


def test_a_slot_that_was_forgotten_is_used_again() -> None:
    tier = HostTier(1)
    assert tier.num_slots == 1
    tier.save(key(1), 7)
    tier.forget(tier.take_copies())
    tier.save(key(2), 8)
    assert tier.take_copies() == (BlockCopy(8, 0, False),)


class Machine:
    """A shard as far as blocks go: what lies in every block and slot, by the key of its content."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.blocks: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.num_found = 0

    def carry_out(self, plan: StepPlan, sequences: dict[int, Sequence]) -> None:
        for copy in plan.copies:
            if copy.is_load:
                self.blocks[copy.block] = self.slots[copy.slot]
            else:
                self.slots[copy.slot] = self.blocks[copy.block]
        for start in plan.starts:
            sequence = sequences[start.request_id]
            for i in range(start.cache_len // SIZE):
                assert self.blocks[start.blocks[i]] == sequence.block_key(i, SIZE)
            self.num_found += start.cache_len // SIZE

    def computed(self, plan: StepPlan, sequences: dict[int, Sequence]) -> None:
        """Note what the step fills, by blocks as they were when it was planned."""
        for i, count in plan.computed.items():
            sequence = sequences[i]
            if i in self.scheduler.running:
                begun = sequence.num_computed
                for j in range(begun // SIZE, (begun + count) // SIZE):
                    self.blocks[sequence.blocks[j]] = sequence.block_key(j, SIZE)


def result_of(plan: StepPlan, sequences: dict[int, Sequence]) -> StepResult:
    generations = [Generation(i, Tokens((7,), (-1.0,), ("x",), (False,))) for i in plan.computed if i in sequences]
    return StepResult(tuple(generations), None)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_sequence_begins_behind_is_there(seed: int) -> None:
    """Random prompts of few beginnings in a small pool, two steps in flight, sequences that leave, steps that fail."""
    chance = random.Random(seed)
    policy = SchedulerPolicy(max_batch_prefill_tokens=24, has_prefix_cache=True)
    scheduler = Scheduler(policy, BlockPool(14, SIZE, host_blocks=10))
    machine, sequences = Machine(scheduler), dict[int, Sequence]()
    in_flight: deque[StepPlan] = deque()
    for tick in range(300):
        if chance.random() < 0.4:
            beginning = chance.randrange(4)
            tokens = tuple(beginning * 50 + j for j in range(chance.choice([9, 17, 26])))
            stopping = StoppingParams(max_new_tokens=chance.randint(1, 6), ignore_eos=True)
            sequences[tick] = Sequence(tick, Request(input_ids=tokens, sampling=SamplingParams(), stopping=stopping))
            scheduler.add(sequences[tick])
        if scheduler.running and chance.random() < 0.1:
            scheduler.remove(sequences[chance.choice(list(scheduler.running))])
        if in_flight and chance.random() < 0.03:  # a step has failed; what it did is not known
            scheduler.abandon()
            in_flight.clear()
            scheduler.preempt_all()
        if len(in_flight) < 2:
            scheduler.preempt()
            plan = scheduler.schedule()
            if plan is not None:
                machine.carry_out(plan, sequences)
                in_flight.append(plan)
        if in_flight and (len(in_flight) == 2 or chance.random() < 0.5):
            plan = in_flight.popleft()
            machine.computed(plan, sequences)
            for sequence, _ in scheduler.commit(plan, result_of(plan, sequences), 0.01):
                if len(sequence.output_ids) >= sequence.request.stopping.max_new_tokens:
                    scheduler.remove(sequence)
    assert machine.num_found > 20
    assert scheduler.blocks.host.num_loaded > 5
    assert scheduler.blocks.num_free + scheduler.blocks.num_used == 14
