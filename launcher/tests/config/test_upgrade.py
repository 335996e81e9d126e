"""SIGHUP: others are started beside what serves and take its place, or it goes on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
ONE = ("--num-shard", "1", "--device", "cpu")


def flag(entry: dict[str, Any], name: str) -> str:
    argv: list[str] = entry["argv"]
    return argv[argv.index(name) + 1]


def of(launched: Any, process: str, event: str) -> list[dict[str, Any]]:
    return [entry for entry in launched.entries if (entry["process"], entry["event"]) == (process, event)]


def test_others_take_the_place_of_what_serves_before_it_is_stopped(launch: Launch) -> None:
    launched = launch(*ONE, fake={"router": {"drains": 0.3}}).until_ready()
    launched.send(signal.SIGHUP)
    launched.until_said("the deployment before the upgrade has ended")
    events = launched.events
    assert events.count("download start") == 2, "the model is resolved anew"
    first, second = of(launched, "router", "start")
    assert flag(first, "--keeper") == flag(second, "--keeper"), "one keeper, which has the connections of both"
    assert (flag(first, "--generation"), flag(second, "--generation")) == ("0", "1")
    assert "--accepts-early" in first["argv"]
    assert "--accepts-early" not in second["argv"]
    assert {"--ready-fd"} <= {*first["argv"]} & {*second["argv"]}
    assert flag(second, "--master-shard-uds-path") == f"{launched.uds_path}-upgrade-1-0"
    assert events.index("router sigusr1") < events.index("router stopped") < events.index("shard-0 sigterm")
    assert [entry["pid"] for entry in of(launched, "router", "stopped")] == [first["pid"]]
    assert [entry["pid"] for entry in of(launched, "shard-0", "stopped")] == [
        of(launched, "shard-0", "start")[0]["pid"]
    ]
    assert launched.process.poll() is None
    launched.send(signal.SIGHUP)
    launched.until("router sigusr1", 2)
    launched.until("shard-0 stopped", 2)
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert "error:" not in launched.stderr
    launched.assert_nothing_left()


def test_children_get_what_the_file_says_now_and_a_wrong_file_changes_nothing(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("MODEL_ID=old\nMAX_BEST_OF=3\n")
    launched = launch(*ONE, "--config", str(file), environ={"MAX_STOP_SEQUENCES": "9"}).until_ready()
    launched.until("router ready")
    before = launched.events
    for lines, said in (
        ("MODEL_ID=new\nXYZZY=1", f"{file}, line 2: 'XYZZY' is not the variable of a setting"),
        ("MAX_BEST_OF=many", f"{file}, line 1: MAX_BEST_OF: Invalid value for"),
        ("MODEL_ID=new\nPROMETHEUS_PORT=1", f"{file}, line 2: PROMETHEUS_PORT: --prometheus-port cannot change"),
        ("SHARDED=true", f"{file}, line 1: SHARDED: --sharded true needs --num-shard > 1, given 1"),
    ):
        file.write_text(lines)
        launched.send(signal.SIGHUP)
        launched.until_said(f"the upgrade has failed, the current deployment goes on: {said}")
    assert launched.events == before, "nothing was started for it, and nothing stopped"
    file.write_text("MODEL_ID=new\nMAX_BEST_OF=5\nSERVED_MODEL_NAME=it\nAPI_KEY=sesame\nNUM_REPLICAS=2\n")
    launched.send(signal.SIGHUP)
    launched.until_said("the deployment before the upgrade has ended")
    first, second = of(launched, "router", "start")
    assert (flag(first, "--max-best-of"), flag(second, "--max-best-of")) == ("3", "5")
    assert flag(second, "--served-model-name") == "it"
    assert second["environ"]["FUNITEL_API_KEY"] == "sesame"
    assert not any("sesame" in word for word in second["argv"])
    assert "MAX_STOP_SEQUENCES" not in second["environ"], "a child gets settings as flags"
    assert [entry["argv"][1] for entry in of(launched, "download", "start")] == ["old", "new"]
    assert len(of(launched, "replica-1-shard-0", "start")) == 1
    assert "sesame" not in launched.stderr
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_what_does_not_fit_the_model_names_the_line_of_the_file(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    file.write_text("NUM_SHARD=1")
    launched = launch("--device", "cpu", "--config", str(file), fake={"download": {"folder": str(tmp_path)}})
    launched.until_ready()
    file.write_text("# too many\nNUM_SHARD=3\n")
    launched.send(signal.SIGHUP)
    launched.until_said(
        f"the current deployment goes on: {file}, line 2: NUM_SHARD: --num-shard 3 is more than the 2 query heads"
    )
    assert len(of(launched, "shard-0", "start")) == 1
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0


def test_a_wrong_file_at_the_start_is_one_line_and_exit_code_1(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("# ours\nMAX_BEST_OF=many\n")
    launched = launch(*ONE, "--config", str(file))
    assert launched.wait() == 1
    assert launched.stderr.startswith(f"error: {file}, line 2: MAX_BEST_OF: ")
    assert launched.stderr.count("\n") == 1
    assert launched.events == []


@pytest.mark.parametrize("process", ["download", "shard-0", "router"])
def test_where_they_cannot_start_what_serves_goes_on(launch: Launch, process: str) -> None:
    fake = {process: {"fails_at_start": 2, "says": ["error: not enough memory"]}}
    launched = launch(*ONE, fake=fake).until_ready()
    launched.send(signal.SIGHUP)
    launched.until_said("the upgrade has failed, the current deployment goes on")
    assert launched.process.poll() is None
    pids = {entry["pid"] for entry in launched.entries if entry["event"] in ("sigusr1", "stopped")}
    assert not pids & {of(launched, name, "start")[0]["pid"] for name in ("router", "shard-0")}
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_signal_during_an_upgrade_leaves_nothing(launch: Launch) -> None:
    launched = launch(*ONE, "-g", "2", fake={"shard-0": {"delays": [0, 60]}}).until_ready()
    launched.send(signal.SIGHUP)
    launched.until("shard-0 start", 2)
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_replica_dies_and_is_restarted_after_an_upgrade(launch: Launch) -> None:
    launched = launch(*ONE).until_ready()
    launched.send(signal.SIGHUP)
    launched.until_said("the deployment before the upgrade has ended")
    os.kill(of(launched, "shard-0", "start")[1]["pid"], signal.SIGKILL)
    launched.until_said("the replica answers again")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_before_it_is_ready_a_hangup_ends_it(launch: Launch) -> None:
    launched = launch(*ONE, "-g", "1", fake={"shard-0": {"delay": 60}})
    launched.until("shard-0 start")
    launched.send(signal.SIGHUP)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_signal_while_what_served_before_still_has_requests_ends_both(launch: Launch) -> None:
    launched = launch(*ONE, fake={"router": {"drains": 1.0}}).until_ready()
    launched.send(signal.SIGHUP)
    launched.until("router sigusr1")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0, launched.stderr
    assert "Traceback" not in launched.stderr
    assert launched.events.count("router stopped") == 2
    launched.assert_nothing_left()
