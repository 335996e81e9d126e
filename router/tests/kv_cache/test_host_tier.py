"""Evicted blocks come back from the host: what a sequence begins behind is what its tokens say, whatever happened."""

import random
from collections import deque

import pytest

from funitel.proto.step import BlockCopy, Generation, SamplingParams, StepResult, StoppingParams, StoredBlock, Tokens
from funitel.router.core.request import Request, Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.kv_cache.host_tier import CacheTier, HostTier
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler

SIZE = 4


def key(number: int) -> bytes:
    return number.to_bytes(2, "big")


def saved(number: int, block: int, slot: int) -> BlockCopy:
    return BlockCopy(block, slot, is_load=False, key=key(number))


def loading(number: int, block: int, slot: int) -> BlockCopy:
    return BlockCopy(block, slot, is_load=True, key=key(number))


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
    assert allocator.host.take_copies() == (saved(2, deep, 0), saved(1, shallow, 1))
    assert allocator.match([key(1), key(2)]) == ()
    assert allocator.match_host([key(1), key(2), key(3)]) == (key(1), key(2))
    allocator.free(taken)
    loaded = allocator.load([key(1)])
    assert allocator.host.take_copies() == (loading(1, loaded[0], 1),)
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
    assert allocator.host.take_copies() == (loading(1, block, 0),)  # and 2 is lost
    assert allocator.match_host([key(2)]) == ()


def test_the_least_recently_used_slot_goes_first() -> None:
    tier = HostTier(2)
    for number in (1, 2):
        tier.save(key(number), number)
    tier.load(key(1), 5)
    tier.save(key(3), 3)
    assert [key(number) in tier for number in (1, 2, 3)] == [True, False, True]
    assert (len(tier), tier.num_saved, tier.num_loaded) == (2, 3, 1)
    assert tier.take_copies()[-1] == saved(3, 3, 1)
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
    assert tier.take_copies() == (saved(2, 8, 0),)


def test_slots_of_an_earlier_run_are_found_by_their_age() -> None:
    stored = [StoredBlock(2, key(1), 5.0), StoredBlock(0, key(2), 50.0), StoredBlock(1, key(1), 9.0)]
    tier = HostTier(4, CacheTier.DISK, None, [*stored, StoredBlock(9, key(3), 0.0)], now=1000.0)
    assert [key(number) in tier for number in (1, 2, 3)] == [True, True, False]
    assert len(tier) == 2
    tier.load(key(1), 7)
    assert tier.take_copies() == (loading(1, 7, 2),), "the younger of two"
    for number in (4, 5, 6):
        tier.save(key(number), number, 1000.0)
    assert [copy.slot for copy in tier.take_copies()] == [1, 3, 0], "free slots, then the oldest"
    assert key(2) not in tier


def test_content_expires_after_its_last_use() -> None:
    pool = BlockPool(3, SIZE, 2, ttl=10.0)
    pool.tick(100.0)
    filled(pool, 1, 2)
    pool.tick(105.0)
    (block,) = pool.match([key(1)])
    pool.share([block])
    pool.tick(109.0)
    pool.free([block])
    pool.tick(110.0)
    assert (pool.match([key(1)]), pool.match([key(2)])) == ((block,), ())
    assert (pool.num_free, pool.num_cached, pool.num_expired) == (3, 1, 1)
    taken = pool.allocate(3)  # 1 goes to the host, as old as it is
    assert pool.host.take_copies() == (BlockCopy(block, 0, False, key=key(1), age_seconds=1.0),)
    pool.tick(118.9)
    assert pool.match_host([key(1)]) == (key(1),)
    pool.free(taken)
    pool.load([key(1)])
    pool.host.take_copies()
    pool.tick(128.8)
    assert key(1) in pool.host, "it was loaded ten seconds ago, less a tenth"
    pool.tick(128.9)
    assert key(1) not in pool.host
    assert (len(pool.host), pool.host.num_expired) == (0, 1)


def test_a_file_gets_blocks_when_they_are_published() -> None:
    pool = BlockPool(2, SIZE, host=HostTier(4, CacheTier.DISK))
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    assert pool.host.take_copies() == (saved(1, block, 0),)
    pool.free([block])
    pool.allocate(2)
    assert pool.host.take_copies() == (), "it is there already"


def test_wrong_content_is_wiped() -> None:
    tier = HostTier(3, CacheTier.DISK)
    tier.save(key(1), 5)
    tier.take_copies()
    tier.save(key(2), 6)
    tier.discard([key(1), key(2), key(3)])
    assert set(tier.take_copies()) == {BlockCopy(1, 0, is_load=False), BlockCopy(1, 1, is_load=False)}
    assert len(tier) == 0


