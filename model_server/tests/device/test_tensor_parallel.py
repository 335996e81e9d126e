"""The shares of ranks: every head and unit exactly once, never a query head without its KV head."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.model_server.device.tensor_parallel import HeadSplit, split_evenly
from funitel.proto.errors import SettingsError


@given(st.integers(1, 500), st.integers(1, 16))
def test_even_split_covers_everything_once_and_differs_by_at_most_one(total: int, parts: int) -> None:
    ranges = [split_evenly(total, parts, i) for i in range(parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_query_heads_are_split_once_and_travel_with_their_kv_head(kv_heads: int, group: int, size: int) -> None:
    heads = kv_heads * group
    if size > heads:
        with pytest.raises(SettingsError, match=f"--num-shard {size} is larger than the model's {heads} query heads"):
            HeadSplit.of(heads, kv_heads, size, 0)
        return
    splits = [HeadSplit.of(heads, kv_heads, size, rank) for rank in range(size)]
    assert [h for s in splits for h in range(s.q_start, s.q_end)] == list(range(heads))
    for split in splits:
        assert split.num_heads > 0
        assert {h // group for h in range(split.q_start, split.q_end)} == set(range(split.kv_start, split.kv_end))
        assert split.num_heads % split.num_kv_heads == 0


def test_the_demo_model_on_two_ranks() -> None:
    assert HeadSplit.of(9, 3, 2, 0) == HeadSplit(0, 6, 0, 2)
    assert HeadSplit.of(9, 3, 2, 1) == HeadSplit(6, 9, 2, 3)
