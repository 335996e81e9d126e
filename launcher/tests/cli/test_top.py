"""`funitel top`: its page for any state and size, once, line by line, and in place on a terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fcntl import ioctl
from typing import Any

import pytest
from rich.console import Console

from funitel.launcher.cli.settings import TopSettings
from funitel.launcher.cli.top import top
from funitel.launcher.cli.top_page import page
from funitel.proto.errors import FunitelError, NotReady, SettingsError, Unauthorized
from funitel_testing.fake_api import FakeApi, serving

Start = Callable[..., FakeApi]
PATIENCE_SECONDS = 20.0
ROW = {"id": 7, "request_id": "0123456789abcdef", "key": "team-a", "age_seconds": 65.0, "prompt_tokens": 31}
RUNNING = ROW | {"gap_seconds": 0.0061, "cached_tokens": 16, "computed_tokens": 47, "tokens": 18, "max_new_tokens": 64}
RUNNING |= {"blocks": 4, "priority": 0}
WAITING = ROW | {"position": 1, "estimated_wait_seconds": 2.5, "tokens": 0, "priority": -1, "was_started": False}
STEP = {"kind": "decode", "ago_seconds": 0.0004, "rows": 1, "prompt_tokens": 0, "tokens": 1}
STEP |= {"seconds": 0.0058, "predicted_seconds": 0.0056}
POOL = {"blocks": 100, "block_size": 16, "used": 50, "free": 50, "cached": 8, "evicted": 0, "preempted": 2}


def state(num_running: int = 1, num_waiting: int = 1, **changes: Any) -> dict[str, Any]:
    replica = {
        "index": 0,
        "ranks": 2,
        "tokens_per_second": 812.25,
        "num_waiting": num_waiting,
        "num_queued_tokens": 31 * num_waiting,
        "num_running": num_running,
        "waiting": [WAITING] * min(num_waiting, 100),
        "running": [RUNNING] * min(num_running, 100),
        "pool": POOL,
        "steps": [STEP] * 3,
    }
    now = {"requests": 12, "generated_tokens": 3456, "running": num_running, "waiting": num_waiting}
    model = {"name": "tiny", "model_id": "tiny", "now": now, "replicas": [{}], "scheduler": [replica | changes]}
    return {"version": "0.1.0", "time": 1.0, "models": [model]}


# The page


def rendered(shown: Any, width: int = 200, **options: Any) -> str:
    """A page as text of a window."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False, **options).print(page(shown, "http://here:3000"))
    return out.getvalue()


def test_everything_is_on_the_page() -> None:
    text = rendered(state())
    assert "http://here:3000 funitel 0.1.0" in text
    assert "tiny: 12 requests, 3,456 tokens, running 1, waiting 1" in text
    assert "replica 0: 2 ranks, 812 tokens/s, running 1, waiting 1 (31 prompt tokens)" in text
    assert "50%: 50 of 100 blocks of 16 tokens used, 8 cached, 2 preempted" in text
    assert f"pool {'━' * 15}" in text
    assert "last decode of 1 row, 1 token, 5.8 ms (predicted 5.6 ms), 0.4 ms ago; last 3: 3 decode, 5.8 ms each" in text
    assert re.search(r"7  0123456789ab  team-a +31 +16 +18/64 +4 +1m05s +6\.1 ms", text)
    assert re.search(r"1  0123456789ab  team-a +31 +0 +-1 +1m05s +2\.5 s", text)


def test_an_idle_server_has_no_tables() -> None:
    lines = rendered(state(0, 0, steps=[])).splitlines()
    assert len(lines) == 7
    assert lines[-1].strip() == "steps: none yet"


def test_what_the_server_has_cut_is_counted() -> None:
    assert "... and 2,300 more" in rendered(state(1, 2400))


def test_without_a_replica_it_says_so() -> None:
    (model,) = state()["models"]
    lost = state() | {"models": [model | {"replicas": [], "scheduler": []}]}
    assert rendered(lost).splitlines()[-1].strip() == "no replica serves"


def test_each_model_is_shown_and_an_embedder_has_no_queue_of_sequences() -> None:
    (model,) = state()["models"]
    text = rendered(state() | {"models": [model, model | {"name": "embedder", "scheduler": []}]})
    assert text.count("replica 0:") == 1
    assert "embedder: 12 requests" in text
    assert "no replica serves" not in text


def test_a_server_without_a_model_says_so() -> None:
    assert rendered(state() | {"models": []}).splitlines()[-1].strip() == "no model is loaded"


@pytest.mark.parametrize("width", [1, 10, 40, 80])
def test_lines_fit_and_what_the_server_says_is_text(width: int) -> None:
    row = RUNNING | {"request_id": "\x1b[2J[red]", "key": "\u202e\x9b31m[/]"}
    given = state(running=[row])
    given["models"][0]["name"] = "\x1b]0;x\x07 [link=http://evil.test]:smile:\n"
    shown = rendered(given, width)
    assert all(len(line) <= width and line.isprintable() for line in shown.splitlines())
    if width == 80:
        assert r"\x1b]0;x\x07 [link=http://evil.test]:smile:" in shown
        assert r"\x1b[2J" in shown


