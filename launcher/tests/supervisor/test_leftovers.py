"""The death of a launcher: the next one with the same settings adopts what it has left, any other one ends it."""

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.config.resolve import resolve
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.leftovers import fingerprint

Launch = Callable[..., Any]
TWO = ("--num-shard", "2", "--device", "cpu")


def killed(launch: Launch, *flags: str, **more: Any) -> Any:
    launched = launch(*TWO, *flags, **more).until_ready()
    launched.process.kill()
    launched.process.wait()
    return launched


def following(launch: Launch, first: Any, *flags: str, **more: Any) -> Any:
    """Another launcher at the place of the first."""
    fresh = launch("--port", str(first.port), "--shard-uds-path", first.uds_path, *TWO, *flags, **more)
    fresh.port, fresh.uds_path = first.port, first.uds_path
    return fresh


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_launcher_has_left_is_adopted(launch: Launch) -> None:
    first = killed(launch)
    router = first.answering()
    pids = {entry["pid"] for entry in first.entries if entry["process"] != "download"}
    assert len(pids) == 4
    assert all(map(is_alive, pids))
    second = following(launch, first).until_ready()
    assert second.events == [], "it has started nothing"
    assert "adopted the processes of an earlier launcher: " in second.stderr
    assert {int(word) for word in second.stderr.partition("launcher: ")[2].split("\n")[0].split(", ")} == pids
    assert first.answering() == router
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    stops = [event for event in first.events if event.endswith("stopped")]
    assert stops[0] == "router stopped"
    assert sorted(stops[1:]) == ["keeper stopped", "shard-0 stopped", "shard-1 stopped"]
    first.assert_nothing_left()


