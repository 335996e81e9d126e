"""The life of a deployment, seen from outside: order of start and stop, deaths, signals, what is left."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
ONE = ("--num-shard", "1", "--device", "cpu")
TWO = ("--num-shard", "2", "--device", "cpu")


def test_starts_shards_and_router_together_and_says_how_to_try_when_all_answer(launch: Launch) -> None:
    launched = launch(*TWO, "--model-id", "tiny", fake={"shard-0": {"delay": 0.5}}).until_ready()
    events = launched.events
    assert events.index("download fetched") < events.index("router start")
    assert max(events.index("shard-0 start"), events.index("shard-1 start")) < events.index("shard-0 ready")
    assert events.index("router start") < events.index("shard-0 ready"), "the router loads while the shards do"
    assert f"ready: http://localhost:{launched.port} serves tiny" in launched.stdout
    assert f"curl http://localhost:{launched.port}/v1/chat/completions" in launched.stdout
    assert "What is the capital of France?" in launched.stdout
    assert "some chatter" not in launched.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_router_first_and_leaves_nothing(launch: Launch, number: signal.Signals) -> None:
    launched = launch(*TWO, fake={"router": {"drains": 0.3}}).until_ready()
    launched.send(number)
    assert launched.wait() == 0
    stops = [e for e in launched.events if e.endswith(("sigterm", "stopped"))]
    assert stops[:2] == ["router sigterm", "router stopped"]
    assert stops.pop() == "keeper stopped"
    assert sorted(stops[2:]) == ["shard-0 sigterm", "shard-0 stopped", "shard-1 sigterm", "shard-1 stopped"]
    launched.assert_nothing_left()
    assert "error:" not in launched.stderr


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(launch: Launch) -> None:
    fake = {"router": {"stubborn": True, "child": True}, "launcher": {"supervisor.deployment.STOP_AGAIN_SECONDS": 0.2}}
    launched = launch("-g", "1", fake=fake).until_ready()
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert "router did not stop within 1 s and was killed" in launched.stderr
    launched.assert_nothing_left()


def test_a_second_interrupt_kills_at_once(launch: Launch) -> None:
    launched = launch(*TWO, fake={"router": {"drains": 60}}).until_ready()
    launched.send(signal.SIGINT)
    launched.until("router sigterm")
    began = time.monotonic()
    launched.send(signal.SIGINT)
    assert launched.wait() == 0
    assert time.monotonic() - began < 10
    launched.assert_nothing_left()


@pytest.mark.parametrize("stage", ["download", "shard-0"])
def test_a_signal_before_ready_stops_what_has_started(launch: Launch, stage: str) -> None:
    launched = launch(fake={stage: {"delay": 60}})
    launched.until(f"{stage} start")
    launched.send(signal.SIGTERM)
    launched.until(f"{stage} sigterm")
    launched.send(signal.SIGINT)
    assert launched.wait() == 0
    assert "ready:" not in launched.stdout
    launched.assert_nothing_left()


def test_a_signal_before_the_launcher_has_seen_the_router_ready_lets_streams_finish(launch: Launch) -> None:
    """The router accepts requests before the launcher's next health check tells that it does."""
    launched = launch(*TWO, fake={"router": {"unhealthy": True, "drains": 0.5}})
    for name in ("shard-0", "shard-1", "router"):
        launched.until(f"{name} ready")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert launched.events.count("router sigterm") == 1, "a second one ends streams with an error"
    assert "router stopped" in launched.events
    launched.assert_nothing_left()


def test_a_router_that_drains_during_the_start_does_not_wait_for_a_lost_shard(launch: Launch) -> None:
    fake = {"router": {"unhealthy": True, "drains_until": 2}, "shard-0": {"dies_after": 2.0, "code": 7}}
    launched = launch(*TWO, "-g", "90", fake=fake)
    for name in ("shard-0", "shard-1", "router"):
        launched.until(f"{name} ready")
    launched.send(signal.SIGTERM)
    began = time.monotonic()
    assert launched.wait() == 0
    assert time.monotonic() - began < 20
    assert launched.events.count("router sigterm") >= 2
    launched.assert_nothing_left()


