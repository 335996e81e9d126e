"""X1, X2: models are launched, listed, changed and ended from the command line."""

import io
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from funitel.launcher.control_plane.records import LaunchRequest, ModelState

Server = Any
Run = Callable[..., Any]


def eventually(claim: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not claim():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.01)


def test_x1_launch_list_and_terminate(server: Server, run: Run) -> None:
    assert run("list").out == "no model: funitel launch MODEL launches one\n"
    server.hold()
    threading.Timer(1.5, server.go_on).start()
    launched = run("launch", "smol", "--ttl", "300", "--pinned", "--replicas", "2")
    assert (launched.code, launched.out) == (0, "smol is ready\n")
    assert "downloading 47.7 MiB of 190.7 MiB" in launched.err.splitlines()
    assert launched.err.splitlines()[-1] == "ready"
    table = run("list").out.splitlines()
    assert table[0].split() == ["NAME", "STATE", "MEMORY", "REPLICAS", "LAST", "USED", "TTL", "NOTES"]
    assert table[1].split() == ["smol", "ready", "610.4", "MiB", "2/2", "-", "5m", "default", "pinned"]
    assert [each["name"] for each in json.loads(run("list", "--json").out)] == ["smol"]
    ended = run("terminate", "smol")
    assert (ended.code, ended.out) == (0, "smol is terminated\n")
    assert json.loads(run("list", "--json").out) == []
    assert run("terminate", "smol").error == "there is no model smol"


def test_every_flag_of_launch_reaches_the_server(server: Server, run: Run) -> None:
    given = ["owner/repo", "--name", "m", "--replicas", "2", "--num-shard", "4", "--quantize", "int8"]
    given += ["--dtype", "float16", "--engine", "native", "--executor", "worker", "--worker", "gpu-1"]
    given += ["--partition", "pp", "--layers", "3,5", "--ttl", "1.5", "--pinned", "--request-limit", "7"]
    given += ["--priority", "-2", "--retries", "3", "--set", "max-batch-size=8", "--set", "--lora-adapters=a=/a"]
    ran = run("launch", *given, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert (json.loads(ran.out)["name"], json.loads(ran.out)["state"]) == ("m", "ready")
    assert server.fleet.requests["m"] == LaunchRequest(
        model="owner/repo",
        name="m",
        replicas=2,
        num_shard=4,
        quantize="int8",
        dtype="float16",
        engine="native",
        executor="worker",
        worker="gpu-1",
        partition="pp",
        layers="3,5",
        ttl=1.5,
        pinned=True,
        request_limit=7,
        priority=-2,
        retries=3,
        settings={"max_batch_size": "8", "lora_adapters": "a=/a"},
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "max_batch_size"], "--set must be NAME=VALUE, given 'max_batch_size'"),
        (["--set", "=8"], "--set must be NAME=VALUE, given '=8'"),
        (["--set", "numa=1", "--set", "numa=0"], "--set gives numa twice: give it once"),
        (["--set", "port=80"], "`settings.port` is a setting of the server, which all its models share"),
        (["--replicas", "0"], "--replicas must be >= 1, given 0"),
        (["--ttl", "0"], "--ttl must be > 0, given 0.0"),
        (["--tls-cert", "x"], "--tls-cert is for a --url that begins with https://"),
        (["--url", "unix://relative"], "--url must be like http://host:port or unix:///path, given 'unix://relative'"),
    ],
)
def test_a_mistake_is_one_line(server: Server, run: Run, words: list[str], message: str) -> None:
    assert run("launch", "smol", *words).error == message
    assert server.fleet.entries == {}


def test_x2_a_launch_need_not_be_awaited(server: Server, run: Run) -> None:
    server.hold()
    ran = run("launch", "smol", "--no-wait")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "smol is being launched: funitel list shows how far it is\n"
    eventually(lambda: server.fleet.entries["smol"].progress, "the download")
    assert "downloading 25 %" in run("list").out
    assert run("launch", "smol").error == "smol exists already"
    cancelled = run("cancel", "smol")
    assert (cancelled.code, cancelled.out) == (0, "the launch of smol is cancelled\n")
    assert run("cancel", "smol").error == "there is no model smol"


def test_a_launch_that_fails_ends_with_its_reason(server: Server, run: Run) -> None:
    ran = run("launch", "broken")
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == "error: broken is not ready: the checkpoint is damaged"
    assert "broken" in run("list").out
    assert run("launch", "huge").error == "huge needs 80.0 GiB, 60.0 GiB are free: int8 would fit"


