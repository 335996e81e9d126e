"""When a replica is started again, and when it is not."""

from funitel.launcher.processes.restart_policy import MAX_DELAY_SECONDS, STEADY_SECONDS, RestartPolicy


def test_at_once_then_later_and_later_then_never() -> None:
    restarts = RestartPolicy(5)
    assert [restarts.delay_after(0.0) for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, None, None]


def test_delays_are_bounded() -> None:
    restarts = RestartPolicy(10_000)
    delays = [restarts.delay_after(0.0) for _ in range(10_000)]
    assert max(delay for delay in delays if delay is not None) == MAX_DELAY_SECONDS
    assert restarts.delay_after(0.0) is None


def test_long_service_makes_up_for_what_was() -> None:
    restarts = RestartPolicy(2)
    assert [restarts.delay_after(STEADY_SECONDS - 1) for _ in range(3)] == [0.0, 1.0, None]
    assert restarts.delay_after(STEADY_SECONDS) == 0.0
    assert [restarts.delay_after(0.0) for _ in range(2)] == [1.0, None]


def test_none_are_allowed() -> None:
    assert RestartPolicy(0).delay_after(1e9) is None
