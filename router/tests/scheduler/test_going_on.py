"""Sequences go on in rows that the shards have of an earlier router: planned as if this one had begun them."""

from sequences import BLOCK, FakeShard, make_sequence

from funitel.router.core.request import Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.scheduler import Scheduler

NUM_BLOCKS = 40
POLICY = SchedulerPolicy(max_batch_prefill_tokens=16, has_prefix_cache=True)


def steps(scheduler: Scheduler, shard: FakeShard, count: int = 1000) -> list[list[int]]:
    """Make steps; return the ids of what each delivered."""
    delivered = []
    while count:
        shard.retain(set(scheduler.running))
        plan = scheduler.schedule()
        if plan is None:
            break
        delivered.append([sequence.id for sequence, _ in scheduler.commit(plan, shard.step(plan), 0.01)])
        count -= 1
    return delivered


def taken_over(shard: FakeShard, left: list[Sequence]) -> tuple[Scheduler, list[Sequence]]:
    """Another scheduler, and the same sequences in their rows; as they come, the newest first."""
    tables = {each.id: tuple(each.blocks) for each in left}
    pool = BlockPool(NUM_BLOCKS, BLOCK)
    pool.hold(tables.values())
    scheduler, again = Scheduler(POLICY, pool), []
    for each in reversed(left):
        sequence = Sequence(each.id, each.request, list(each.output_ids))
        scheduler.go_on(sequence, tables[each.id], shard.cached[each.id])
        again.append(sequence)
    return scheduler, again


def test_a_prompt_and_completions_go_on_and_are_delivered_by_ids() -> None:
    shard = FakeShard()
    first = Scheduler(POLICY, BlockPool(NUM_BLOCKS, BLOCK))
    asked = [make_sequence(1, 9, 12), make_sequence(2, 9, 12, cache_salt="x"), make_sequence(3, 30, 4, cache_salt="y")]
    for each in asked:
        first.add(each)
    while not shard.cached.get(3):
        assert steps(first, shard, 1)
    assert shard.cached[3] < 30, "one is in the middle of its prompt"
    second, again = taken_over(shard, asked)
    delivered = steps(second, shard)
    assert all(ids == sorted(ids) for ids in delivered)
    assert [1, 2] in delivered
    assert second.blocks.num_used == 0
    assert shard.num_computed == sum(each.max_known - 1 for each in asked), "none is computed twice"
    alone = Scheduler(POLICY, BlockPool(NUM_BLOCKS, BLOCK))
    fresh = [Sequence(each.id, each.request) for each in asked]
    for each in fresh:
        alone.add(each)
    steps(alone, FakeShard())
    assert {each.id: each.output_ids for each in again} == {each.id: each.output_ids for each in fresh}


def test_blocks_of_rows_are_found_by_their_content_again() -> None:
    shard = FakeShard()
    first = Scheduler(POLICY, BlockPool(NUM_BLOCKS, BLOCK))
    asked = make_sequence(1, 12, 20)
    first.add(asked)
    steps(first, shard, 3)
    second, _ = taken_over(shard, [asked])
    assert second.cached_prefix_len(make_sequence(5, 13, 1)) == 12
