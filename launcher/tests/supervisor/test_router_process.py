"""A router that ends beside a keeper is started again, and one is replaced in place; the shards run on."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

Launch = Callable[..., Any]
ONE = ("--num-shard", "1", "--device", "cpu")


def without_ready_fd(argv: list[str]) -> list[str]:
    place = argv.index("--ready-fd")
    return [word for word in argv[:place] + argv[place + 2 :] if word != "--accepts-early"]


def ended_well(launched: Any) -> None:
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert "error:" not in launched.stderr
    launched.assert_nothing_left()


def test_a_router_that_dies_is_started_again_beside_the_same_shards(launch: Launch) -> None:
    launched = launch(*ONE).until_ready()
    router = launched.answering()
    os.kill(router, signal.SIGKILL)
    fresh = launched.answering()  # the connection waits for it
    assert fresh != router
    launched.until_said("the router answers again after")
    assert "router exited with code -9 (killed by SIGKILL); restart 1 of 5 in 0 s" in launched.stderr
    first, second = launched.of("router", "start")
    assert without_ready_fd(first["argv"]) == without_ready_fd(second["argv"])
    assert "--accepts-early" not in second["argv"], "clients wait in place of being refused"
    assert launched.events.count("shard-0 start") == launched.events.count("keeper start") == 1
    ended_well(launched)


def test_a_router_that_keeps_dying_ends_the_launcher(launch: Launch) -> None:
    fake = {"router": {"dies_after": 0.4, "code": 3, "last_words": ["broke down"]}}
    launched = launch(*ONE, "--max-restarts", "2", fake=fake)
    assert launched.wait() == 1
    assert launched.events.count("router start") == 3
    expected = "error: router exited with code 3: last line: broke down; restarted 2 times in a row"
    assert launched.stderr.splitlines()[-1] == expected
    launched.assert_nothing_left()


def test_before_the_deployment_is_ready_the_end_of_a_router_ends_it(launch: Launch) -> None:
    launched = launch(
        *ONE, fake={"router": {"fails": 1, "says": ["error: no such tokenizer"]}, "shard-0": {"delay": 9}}
    )
    assert launched.wait() == 1
    assert launched.stderr.splitlines()[-1] == "error: router exited with code 1: last error: no such tokenizer"
    assert launched.events.count("router start") == 1
    launched.assert_nothing_left()


def test_a_keeper_that_dies_is_started_again_and_the_router_runs_on(launch: Launch) -> None:
    launched = launch(*ONE).until_ready()
    router = launched.answering()
    os.kill(launched.entry("keeper start")["pid"], signal.SIGKILL)
    launched.until("router greeted", 2)
    assert "the keeper is lost, streams run on: keeper exited with code -9" in launched.stderr
    assert launched.answering() == router
    first, second = launched.of("keeper", "start")
    assert first["argv"] == second["argv"]
    ended_well(launched)


def test_keeper_and_router_that_die_together_are_started_again(launch: Launch) -> None:
    launched = launch(*ONE).until_ready()
    router = launched.answering()
    for pid in (launched.entry("keeper start")["pid"], router):
        os.kill(pid, signal.SIGKILL)
    launched.until_said("the router answers again after")
    assert launched.answering() != router
    assert launched.events.count("router start") == 2, "it was not started before the keeper listened"
    ended_well(launched)


def test_a_keeper_that_cannot_start_ends_the_launcher(launch: Launch) -> None:
    launched = launch(*ONE, fake={"keeper": {"fails": 1, "says": ["error: no way to listen"]}, "shard-0": {"delay": 9}})
    assert launched.wait() == 1
    assert launched.stderr.splitlines()[-1] == "error: keeper exited with code 1: last error: no way to listen"
    launched.assert_nothing_left()


def test_the_keeper_gets_no_key(launch: Launch) -> None:
    launched = launch(*ONE, environ={"API_KEY": "sesame"}).until_ready()
    keeper = launched.entry("keeper start")
    assert "sesame" not in str(keeper["argv"]) + str(keeper["environ"])
    ended_well(launched)


# SIGUSR2


def test_another_router_takes_over_in_place(launch: Launch) -> None:
    launched = launch(*ONE).until_ready()
    router = launched.answering()
    for count in (1, 2):
        launched.send(signal.SIGUSR2)
        launched.until("router yields", count)
        launched.until("router ready", count + 1)
        fresh = launched.answering()
        assert fresh != router
        router = fresh
    launched.until_said("the router was replaced in")
    assert "exited" not in launched.stderr, "an end that was asked for is no failure"
    starts = launched.of("router", "start")
    assert len({tuple(without_ready_fd(entry["argv"])) for entry in starts}) == 1
    assert {"router sigterm", "router sigusr1", "shard-0 sigterm"}.isdisjoint(launched.events)
    os.kill(router, signal.SIGKILL)
    assert launched.answering() != router, "it is watched as the one before was"
    ended_well(launched)


def test_where_another_router_cannot_start_the_current_one_serves_on(launch: Launch) -> None:
    launched = launch(
        *ONE, fake={"router": {"fails_at_start": 2, "says": ["error: new code, new errors"]}}
    ).until_ready()
    router = launched.answering()
    launched.send(signal.SIGUSR2)
    launched.until_said("the router was not replaced, it serves on: router exited with code 1")
    assert launched.answering() == router
    launched.send(signal.SIGUSR2)
    launched.until("router yields")
    assert launched.answering() != router
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_signal_during_a_replacement_leaves_nothing(launch: Launch) -> None:
    launched = launch(*ONE, fake={"router": {"delays": [0, 60]}}).until_ready()
    launched.send(signal.SIGUSR2)
    launched.until("router start", 2)
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert launched.events.count("router sigterm") >= 1
    launched.assert_nothing_left()


@pytest.mark.parametrize("when", ["early", "without a keeper"])
def test_it_ends_nothing_where_it_cannot_be_followed(launch: Launch, when: str) -> None:
    if when == "early":
        launched = launch(*ONE, fake={"shard-0": {"delay": 1}})
        launched.until("shard-0 start")
        launched.send(signal.SIGUSR2)
        launched.until_ready()
    else:
        launched = launch(*ONE, "--keeper", "false").until_ready()
        launched.send(signal.SIGUSR2)
        launched.until_said("without --keeper true the router cannot be replaced")
    assert launched.events.count("router start") == 1
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()