def test_x2_a_launch_that_is_cancelled_by_another_ends(server: Server, run: Run) -> None:
    server.hold()

    def cancel() -> None:
        eventually(lambda: "smol" in server.fleet.entries, "the launch")
        time.sleep(0.3)
        server.do(server.fleet.cancel("smol"))

    thread = threading.Thread(target=cancel)
    thread.start()
    ran = run("launch", "smol")
    thread.join()
    assert (ran.code, ran.err.splitlines()[-1]) == (1, "error: smol is not ready: its launch was cancelled")


def test_x2_a_terminal_shows_a_bar_with_the_stage(server: Server, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr("funitel.launcher.cli.fleet.launch.console_of", lambda stream: console)
    server.hold()
    threading.Timer(1.5, server.go_on).start()
    ran = run("launch", "smol")
    assert (ran.code, ran.out, ran.err) == (0, "smol is ready\n", "")
    assert re.search("━+ +25 % downloading 47.7 MiB of 190.7 MiB", screen.getvalue())


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the first pause."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("funitel.launcher.cli.fleet.launch.time.sleep", interrupt)


@pytest.mark.parametrize("answer", ["y", "n", "", None])
def test_x2_ctrl_c_asks_whether_to_cancel(
    server: Server, run: Run, interrupted: None, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    asked: list[str] = []

    def reply(question: str) -> str:
        asked.append(question)
        if answer is None:
            raise EOFError
        return answer

    server.hold()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", reply)
    ran = run("launch", "smol")
    assert ran.code == 130
    assert asked == ["\nCancel the launch of smol? [y/N] "]
    if answer == "y":
        assert "the launch of smol is cancelled" in ran.err
        assert server.fleet.entries == {}
    else:
        assert "smol is still being launched" in ran.err
        assert "smol" in server.fleet.entries
        server.do(server.fleet.cancel("smol"))


def test_x2_ctrl_c_without_a_terminal_cancels_nothing(
    server: Server, run: Run, interrupted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hold()
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    ran = run("launch", "smol")
    assert ran.code == 130
    assert "funitel cancel smol cancels it" in ran.err
    assert "smol" in server.fleet.entries
    server.do(server.fleet.cancel("smol"))


def test_models_are_unloaded_loaded_put_to_sleep_and_woken(server: Server, run: Run) -> None:
    run("launch", "owner/repo")
    for words, said in (
        ("unload", "owner/repo is unloaded"),
        ("load", "owner/repo is ready"),
        ("sleep", "owner/repo sleeps"),
        ("wake", "owner/repo is ready"),
    ):
        ran = run(words, "owner/repo")
        assert (ran.code, ran.out) == (0, f"{said}\n")
        assert run(words, "none").error == "there is no model none"
    assert [each[0] for each in server.fleet.said] == ["unload", "load", "sleep", "wake"]


def test_x6_replicas_are_listed_added_and_removed(server: Server, run: Run) -> None:
    run("launch", "smol")
    table = run("replicas", "smol").out.splitlines()
    assert table[1].split() == ["0", "ready", "1", "local", "100"]
    added = json.loads(run("replicas", "smol", "--add", "2", "--weight", "0.5", "--json").out)
    assert [(each["id"], each["weight"]) for each in added] == [(1, 0.5), (2, 0.5)]
    assert run("replicas", "smol", "--remove", "1").out == "replica 1 of smol is removed\n"
    assert [each["id"] for each in json.loads(run("replicas", "smol", "--json").out)] == [0, 2]
    assert run("replicas", "smol", "--remove", "9").error == "smol has no replica 9"
    assert run("replicas", "smol", "--add", "1", "--remove", "1").error == "give --add 1 or --remove 1, not both"
    assert run("replicas", "smol", "--weight", "1").error == "--weight 1.0 needs --add"


def test_workers_are_listed(server: Server, run: Run) -> None:
    table = run("workers").out.splitlines()
    assert table[1].split() == ["local", "alive", "-", "2", "0", "2.8", "GiB", "of", "7.5", "GiB"]
    assert table[2].split()[:5] == ["gpu-1", "lost", "10.0.0.2:7000", "64", "1"]
    assert [each["name"] for each in json.loads(run("workers", "--json").out)] == ["local", "gpu-1"]


def test_what_a_server_says_controls_no_terminal(server: Server, run: Run) -> None:
    run("launch", "smol")
    entry = server.fleet.entries["smol"]
    bad = replace(entry, name="a\x1b[31m", state=ModelState.FAILED, error="x\x1b]0;y\x07")
    server.fleet.entries["smol"] = bad
    out = run("list").out
    assert "\x1b" not in out
    assert "\x07" not in out


def test_without_a_server_the_line_says_how_to_start_one(run: Run, tmp_path: Any) -> None:
    error = run("list", "--url", f"unix://{tmp_path}/none").error
    assert error.startswith(f"no server answers at unix://{tmp_path}/none: ")
    assert "funitel serve MODEL" in error
