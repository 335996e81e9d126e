"""The allocator: no block in two hands, none lost, block 0 never given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.router.kv_cache.block_pool import BlockPool


@given(st.lists(st.one_of(st.integers(1, 6), st.just(0)), max_size=60))
def test_every_block_is_free_or_owned_once(requests: list[int]) -> None:
    allocator = BlockPool(num_blocks=20, block_size=16)
    owned: list[tuple[int, ...]] = []
    for count in requests:
        if count == 0 and owned:
            allocator.free(owned.pop(0))
        elif 0 < count <= allocator.num_free:
            owned.append(allocator.allocate(count))
        held = [block for blocks in owned for block in blocks]
        assert len(held) == len(set(held)) == allocator.num_used
        assert 0 not in held
        assert allocator.num_free + allocator.num_used == 20


def test_misuse_is_caught() -> None:
    allocator = BlockPool(2, 16)
    blocks = allocator.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 free"):
        allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(AssertionError, match="is not in use"):
        allocator.free(blocks[:1])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3)), max_size=80))
def test_used_free_and_cached_blocks_are_all_blocks(actions: list[tuple[int, int, int]]) -> None:
    """Allocate, publish, share and free in any order, beside a model that counts users."""
    allocator = BlockPool(num_blocks=12, block_size=16)
    holders: list[list[int]] = []
    for action, count, which in actions:
        if action == 0 and count <= allocator.num_free:
            holders.append(list(allocator.allocate(count)))
        elif action == 1 and holders:
            allocator.free(holders.pop(which % len(holders)))
        elif action == 2 and holders:
            for i, block in enumerate(holders[which % len(holders)]):
                allocator.publish(block, bytes([count, i]))
        elif action == 3:
            found = allocator.match(bytes([count, i]) for i in range(4))
            allocator.share(found)
            holders.append(list(found))
        held = {block for blocks in holders for block in blocks}
        assert allocator.num_used == len(held)
        assert allocator.num_free + allocator.num_used == 12
        assert 0 <= allocator.num_cached <= allocator.num_free
        assert 0 not in held
    for blocks in holders:
        allocator.free(blocks)
    taken = allocator.allocate(12)
    assert sorted(taken) == list(range(1, 13))


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 16).blocks_for(tokens) == blocks


def test_a_pool_without_a_host_tier_evicts_and_counts_it() -> None:
    pool = BlockPool(3, 16)
    for number in range(3):
        (block,) = pool.allocate(1)
        pool.publish(block, bytes([number]))
        pool.free([block])
    assert (pool.num_evicted, pool.num_cached) == (0, 3)
    pool.allocate(2)
    assert (pool.num_evicted, pool.num_cached) == (2, 1)
    assert pool.match([b"\0"]) == pool.match([b"\1"]) == ()
    assert pool.match([b"\2"])
    assert len(pool.host) == 0


def test_what_is_withdrawn_is_found_no_more_and_the_rest_is_as_it_was() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(3)
    for block in blocks[:2]:
        pool.publish(block, bytes([block]))
    pool.withdraw(blocks[1:])
    assert [pool.match([bytes([block])]) for block in blocks] == [(blocks[0],), (), ()]
    pool.free(blocks)
    assert (pool.num_cached, pool.num_free) == (1, 3)


def test_of_blocks_that_leave_only_those_in_other_use_stay() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.share(blocks[1:3])
    pool.free(blocks)
    assert (pool.num_used, pool.num_cached) == (2, 2)
    assert [pool.num_idle([block]) for block in blocks] == [1, 0, 0, 1]
    pool.free(blocks[1:3])
    assert (pool.num_used, pool.num_cached) == (0, 4)


def test_blocks_that_rows_have_already_are_in_use_by_each_of_them() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    pool.hold([(3, 5), (3, 1)])
    assert (pool.num_used, pool.num_free) == (3, 3)
    assert sorted(pool.allocate(3)) == [2, 4, 6]
    pool.free((3, 5))
    assert pool.num_free == 1  # the other row has block 3 still
    pool.free((3, 1))
    assert (pool.num_used, pool.num_free) == (3, 3)
