"""Bodies of the routes of tenants: values at the bounds."""

import time
from datetime import UTC, datetime

import pytest

from funitel.launcher.control_plane.checks import Fields
from funitel.launcher.tenants.api.requests import MAX_INSTANT, expiry_of
from funitel.proto.errors import InvalidRequest


def test_a_key_may_expire_until_the_last_date_that_programs_can_name() -> None:
    assert expiry_of(Fields({"expires": MAX_INSTANT})) == MAX_INSTANT
    assert datetime.fromtimestamp(MAX_INSTANT, UTC).isoformat() == "9999-12-31T23:59:59+00:00"
    assert expiry_of(Fields({"expires": "9999-12-31"})) == datetime(9999, 12, 31, tzinfo=UTC).timestamp()
    assert expiry_of(Fields({})) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (MAX_INSTANT + 1, "`expires` must be before the year 10000"),
        (1e300, "`expires` must be before the year 10000"),
        (0, "`expires` must be in the future"),
        ("2020-01-01", "`expires` must be in the future"),
        ("10000-01-01", "`expires` must be like 2027-01-31"),
        ("soon", "`expires` must be like 2027-01-31"),
        ([], "`expires` must be"),
        (True, "`expires` must be"),
        (float("nan"), "`expires` must be"),
    ],
)
def test_an_expiry_that_is_none_is_refused(value: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        expiry_of(Fields({"expires": value}))
    assert caught.value.message.startswith(words)


def test_now_is_not_the_future() -> None:
    with pytest.raises(InvalidRequest, match="in the future"):
        expiry_of(Fields({"expires": time.time()}))
