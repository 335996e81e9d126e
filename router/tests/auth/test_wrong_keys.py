"""Bans of addresses that try wrong keys."""

import pytest

from funitel.proto.errors import RateLimited
from funitel.router.auth.wrong_keys import MAX_ADDRESSES, WrongKeys


def is_banned(wrong_keys: WrongKeys, address: str, now: float) -> bool:
    try:
        wrong_keys.check(address, now)
    except RateLimited:
        return True
    return False


def test_an_address_is_banned_by_its_last_wrong_key_and_for_the_time_that_is_told() -> None:
    wrong_keys = WrongKeys(5, 300)
    for number in range(4):
        wrong_keys.count("a", float(number))
        assert not is_banned(wrong_keys, "a", float(number))
    wrong_keys.count("a", 10)
    assert not is_banned(wrong_keys, "b", 10)
    with pytest.raises(RateLimited, match="too many wrong API keys came from this address") as caught:
        wrong_keys.check("a", 20)
    assert caught.value.wait_seconds == 290
    assert is_banned(wrong_keys, "a", 309.9)
    assert not is_banned(wrong_keys, "a", 310)


def test_keys_count_together_within_the_time_only() -> None:
    wrong_keys = WrongKeys(2, 10)
    wrong_keys.count("a", 0)
    wrong_keys.count("a", 10)
    assert not is_banned(wrong_keys, "a", 10)
    wrong_keys.count("a", 11)
    assert is_banned(wrong_keys, "a", 11)


def test_after_a_ban_it_takes_as_many_again() -> None:
    wrong_keys = WrongKeys(2, 10)
    for now in (0, 0, 10):
        wrong_keys.count("a", now)
    assert not is_banned(wrong_keys, "a", 10)
    wrong_keys.count("a", 10)
    assert is_banned(wrong_keys, "a", 10)


def test_none_is_banned_where_none_is_to_be() -> None:
    wrong_keys = WrongKeys(0, 10)
    for _ in range(100):
        wrong_keys.count("a", 0)
    assert not is_banned(wrong_keys, "a", 0)
    assert len(wrong_keys.tries) == 0


def test_addresses_are_bounded_and_the_one_that_tried_longest_ago_is_forgotten() -> None:
    wrong_keys = WrongKeys(2, 10)
    for number in range(MAX_ADDRESSES + 10):
        wrong_keys.count("busy", 0)
        wrong_keys.count(f"a{number}", 0)
    assert len(wrong_keys.tries) == MAX_ADDRESSES
    assert is_banned(wrong_keys, "busy", 0)