def test_the_file_that_names_them_is_private_and_follows_every_change(launch: Launch) -> None:
    launched = launch(*TWO).until_ready()
    file = Path(f"{launched.uds_path}.deployment.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(f"{launched.uds_path}.logs").stat().st_mode) == 0o700
    launched.send(signal.SIGUSR2)
    launched.until_said("the router was replaced in")
    content = json.loads(file.read_text())
    (deployment,) = content["deployments"]
    assert content["launcher"]["pid"] == launched.process.pid
    assert content["keeper"]["pid"] == launched.entry("keeper start")["pid"]
    assert deployment["router"]["pid"] == launched.answering()
    assert [shard["pid"] for shard in deployment["replicas"][0]] == [
        launched.entry(f"shard-{rank} start")["pid"] for rank in (0, 1)
    ]
    assert (deployment["is_ready"], deployment["replacement"]) == (True, [])
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


@pytest.mark.parametrize("name", ["router", "keeper", "shard-1"])
def test_what_has_died_meanwhile_is_started_again(launch: Launch, name: str) -> None:
    first = killed(launch, "--num-replicas", "2")
    os.kill(first.entry(f"{name} start")["pid"], signal.SIGKILL)
    second = following(launch, first, "--num-replicas", "2").until_ready()
    second.until(f"{name} start")
    if name == "shard-1":
        second.until_said("replica 0 answers again")
        assert sorted(set(second.events)) == sorted(
            f"shard-{rank} {event}" for rank in (0, 1) for event in ("start", "ready")
        )
    assert is_alive(first.answering())
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    first.assert_nothing_left()
    second.assert_nothing_left()


def test_an_adopted_router_is_replaced_and_restarted_and_its_lines_are_forwarded(launch: Launch) -> None:
    first = killed(launch)
    second = following(launch, first, fake={"router": {"says": ["a word from the router"]}}).until_ready()
    second.send(signal.SIGUSR2)
    first.until("router yields")
    second.until_said("router | a word from the router")
    router = first.answering()
    assert router == second.entry("router start")["pid"]
    os.kill(router, signal.SIGKILL)
    assert first.answering() != router
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    first.assert_nothing_left()


def test_it_is_adopted_again_and_again(launch: Launch) -> None:
    launched = first = killed(launch)
    router = first.answering()
    for _ in range(2):
        launched = following(launch, first).until_ready()
        launched.process.kill()
        launched.process.wait()
    assert first.answering() == router
    launched = following(launch, first).until_ready()
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    first.assert_nothing_left()


def test_a_launcher_with_other_settings_ends_it_and_starts_anew(launch: Launch) -> None:
    first = killed(launch)
    second = following(launch, first, "--max-best-of", "3").until_ready()
    (line,) = [line for line in second.stderr.splitlines() if "an earlier launcher has left processes" in line]
    assert "which are ended, since it has other settings" in line
    assert not any(map(is_alive, first.pids()))
    assert first.answering() == second.entry("router start")["pid"]
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    second.assert_nothing_left()


def test_what_was_not_ready_is_ended(launch: Launch) -> None:
    first = launch(*TWO, fake={"shard-0": {"delay": 60}})
    first.until("router ready")
    first.process.kill()
    first.process.wait()
    second = following(launch, first).until_ready()
    assert "which are ended, since it was not ready" in second.stderr
    assert not any(map(is_alive, first.pids()))
    second.send(signal.SIGTERM)
    assert second.wait() == 0


def test_a_second_launcher_beside_a_living_one_is_refused(launch: Launch) -> None:
    first = launch(*TWO).until_ready()
    second = following(launch, first)
    assert second.wait() == 1
    assert "held by another instance" in second.stderr
    assert is_alive(first.answering())
    first.send(signal.SIGTERM)
    assert first.wait() == 0
    first.assert_nothing_left()


def test_after_an_upgrade_the_next_launcher_adopts_what_is_current(launch: Launch) -> None:
    first = launch(*TWO, fake={"router": {"drains_until": 1}}).until_ready()
    first.send(signal.SIGHUP)
    first.until("router sigusr1")
    first.until("router ready", 2)
    old, current = (entry["pid"] for entry in first.of("router", "start"))
    first.process.kill()
    first.process.wait()
    second = following(launch, first).until_ready()
    assert first.answering() == current
    assert is_alive(old), "it has requests to finish"
    os.kill(old, signal.SIGTERM)
    first.until("shard-0 stopped")
    assert [entry["pid"] for entry in first.of("shard-0", "stopped")] == [first.of("shard-0", "start")[0]["pid"]]
    assert is_alive(first.answering())
    second.send(signal.SIGHUP)
    first.until("router sigusr1", 2)
    os.kill(current, signal.SIGTERM)
    second.until_said("the deployment before the upgrade has ended")
    argv = second.entry("router start")["argv"]
    assert argv[argv.index("--generation") + 1] == "2", "the number goes on"
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    first.assert_nothing_left()


def test_at_the_default_place_a_launcher_adopts_what_has_its_port_and_leaves_the_rest_alone(launch: Launch) -> None:
    first = killed(launch, "--default-uds-path")
    router = first.answering()
    other = launch(*TWO, "--default-uds-path").until_ready()
    assert first.answering() == router
    second = launch("--port", str(first.port), *TWO, "--default-uds-path").until_ready()
    assert second.events == []
    assert first.answering() == router
    for launched in (second, other):
        launched.send(signal.SIGTERM)
        assert launched.wait() == 0
    first.assert_nothing_left()


def test_nothing_is_adopted_without_a_process(launch: Launch) -> None:
    first = killed(launch)
    for pid in first.pids():
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    second = following(launch, first).until_ready()
    assert "earlier launcher" not in second.stderr
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    second.assert_nothing_left()


def test_the_fingerprint_is_that_of_settings_alone(tmp_path: Path) -> None:
    def settings(place: str, **given: Any) -> Any:
        return resolve(LauncherSettings(device="cpu", **given), 1, str(tmp_path / place))

    assert fingerprint(settings("a")) == fingerprint(settings("b", port=0))
    assert fingerprint(settings("a")) != fingerprint(settings("a", api_key="sesame"))
    assert fingerprint(settings("a")) != fingerprint(settings("a", max_best_of=7))
    text = "\n".join(repr(value) for value in vars(settings("a", lora_adapters=None)).values())
    assert " at 0x" not in text, "an address differs from process to process"