def test_a_shard_that_dies_ends_router_then_peers_with_one_final_line(launch: Launch) -> None:
    fake = {"shard-1": {"dies_after": 1.5, "last_words": ["error: out of luck"]}, "shard-0": {"child": True}}
    launched = launch(*TWO, "--max-restarts", "0", fake=fake)
    assert launched.wait() == 1
    last_line = launched.stderr.splitlines()[-1]
    assert last_line == ("error: shard rank 1 exited with code -9 (killed by SIGKILL): last error: out of luck")
    assert launched.stderr.count("\nerror:") == 1
    assert launched.events.index("router stopped") < launched.events.index("shard-0 sigterm")
    launched.assert_nothing_left()


def test_without_a_keeper_a_router_that_dies_ends_the_shards(launch: Launch) -> None:
    fake = {"router": {"dies_after": 0.5, "code": 3, "last_words": ["something", "broke down"]}}
    launched = launch("--keeper", "false", fake=fake)
    assert launched.wait() == 1
    assert launched.stderr.splitlines()[-1] == "error: router exited with code 3: last line: broke down"
    launched.assert_nothing_left()


def test_a_router_that_exits_well_is_a_failure_too(launch: Launch) -> None:
    launched = launch("--keeper", "false", fake={"router": {"dies_after": 0.2, "code": 0}})
    assert launched.wait() == 1
    assert launched.stderr.splitlines()[-1] == "error: router exited with code 0"


def test_shards_that_fail_alike_are_reported_once_by_the_lowest_rank_that_gave_a_reason(
    launch: Launch,
) -> None:
    failing = {"fails": 1, "says": ["error: not enough memory"]}
    fake = {"shard-0": {"fails": 1}, "shard-1": failing | {"delay": 0.2}, "shard-2": failing}
    fake["launcher"] = {"supervisor.replica.SETTLE_SECONDS": 1.0}
    launched = launch("--num-shard", "3", "--device", "cpu", fake=fake)
    assert launched.wait() == 1
    last_line = launched.stderr.splitlines()[-1]
    assert last_line == "error: shard rank 1 exited with code 1: last error: not enough memory"
    assert launched.stderr.count("\nerror:") == 1
    assert "ready:" not in launched.stdout
    launched.assert_nothing_left()


def test_a_failed_download_speaks_for_itself(launch: Launch) -> None:
    launched = launch(fake={"download": {"says": ["50% #####", "error: no such model"], "fails": 1}})
    assert launched.wait() == 1
    assert launched.stderr.splitlines() == ["50% #####", "error: no such model"]
    assert {"shard-0 told", "shard-0 ready", "router start"}.isdisjoint(launched.events)
    launched.assert_nothing_left()


def test_shards_begin_before_the_model_is_present_and_are_not_told_where_a_folder_is_that_never_comes(
    launch: Launch,
) -> None:
    launched = launch(*TWO, fake={"download": {"delay": 60}})
    launched.until("shard-0 start")
    launched.until("shard-1 start")
    launched.until("download start")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert {"shard-0 told", "shard-1 told", "router start"}.isdisjoint(launched.events)
    launched.assert_nothing_left()


def test_a_shard_that_fails_while_the_model_is_fetched_ends_the_start(launch: Launch) -> None:
    fake = {"download": {"delay": 60}, "shard-0": {"fails": 1, "says": ["error: no such library"]}}
    launched = launch(*ONE, fake=fake)
    assert launched.wait() == 1
    last = launched.stderr.splitlines()[-1]
    assert last == "error: shard rank 0 exited with code 1: last error: no such library"
    launched.assert_nothing_left()


def test_a_killed_download_is_explained(launch: Launch) -> None:
    launched = launch(fake={"download": {"delay": 60}})
    launched.until("download start")
    os.kill(launched.entry("download start")["pid"], signal.SIGKILL)
    assert launched.wait() == 1
    assert launched.stderr.splitlines() == ["error: download exited with code -9 (killed by SIGKILL)"]


@pytest.mark.parametrize("flags", [("--adopt-timeout", "0"), ("--adopt-timeout", "0.5"), ("--keeper", "false")])
def test_a_killed_launcher_leaves_no_process(launch: Launch, flags: tuple[str, ...]) -> None:
    launched = launch(*TWO, *flags).until_ready()
    launched.send(signal.SIGKILL)
    assert launched.wait() == -9
    launched.uds_path = "/nonexistent/socket"  # its files are removed by the next launcher, see below
    launched.assert_nothing_left()


