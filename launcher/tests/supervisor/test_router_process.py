"""A router that ends beside a keeper is started again, and one is replaced in place; the shards run on."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
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
    assert "\nerror:" not in launched.stderr
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


# A keeper of another version


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A file that has the version of children that are started; they have version 1 at first."""
    path = tmp_path / "version"
    path.write_text("1")
    return path


def versions(version: Path, **router: Any) -> dict[str, Any]:
    return {"keeper": {"version_file": str(version)}, "router": {"version_file": str(version), **router}}


def test_a_keeper_of_another_version_is_replaced_once_a_router_is_to_be(launch: Launch, version: Path) -> None:
    launched = launch(*ONE, "--max-restarts", "0", fake=versions(version, finishes=1)).until_ready()
    router = launched.answering()
    version.write_text("2")
    launched.send(signal.SIGUSR2)
    launched.until("router finishes")
    launched.send(signal.SIGUSR2)
    launched.until_said("a router of another version finishes its connections first")
    assert launched.events.count("router ready") == 1, "two routers never use the same shards"
    assert launched.answering() != router, "the connection waits for it"
    launched.until_said("the router answers again after")
    assert launched.stderr.count("the keeper is replaced, since a router of another version") == 1
    assert "exited with code 75" not in launched.stderr
    assert "the keeper is lost" not in launched.stderr
    assert launched.events.count("keeper start") == 2
    assert launched.events.count("keeper stopped") == launched.events.count("shard-0 start") == 1
    launched.send(signal.SIGUSR2)
    launched.until("router yields")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_keeper_of_another_version_is_replaced_once_a_router_has_died(launch: Launch, version: Path) -> None:
    launched = launch(*ONE, "--max-restarts", "1", fake=versions(version)).until_ready()
    router = launched.answering()
    version.write_text("2")
    os.kill(router, signal.SIGKILL)
    launched.until("keeper start", 2)  # connections that the earlier one has accepted are reset
    assert launched.answering() != router
    launched.until_said("the router answers again after")
    assert launched.stderr.count("restart 1 of 1") == 1, "the refusal is no crash"
    assert launched.stderr.count("the keeper is replaced, since a router of another version") == 1
    assert launched.events.count("keeper start") == 2
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_keeper_of_another_version_after_a_crash_lets_the_router_finish(launch: Launch, version: Path) -> None:
    launched = launch(*ONE, fake=versions(version)).until_ready()
    router = launched.answering()
    version.write_text("2")
    os.kill(launched.entry("keeper start")["pid"], signal.SIGKILL)
    assert launched.answering() != router, "no connection waits for a router that gets none"
    assert "router finishes" in launched.events
    assert "the router has finished its connections" in launched.stderr
    assert launched.events.count("keeper start") == 2
    ended_well(launched)


