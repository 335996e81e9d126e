"""What the router takes of the slots that shards had before it came."""

import pytest

from funitel.proto.errors import SettingsError
from funitel.proto.step import StoredBlock, WarmupResult
from funitel.router.engine.warmup import _lower_tier
from funitel.router.kv_cache.host_tier import CacheTier
from funitel.router.settings import RouterSettings


def result(num_slots: int, *stored: tuple[int, bytes], is_disk: bool = True) -> WarmupResult:
    return WarmupResult(
        pool_tokens=64,
        max_input_tokens=32,
        max_total_tokens=64,
        host_blocks=num_slots,
        is_disk=is_disk,
        stored_blocks=tuple(StoredBlock(slot, key, 1.0) for slot, key in stored),
    )


def test_ranks_must_have_the_same_key_in_the_same_slot() -> None:
    ranks = [
        result(6, (0, b"a"), (1, b"b"), (2, b"c"), (5, b"d")),
        result(5, (0, b"a"), (1, b"x"), (3, b"c"), (5, b"d")),
    ]
    tier = _lower_tier(ranks, RouterSettings())
    assert (tier.kind, tier.num_slots, tier.writes_through) == (CacheTier.DISK, 5, True)
    assert [key for key in (b"a", b"b", b"c", b"d", b"x") if key in tier] == [b"a"]


def test_slots_of_a_gpu_hold_nothing_at_first() -> None:
    tier = _lower_tier([result(4, is_disk=False)], RouterSettings())
    assert (tier.kind, tier.num_slots, len(tier), tier.writes_through) == (CacheTier.HOST, 4, 0, False)


def test_what_is_older_than_the_time_to_live_is_not_found() -> None:
    assert b"a" in _lower_tier([result(4, (0, b"a"))], RouterSettings(prefix_cache_ttl=1.5))
    assert b"a" not in _lower_tier([result(4, (0, b"a"))], RouterSettings(prefix_cache_ttl=0.5))


def test_swapping_needs_slots() -> None:
    _lower_tier([result(4)], RouterSettings(preemption_mode="swap"))
    with pytest.raises(SettingsError, match=r"^--preemption-mode swap needs slots of --kv-disk-gb"):
        _lower_tier([result(0)], RouterSettings(preemption_mode="swap"))