def test_stale_sockets_and_locks_of_a_crash_are_no_obstacle(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "stale"
    for name in ("stale-0", "stale.lock"):
        (tmp_path / name).touch()
    launched = launch("--shard-uds-path", str(path)).until_ready()
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert not list(tmp_path.iterdir())


def test_two_launchers_side_by_side_need_only_different_ports(launch: Launch) -> None:
    first = launch("--default-uds-path").until_ready()
    second = launch("--default-uds-path").until_ready()
    paths = [_flag(one.entry("shard-0 start")["argv"], "--uds-path") for one in (first, second)]
    assert len(set(paths)) == 2
    assert all(path.startswith("/tmp/text-generation-server") for path in paths)
    for launched in (first, second):
        launched.send(signal.SIGTERM)
        assert launched.wait() == 0
    assert not any(Path(f"{path}{end}").exists() for path in paths for end in ("-0", ".lock"))


def test_a_port_in_use_is_found_before_anything_is_loaded(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        launched = launch("--port", str(port))
        assert launched.wait() == 1
    assert launched.stderr.startswith(f"error: --port {port} is already in use")
    assert launched.stderr.count("\n") == 1
    assert launched.events == []


def test_children_get_every_setting_but_no_secret_as_a_flag(launch: Launch) -> None:
    environ = {"LOG_LEVEL": "debug", "API_KEY": "sesame", "OMP_NUM_THREADS": "77"}
    launched = launch(*TWO, "--num-threads", "3", environ=environ).until_ready()
    shard, router = launched.entry("shard-1 start"), launched.entry("router start")
    assert shard["argv"][:2] == ["serve", "smollm2-135m-instruct"]
    assert launched.entry("shard-1 told")["folder"] == "/tmp/the-model"
    assert _flag(shard["argv"], "--rank") == shard["environ"]["RANK"] == "1"
    assert _flag(shard["argv"], "--master-port") == shard["environ"]["MASTER_PORT"]
    assert _flag(shard["argv"], "--logger-level") == "debug"
    assert shard["environ"]["OMP_NUM_THREADS"] == shard["environ"]["MKL_NUM_THREADS"] == "3"
    assert not {"LOG_LEVEL", "API_KEY", "FUNITEL_API_KEY"} & set(shard["environ"])
    assert _flag(router["argv"], "--tokenizer-name") == "/tmp/the-model"
    assert _flag(router["argv"], "--master-shard-uds-path") == f"{launched.uds_path}-0"
    assert router["environ"]["FUNITEL_API_KEY"] == "sesame"
    assert "sesame" not in " ".join(router["argv"] + shard["argv"]) + launched.stderr + launched.stdout
    assert '-H "Authorization: Bearer $API_KEY"' in launched.stdout


# Several replicas


REPLICAS = ("--num-replicas", "2", "--num-shard", "2", "--device", "cpu")
ALL_SHARDS = ("shard-0", "shard-1", "replica-1-shard-0", "replica-1-shard-1")


def test_replicas_have_sockets_ports_and_threads_of_their_own(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launch(*REPLICAS).until_ready()
    started = [launched.entry(f"{name} start") for name in ALL_SHARDS]
    ranks = [(_flag(each["argv"], "--rank"), _flag(each["argv"], "--world-size")) for each in started]
    assert ranks == [("0", "2"), ("1", "2")] * 2
    paths = [_flag(each["argv"], "--uds-path") for each in started]
    assert paths == [launched.uds_path] * 2 + [f"{launched.uds_path}-replica-1"] * 2
    ports = [each["environ"]["MASTER_PORT"] for each in started]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    share = max(1, len(os.sched_getaffinity(0)) // 4)
    assert {each["environ"]["OMP_NUM_THREADS"] for each in started} == {str(share)}
    assert {_flag(each["argv"], "--replicas-on-host") for each in started} == {"2"}
    router = launched.entry("router start")["argv"]
    assert _flag(router, "--master-shard-uds-path") == f"{launched.uds_path}-0"
    assert _flag(router, "--replica-address") == f"unix://{launched.uds_path}-replica-1-0"
    assert {f"{name} ready" for name in ALL_SHARDS} <= set(launched.events)
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    stops = [e for e in launched.events if e.endswith("sigterm")]
    assert stops[0] == "router sigterm"
    assert sorted(stops[1:]) == sorted(f"{name} sigterm" for name in ALL_SHARDS)
    launched.assert_nothing_left()


def test_a_lost_replica_leaves_the_others_serving(launch: Launch) -> None:
    launched = launch(*REPLICAS, "--max-restarts", "0", fake={"shard-1": {"child": True}}).until_ready()
    os.kill(launched.entry("replica-1-shard-1 start")["pid"], signal.SIGKILL)
    launched.until("replica-1-shard-0 stopped")  # its peer goes with it
    launched.until_said("1 of 2 replicas go on")
    (line,) = [line for line in launched.stderr.splitlines() if "replica is lost" in line]
    assert "replica 1 shard rank 1 exited with code -9 (killed by SIGKILL)" in line
    assert launched.process.poll() is None
    assert not {"router sigterm", "shard-0 sigterm", "shard-1 sigterm"} & set(launched.events)
    os.kill(launched.entry("shard-0 start")["pid"], signal.SIGKILL)
    assert launched.wait() == 1
    last_line = launched.stderr.splitlines()[-1]
    assert last_line == "error: replica 0 shard rank 0 exited with code -9 (killed by SIGKILL)"
    assert launched.stderr.count("\nerror:") == 1
    assert launched.events.index("router stopped") < launched.events.index("shard-1 sigterm")
    launched.assert_nothing_left()


def test_a_replica_told_to_end_is_let_go(launch: Launch) -> None:
    launched = launch("--num-replicas", "3", *ONE, "--max-restarts", "0").until_ready()
    os.kill(launched.entry("shard-0 start")["pid"], signal.SIGTERM)
    launched.until_said("2 of 3 replicas go on")
    assert "a replica is lost: replica 0 shard rank 0 exited with code 0" in launched.stderr
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert "error:" not in launched.stderr
    launched.assert_nothing_left()


def test_a_stubborn_rest_of_a_lost_replica_is_gone_in_the_end(launch: Launch) -> None:
    launched = launch(
        *REPLICAS, "--max-restarts", "0", "-g", "1", fake={"shard-1": {"stubborn": True, "child": True}}
    ).until_ready()
    os.kill(launched.entry("shard-0 start")["pid"], signal.SIGKILL)
    launched.until_said("1 of 2 replicas go on")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_replica_that_cannot_start_ends_all(launch: Launch) -> None:
    fake = {"replica-1-shard-0": {"fails": 1, "says": ["error: not enough memory"]}}
    launched = launch(*REPLICAS, fake=fake)
    assert launched.wait() == 1
    last_line = launched.stderr.splitlines()[-1]
    assert last_line == "error: replica 1 shard rank 0 exited with code 1: last error: not enough memory"
    assert "ready:" not in launched.stdout
    launched.assert_nothing_left()


# Restarts


def test_a_replica_is_started_again_whole(launch: Launch) -> None:
    launched = launch(*TWO, fake={"shard-0": {"child": True}}).until_ready()
    first = [launched.entry(f"shard-{rank} start") for rank in (0, 1)]
    os.kill(first[1]["pid"], signal.SIGKILL)
    launched.until_said("the replica answers again")
    starts = [entry for entry in launched.entries if entry["event"] == "start" and "shard" in entry["process"]]
    assert len(starts) == 4
    assert [entry["argv"][1] for entry in starts] == ["smollm2-135m-instruct"] * 2 + ["/tmp/the-model"] * 2
    stopped = next(e for e in launched.entries if (e["process"], e["event"]) == ("shard-0", "stopped"))
    assert stopped["time"] <= min(entry["time"] for entry in starts[2:]), "the rest has ended before"
    assert [_flag(entry["argv"], "--uds-path") for entry in starts] == [launched.uds_path] * 4
    assert starts[2]["environ"]["MASTER_PORT"] == starts[3]["environ"]["MASTER_PORT"]
    (line,) = [line for line in launched.stderr.splitlines() if "a replica is lost" in line]
    assert "shard rank 1 exited with code -9 (killed by SIGKILL); restart 1 of 5 in 0 s" in line
    assert "router sigterm" not in launched.events
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    assert "error:" not in launched.stderr
    launched.assert_nothing_left()


def test_a_crash_loop_ends_with_how_often_it_was_tried(launch: Launch) -> None:
    fake = {"shard-0": {"dies_after": 1.5, "code": 7, "last_words": ["error: out of luck"]}}
    launched = launch(*ONE, "--max-restarts", "2", fake=fake)
    assert launched.wait() == 1
    assert launched.events.count("shard-0 start") == 3
    expected = "error: shard rank 0 exited with code 7: last error: out of luck; restarted 2 times in a row"
    assert launched.stderr.splitlines()[-1] == expected
    assert launched.stderr.count("\nerror:") == 1
    assert "router stopped" in launched.events
    launched.assert_nothing_left()


def test_without_restarts_the_router_is_told_not_to_wait(launch: Launch) -> None:
    waits = launch(*ONE).until_ready().entry("router start")["argv"]
    never = launch(*ONE, "--max-restarts", "0").until_ready().entry("router start")["argv"]
    assert int(_flag(waits, "--shard-return-timeout")) > 24 * 3600
    assert _flag(never, "--shard-return-timeout") == "0"


def test_a_replica_that_is_given_up_leaves_the_others_serving(launch: Launch) -> None:
    fake = {"replica-1-shard-1": {"dies_after": 1.0, "code": 7}}
    launched = launch(*REPLICAS, "--max-restarts", "1", fake=fake).until_ready()
    launched.until_said("1 of 2 replicas go on")
    assert launched.events.count("replica-1-shard-1 start") == 2
    assert "exited with code 7; restarted 1 times in a row; 1 of 2 replicas go on" in launched.stderr
    assert launched.process.poll() is None
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_replicas_are_restarted_side_by_side(launch: Launch) -> None:
    launched = launch("--num-replicas", "2", *ONE).until_ready()
    for name in ("shard-0", "replica-1-shard-0"):
        os.kill(launched.entry(f"{name} start")["pid"], signal.SIGKILL)
    launched.until_said("replica 0 answers again")
    launched.until_said("replica 1 answers again")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_signal_during_a_restart_lets_it_finish_and_leaves_nothing(launch: Launch) -> None:
    """The router's streams wait for the replica: it is started again while they are drained."""
    fake = {"shard-0": {"delay": 0.5}, "router": {"drains_past": ["shard-0", "ready", 2]}}
    launched = launch(*TWO, "-g", "60", fake=fake).until_ready()
    os.kill(launched.entry("shard-1 start")["pid"], signal.SIGKILL)
    launched.until_said("restart 1 of 5")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    events = launched.events
    assert events.count("shard-0 start") == 2
    assert events.index("router stopped") < len(events) - 1 - events[::-1].index("shard-0 stopped")
    launched.assert_nothing_left()


def test_a_signal_during_a_restart_that_hangs_leaves_nothing(launch: Launch) -> None:
    fake = {"shard-0": {"delays": [0, 60]}}
    launched = launch(*TWO, "-g", "1", fake=fake).until_ready()
    os.kill(launched.entry("shard-1 start")["pid"], signal.SIGKILL)
    launched.until("shard-0 start", 2)
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    launched.assert_nothing_left()


def test_a_router_that_waits_for_what_does_not_come_back_is_hurried(launch: Launch) -> None:
    fake = {"shard-0": {"dies_after": 1.0, "code": 7}, "router": {"drains_until": 2}}
    began = time.monotonic()
    launched = launch(*ONE, "--max-restarts", "0", "-g", "90", fake=fake)
    assert launched.wait() == 1
    assert time.monotonic() - began < 20
    assert "was killed" not in launched.stderr
    assert launched.events.count("router sigterm") >= 2
    launched.assert_nothing_left()


def test_json_output_is_json_on_every_line(launch: Launch) -> None:
    fake = {"shard-0": {"says": ['{"level": "INFO", "message": "mine"}', "plain words"]}}
    launched = launch("--json-output", fake=fake)
    launched.until("shard-0 ready")
    launched.until("router ready")
    launched.send(signal.SIGTERM)
    assert launched.wait() == 0
    events = [json.loads(line) for line in launched.stderr.splitlines()]
    assert {"level": "INFO", "message": "mine"} in events
    wrapped = next(event for event in events if event.get("message") == "plain words")
    assert wrapped["process"] == "shard-0"
    assert launched.stdout == ""


def _flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]
