"""What was used within a minute."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from funitel.router.auth.rate_limit import MinuteWindow


def test_what_is_a_minute_old_is_forgotten() -> None:
    window = MinuteWindow()
    window.add(3, 10.2)
    window.add(4, 10.9)
    assert len(window._seconds) == 1
    window.add(5, 40.0)
    assert window.used(40.0) == 12
    assert window.used(70.9) == 12, "a second counts until all of it is a minute old"
    assert window.used(71.0) == 5
    assert window.used(101.0) == 0


def test_how_long_to_wait_for_room() -> None:
    window = MinuteWindow()
    assert window.seconds_until(0, 5.0) == 0.0
    window.add(3, 10.0)
    window.add(4, 20.0)
    assert window.seconds_until(7, 30.0) == 0.0
    assert window.seconds_until(6, 30.0) == 41.0
    assert window.seconds_until(4, 30.0) == 41.0
    assert window.seconds_until(3, 30.0) == 51.0
    assert window.seconds_until(-1, 30.0) == 51.0


USES = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5)), max_size=60)


@given(USES, st.integers(1, 12))
def test_no_minute_has_more_than_was_allowed(uses: list[tuple[float, int]], most: int) -> None:
    window, now = MinuteWindow(), 1000.0
    taken: list[tuple[float, int]] = []
    for pause, amount in uses:
        now += pause
        if window.used(now) + amount <= most:
            window.add(amount, now)
            taken.append((now, amount))
        else:
            wait = window.seconds_until(most - amount, now)
            later = deepcopy(window).used(now + wait + 1e-6)
            assert amount > most or (wait > 0 and later + amount <= most)
    for begin, _ in taken:
        assert sum(amount for at, amount in taken if begin <= at < begin + 60) <= most


@given(USES)
def test_it_never_holds_more_than_a_minute_of_seconds(uses: list[tuple[float, int]]) -> None:
    window, now = MinuteWindow(), 0.0
    for pause, amount in uses:
        now += pause / 30
        window.add(amount, now)
        window.used(now)
        assert len(window._seconds) <= 61