def test_after_eight_losses_nothing_is_trusted() -> None:
    tier = HostTier(20, CacheTier.DISK)
    for number in range(20):
        tier.save(key(number), number)
    for number in range(7):
        tier.drop([number])
    assert (len(tier), tier.num_lost) == (13, 7)
    tier.drop([7, 8])
    assert (len(tier), tier.num_lost) == (0, 9)
    tier.save(key(1), 1)
    assert key(1) in tier


def test_what_is_swapped_out_stays_until_it_is_released() -> None:
    tier = HostTier(3)
    tier.save(key(9), 9)
    assert tier.swap_out([key(1), key(2)], [1, 2])
    tier.save(key(3), 3)  # in the place of 9
    tier.save(key(4), 4)
    assert [key(number) in tier for number in (1, 2, 3, 4, 9)] == [True, True, False, True, False]
    assert not tier.swap_out([key(1), key(5), key(6)], [1, 5, 6])
    assert tier.swap_out([key(1), key(5)], [1, 5])
    assert [key(number) in tier for number in (1, 2, 4, 5)] == [True, True, False, True]
    tier.save(key(7), 7)
    assert key(7) not in tier
    tier.release([key(1), key(2)])
    tier.save(key(7), 7)
    assert [key(number) in tier for number in (1, 2, 5, 7)] == [True, False, True, True]


class Machine:
    """A shard as far as blocks go: what lies in every block and slot, by the key of its content."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.blocks: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.num_found = 0

    def carry_out(self, plan: StepPlan, sequences: dict[int, Sequence]) -> tuple[int, ...]:
        """Make the copies of a step; returns slots that are lost, with which nothing else is done."""
        for copy in plan.copies:
            if copy.is_load and self.slots[copy.slot] != copy.key:
                return (copy.slot,)
            if copy.is_load:
                self.blocks[copy.block] = self.slots[copy.slot]
            else:
                assert self.blocks[copy.block] == copy.key
                self.slots[copy.slot] = self.blocks[copy.block]
        for start in plan.starts:
            sequence = sequences[start.request_id]
            for i in range(start.cache_len // SIZE):
                assert self.blocks[start.blocks[i]] == sequence.block_key(i, SIZE)
            self.num_found += start.cache_len // SIZE
        return ()

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


@pytest.mark.parametrize("kind", [CacheTier.HOST, CacheTier.DISK])
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_what_a_sequence_begins_behind_is_there(seed: int, swaps: bool, kind: CacheTier) -> None:
    """Random prompts of few beginnings in a small pool, two steps in flight, sequences that leave, steps that fail.

    Slots of a file are damaged now and then, and content expires.
    """
    chance = random.Random(seed)
    policy = SchedulerPolicy(max_batch_prefill_tokens=24, has_prefix_cache=True, swaps=swaps)
    ttl = 200.0 if seed % 2 else None
    scheduler = Scheduler(policy, BlockPool(14, SIZE, host=HostTier(10, kind, ttl), ttl=ttl))
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
        if kind is CacheTier.DISK and machine.slots and chance.random() < 0.1:
            machine.slots[chance.choice(list(machine.slots))] = b"damaged"
        scheduler.blocks.tick(float(tick))
        if len(in_flight) < 2:
            scheduler.preempt()
            plan = scheduler.schedule()
            if plan is not None:
                lost = machine.carry_out(plan, sequences)
                in_flight.append(plan)
                if lost:
                    scheduler.abandon()
                    in_flight.clear()
                    scheduler.blocks.host.drop(lost)
                    scheduler.preempt_all()
        if in_flight and (len(in_flight) == 2 or chance.random() < 0.5):
            plan = in_flight.popleft()
            machine.computed(plan, sequences)
            for sequence, _ in scheduler.commit(plan, result_of(plan, sequences), 0.01):
                if len(sequence.output_ids) >= sequence.request.stopping.max_new_tokens:
                    scheduler.remove(sequence)
    assert machine.num_found > 20
    assert scheduler.blocks.host.num_loaded > 5
    assert kind is CacheTier.HOST or scheduler.blocks.host.num_lost > 0
    assert not (scheduler.num_swapped and not swaps)
    waiting = [key for sequence in scheduler.waiting for key in sequence.swapped]
    assert scheduler.blocks.host._reserved.total() == len(waiting)
    assert scheduler.blocks.num_free + scheduler.blocks.num_used == 14
