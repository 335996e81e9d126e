"""When a replica is started again, and when it is not."""

from funitel.launcher.supervisor.restart_policy import MOST_DELAY_SECONDS, STEADY_SECONDS, Restarts


def test_at_once_then_later_and_later_then_never() -> None:
    restarts = Restarts(5)
    assert [restarts.delay_after(0.0) for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, None, None]


def test_delays_are_bounded() -> None:
    restarts = Restarts(10_000)
    delays = [restarts.delay_after(0.0) for _ in range(10_000)]
    assert max(delay for delay in delays if delay is not None) == MOST_DELAY_SECONDS
    assert restarts.delay_after(0.0) is None


def test_long_service_makes_up_for_what_was() -> None:
    restarts = Restarts(2)
    assert [restarts.delay_after(STEADY_SECONDS - 1) for _ in range(3)] == [0.0, 1.0, None]
    assert restarts.delay_after(STEADY_SECONDS) == 0.0
    assert [restarts.delay_after(0.0) for _ in range(2)] == [1.0, None]


def test_none_are_allowed() -> None:
    assert Restarts(0).delay_after(1e9) is None