def test_routers_that_every_keeper_refuses_end_the_launcher(launch: Launch, version: Path, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    fixed.write_text("1")
    fake = versions(version) | {"keeper": {"version_file": str(fixed)}}
    launched = launch(*ONE, "--max-restarts", "2", fake=fake).until_ready()
    version.write_text("2")
    os.kill(launched.answering(), signal.SIGKILL)
    assert launched.wait() == 1
    last = launched.stderr.splitlines()[-1]
    expected = "error: router exited with code 76: last error: refused: it speaks version 1, not 2"
    assert last == f"{expected}; restarted 2 times in a row"
    launched.assert_nothing_left()


def test_an_upgrade_replaces_a_keeper_of_another_version(launch: Launch, version: Path) -> None:
    launched = launch(*ONE, fake=versions(version, finishes=1)).until_ready()
    router = launched.answering()
    version.write_text("2")
    launched.send(signal.SIGHUP)
    launched.until_said("upgraded in")
    assert launched.answering() != router
    launched.until_said("the deployment before the upgrade has ended")
    assert launched.stderr.count("the keeper is replaced, since a router of another version") == 1
    ended_well(launched)


@pytest.mark.parametrize("dies", ["router", "keeper", ""])
def test_an_adopted_keeper_leaves_the_port_open(launch: Launch, version: Path, tmp_path: Path, dies: str) -> None:
    where = ("--shard-uds-path", str(tmp_path / "adopted"))
    first = launch(*ONE, *where, fake=versions(version)).until_ready()
    keeper, router = (first.entry(f"{name} start")["pid"] for name in ("keeper", "router"))
    first.send(signal.SIGKILL)
    first.wait()
    version.write_text("2")
    second = launch(*ONE, *where, "--port", str(first.port), fake=versions(version)).until_ready()
    second.port = first.port
    assert second.answering() == router
    if dies:
        os.kill({"router": router, "keeper": keeper}[dies], signal.SIGKILL)
    else:
        second.send(signal.SIGUSR2)
    while "keeper start" not in second.events:
        socket.create_connection(("127.0.0.1", first.port)).close()
    assert second.answering() != router
    second.uds_path = str(tmp_path / "adopted")
    if not dies:
        assert "exited" not in second.stderr
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    assert "\nerror:" not in second.stderr


# A router that dies while it finishes its requests


def test_another_router_finishes_what_one_has_left(launch: Launch) -> None:
    launched = launch(*ONE, fake={"router": {"drains_past": ["router", "sigterm", 2]}}).until_ready()
    router = launched.answering()
    launched.send(signal.SIGTERM)
    launched.until("router sigterm")
    os.kill(router, signal.SIGKILL)
    assert launched.wait() == 0
    ends = [launched.events.index(event) for event in ("router stopped", "shard-0 sigterm", "keeper stopped")]
    assert ends == sorted(ends), "it finishes before anything else ends"
    assert launched.events.count("router ready") == launched.events.count("router sigterm") == 2
    said = "router exited with code -9 (killed by SIGKILL); another router takes over, to finish its requests"
    assert said in launched.stderr
    launched.assert_nothing_left()


def test_routers_that_die_again_and_again_end_the_drain(launch: Launch) -> None:
    fake = {"router": {"drains": 60}, "launcher": {"supervisor.router_process.MAX_LAST_RESTARTS": 1}}
    launched = launch(*ONE, fake=fake).until_ready()
    launched.send(signal.SIGTERM)
    for count in (1, 2):
        launched.until("router sigterm", count)
        os.kill(launched.of("router", "sigterm")[-1]["pid"], signal.SIGKILL)
    assert launched.wait() == 0
    assert launched.events.count("router start") == 2
    launched.assert_nothing_left()


def test_no_router_follows_where_every_process_is_to_be_killed(launch: Launch) -> None:
    launched = launch(*ONE, fake={"router": {"drains": 60}}).until_ready()
    for _ in range(2):
        launched.send(signal.SIGINT)
        launched.until("router sigterm")
    assert launched.wait() == 0
    assert launched.events.count("router start") == 1
    launched.assert_nothing_left()


def test_another_router_finishes_after_an_upgrade(launch: Launch) -> None:
    launched = launch(*ONE, fake={"router": {"drains_past": ["router", "sigusr1", 2]}}).until_ready()
    router = launched.answering()
    launched.send(signal.SIGHUP)
    launched.until("router sigusr1")
    os.kill(router, signal.SIGKILL)
    launched.until_said("the deployment before the upgrade has ended")
    assert launched.events.count("router start") == 3
    assert launched.answering() == launched.of("router", "ready")[1]["pid"]
    ended_well(launched)


def test_one_router_finishes_where_a_stop_follows_an_upgrade(launch: Launch) -> None:
    launched = launch(*ONE, fake={"router": {"drains_past": ["router", "sigterm", 3]}}).until_ready()
    router = launched.answering()
    launched.send(signal.SIGHUP)
    launched.until("router sigusr1")
    launched.send(signal.SIGTERM)
    launched.until("router sigterm", 2)  # of both deployments
    os.kill(router, signal.SIGKILL)
    assert launched.wait() == 0
    assert launched.events.count("router start") == 3
    launched.assert_nothing_left()