@pytest.mark.parametrize("answer", [{}, {"version": "1", "models": [{}]}, {"models": 1}])
def test_what_is_no_state_is_one_line(answer: dict[str, Any]) -> None:
    with pytest.raises(FunitelError, match="u gives an answer that funitel top cannot read"):
        page(answer, "u")


# Once, and line by line


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(**behaviour)`: a fake server for the length of the test."""
    with ExitStack() as stack:
        yield lambda **behaviour: stack.enter_context(serving(FakeApi(**behaviour)))


def test_once_it_prints_text(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    top(TopSettings(url=start(info=state()).url, once=True))
    assert "812 tokens/s" in capsys.readouterr().out


def test_once_it_prints_json(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    top(TopSettings(url=start(info=state()).url, once=True, json=True))
    assert json.loads(capsys.readouterr().out) == state()


def test_once_nobody_answers_is_a_failure() -> None:
    with pytest.raises(NotReady, match="no server answers at http://127.0.0.1:9"):
        top(TopSettings(url="127.0.0.1:9", once=True))


def test_a_key_is_sent_and_a_wrong_one_is_told(start: Start) -> None:
    fake = start(info=state(), key="k")
    top(TopSettings(url=fake.url, api_key="k", once=True))
    with pytest.raises(Unauthorized, match="missing or wrong API key"):
        top(TopSettings(url=fake.url, api_key="x", once=True))


def test_a_server_without_the_route_is_told_how(start: Start) -> None:
    with pytest.raises(FunitelError, match="is it started with --console false"):
        top(TopSettings(url=start(get_status=404, info={"error": "no"}).url, once=True))


@pytest.mark.parametrize("interval", [0.0, 0.05, -1.0, 1e9, float("nan")])
def test_an_interval_has_bounds(interval: float) -> None:
    with pytest.raises(SettingsError, match=r"--interval must be within 0.1..3600, given"):
        TopSettings(interval=interval)


def test_in_a_pipe_it_prints_again_and_again_and_outlives_the_server(start: Start) -> None:
    fake = start(info=state(), starting=2)
    command = [sys.executable, "-m", "funitel.launcher", "top", "--url", fake.url, "--interval", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"not answering" in process.stderr.readline()
        assert [json.loads(process.stdout.readline()) for _ in range(3)] == [state()] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM


# On a terminal

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
HOME = "\x1b[H"


class Screen:
    """The program on a pseudo-terminal; `text` is all it wrote."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int) -> None:
        self.process = process
        self._master = master
        self.text = ""

    def resize(self, columns: int, lines: int) -> None:
        ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, wanted: str) -> str:
        """Read until `wanted` comes; what was written since the last time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while wanted not in self.text:
            assert time.monotonic() < deadline, f"{wanted!r} never came: {self.text[-2000:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._master, 65536).decode()
                except OSError:
                    break
        seen, self.text = self.text, ""
        return seen


@pytest.fixture
def watch() -> Iterator[Callable[[str], Screen]]:
    """`watch(url)`: `funitel top` of a server, on a terminal of 100 columns and 24 lines."""
    running = []

    def begin(url: str) -> Screen:
        master, slave = pty.openpty()
        command = [sys.executable, "-m", "funitel.launcher", "top", "--url", url, "--interval", "0.1"]
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environ)
        screen = Screen(process, master)
        screen.resize(100, 24)
        os.close(slave)
        running.append((process, master))
        return screen

    yield begin
    for process, master in running:
        process.kill()
        process.wait()
        os.close(master)


def test_it_refreshes_follows_the_window_and_leaves_by_q(start: Start, watch: Callable[[str], Screen]) -> None:
    fake = start(info=state(3))
    screen = watch(fake.url)
    assert ENTER in screen.wait_for("running 3")
    fake.info = state(4)
    screen.wait_for("running 4")
    screen.resize(30, 6)
    time.sleep(0.5)
    screen.wait_for(HOME)  # all that was drawn meanwhile
    screen.wait_for(HOME)
    last = screen.wait_for(HOME).rpartition(HOME)[0]
    lines = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", last).split("\r\n")
    assert len(lines) <= 6
    assert max(map(len, lines)) <= 30
    screen.type("q")
    screen.wait_for(LEAVE)
    assert screen.process.wait(PATIENCE_SECONDS) == 0


def test_a_server_that_goes_and_comes_back_is_shown_again(start: Start, watch: Callable[[str], Screen]) -> None:
    fake = start(info=state(3), starting=3)
    screen = watch(fake.url)
    screen.wait_for("not answering")
    screen.wait_for("running 3")
    fake.starting = 5
    screen.wait_for("NOT ANSWERING: unhealthy: starting")
    fake.info = state(6)
    screen.wait_for("running 6")
    screen.process.send_signal(signal.SIGINT)
    screen.wait_for(LEAVE)
    assert screen.process.wait(PATIENCE_SECONDS) == 0


def test_one_that_shows_nothing_ends_it_with_a_line(start: Start, watch: Callable[[str], Screen]) -> None:
    screen = watch(start(get_status=404, info={"error": "no such page"}).url)
    assert screen.wait_for("no such page").count(LEAVE) == 1
    assert screen.process.wait(PATIENCE_SECONDS) == 1
