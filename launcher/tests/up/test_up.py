"""`funitel up` and `funitel down` as processes: what outlives what, what is adopted, what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel.launcher.config.sockets import free_port
from funitel.launcher.control_plane.state_folder import run_folder
from funitel_testing import takeovers
from funitel_testing.lifecycles import is_alive

FAKE_UP = Path(__file__).with_name("fake_up.py")
PATIENCE_SECONDS = 60.0


def eventually(claim: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not claim():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.05)


class Site:
    """A state folder, and the control planes that are started over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.version = folder / "version"  # of children that are started
        self.version.write_text("1")
        self.port = free_port()
        self.started: list[subprocess.Popen[bytes]] = []

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("HOSTNAME", "PORT")}
        path = ":".join([str(Path(takeovers.__file__).parent / "versions"), *filter(None, sys.path)])
        return kept | {"PYTHONPATH": path, "VERSION_FILE": str(self.version)}

    def model(self, name: str, **behaviour: Any) -> str:
        path = self.folder / "models" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (path / "model.safetensors").write_bytes(b"0" * 1000)
        (path / "behaviour.json").write_text(json.dumps(behaviour))
        return str(path)

    def starts(self, name: str) -> list[int]:
        path = self.folder / "models" / name / "starts"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def up(self, *flags: str, waits: bool = True) -> subprocess.Popen[bytes]:
        number = len(self.started)
        out, err = self.folder / f"out-{number}", self.folder / f"err-{number}"
        argv = [sys.executable, str(FAKE_UP), "--port", str(self.port), "--state-dir", str(self.state), *flags]
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [*argv, "--device", "cpu"], env=self.environ(), stdout=stdout, stderr=stderr, start_new_session=True
            )
        self.started.append(process)
        if waits:
            eventually(lambda: "ready:" in out.read_text() or process.poll() is not None, "the ready line")
            assert process.poll() is None, err.read_text()
        return process

    def out(self) -> str:
        return (self.folder / f"out-{len(self.started) - 1}").read_text()

    def err(self) -> str:
        return (self.folder / f"err-{len(self.started) - 1}").read_text()

    def down(self) -> str:
        argv = [sys.executable, "-m", "funitel", "down", "--state-dir", str(self.state)]
        return subprocess.run(argv, env=self.environ(), capture_output=True, text=True, timeout=120).stdout

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        transport = httpx.HTTPTransport(uds=str(run_folder(self.state) / "control.sock"))
        with httpx.Client(transport=transport, base_url="http://control", timeout=60) as client:
            return client.request(method, path, json=body)

    def launch(self, name: str, **more: Any) -> None:
        answer = self.ask("POST", "/v1/models?wait_ready=true", {"model": self.model(name), **more})
        assert answer.status_code == 200, answer.text

    def models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/v1/models").json()["data"]
        return [{key: value for key, value in each.items() if key != "last_used"} for each in found]

    def router(self) -> int:
        """The pid of the router, as it answers itself."""
        return int(httpx.get(f"http://127.0.0.1:{self.port}/", timeout=30).text)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.state.exists():
            self.down()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.end()
    for folder in (tmp_path / "models").glob("*"):
        assert not any(map(is_alive, made.starts(folder.name)))


def test_a_control_plane_that_is_killed_is_replaced_by_one_that_adopts_everything(site: Site) -> None:
    first = site.up()
    assert "has no model yet" in site.out()
    assert f"funitel launch smollm2-135m-instruct --url http://localhost:{site.port}" in site.out()
    site.launch("a", replicas=2)
    site.launch("b", ttl=1000)
    router, before = site.router(), site.models()
    first.kill()
    first.wait()
    assert site.router() == router
    assert all(map(is_alive, [*site.starts("a"), *site.starts("b")]))
    second = site.up()
    assert f"adopted router {router} and 3 replicas" in site.out()
    assert site.models() == before
    assert site.router() == router
    assert len(site.starts("a") + site.starts("b")) == 3
    site.launch("c")
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_SECONDS) == 0
    assert not any(map(is_alive, [router, *site.starts("a"), *site.starts("b"), *site.starts("c")]))
    assert not run_folder(site.state).joinpath("control.sock").exists()
    site.up()
    eventually(lambda: [each["state"] for each in site.models()] == ["ready"] * 3, "the models of before")


def test_what_died_without_a_control_plane_is_started_again(site: Site) -> None:
    first = site.up()
    site.launch("a")
    router = site.router()
    first.kill()
    first.wait()
    for pid in (router, site.starts("a")[0]):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(router), "its end")
    site.up()
    assert site.router() != router
    eventually(lambda: site.models()[0]["state"] == "ready", "the model")
    assert len(site.starts("a")) == 2


def test_a_router_that_dies_is_restarted_on_its_port(site: Site) -> None:
    site.up()
    site.launch("a")
    router = site.router()
    os.kill(router, signal.SIGKILL)
    assert site.router() != router, "the port is open all the time"
    assert "router exited with code -9 (killed by SIGKILL)" in site.err()
    assert "restart 1 of 5" in site.err()
    site.launch("b")  # the new router says that it serves it
    assert [each["state"] for each in site.models()] == ["ready", "ready"]


def keeper_of(site: Site) -> int:
    return int(json.loads((site.state / "keeper.json").read_text())["pid"])


def test_a_keeper_that_dies_is_restarted_beside_the_router(site: Site) -> None:
    site.up()
    router, keeper = site.router(), keeper_of(site)
    os.kill(keeper, signal.SIGKILL)
    assert site.router() == router
    assert keeper_of(site) != keeper
    assert "the keeper is lost, streams run on: keeper exited with code -9" in site.err()


def test_the_router_is_replaced_in_place(site: Site) -> None:
    process = site.up()
    site.launch("a")
    router, keeper = site.router(), keeper_of(site)
    process.send_signal(signal.SIGUSR2)
    eventually(lambda: "the router was replaced by process" in site.err(), "another router")
    fresh = site.router()
    assert fresh != router
    assert keeper_of(site) == keeper
    assert "exited" not in site.err()
    site.launch("b")  # the new router says that it serves it
    os.kill(fresh, signal.SIGKILL)
    assert site.router() not in (router, fresh)


@pytest.mark.parametrize("adopts", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_keeper_of_another_version_is_replaced(site: Site, dies: bool, adopts: bool) -> None:
    process = site.up()
    router, keeper = site.router(), keeper_of(site)
    if adopts:
        process.kill()
        process.wait()
        process = site.up()
    site.version.write_text("2")
    if dies:
        os.kill(router, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGUSR2)
    eventually(lambda: keeper_of(site) != keeper, "another keeper")
    assert site.router() != router
    assert site.err().count("the keeper is replaced, since a router of another version was started") == 1
    assert site.err().count("restart 1 of 5") == dies
    assert ("the router has finished its connections" in site.err()) is not dies
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("dead", ["router", "keeper", "both"])
def test_router_and_keeper_are_adopted_and_what_has_died_is_started_again(site: Site, dead: str) -> None:
    first = site.up()
    router, keeper = site.router(), keeper_of(site)
    first.kill()
    first.wait()
    gone = {"router": [router], "keeper": [keeper], "both": [router, keeper]}[dead]
    for pid in gone:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, gone)), "their end")
    second = site.up()
    eventually(lambda: is_alive(keeper_of(site)), "a keeper")
    assert (site.router() == router) is (router not in gone)
    assert (keeper_of(site) == keeper) is (keeper not in gone)
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_SECONDS) == 0
    assert not any(map(is_alive, [router, keeper, keeper_of(site)] if (site.state / "keeper.json").exists() else gone))


def test_down_stops_everything_with_and_without_a_control_plane(site: Site) -> None:
    first = site.up()
    site.launch("a")
    router = site.router()
    assert f"process {first.pid} has ended" in site.down()
    assert first.wait(PATIENCE_SECONDS) == 0
    assert not any(map(is_alive, [router, *site.starts("a")]))
    assert "nothing of" in site.down()
    second = site.up()
    eventually(lambda: site.models()[0]["state"] == "ready", "the model of before")
    router = site.router()
    second.kill()
    second.wait()
    assert "stopped 3 processes" in site.down(), "a keeper too"
    assert not any(map(is_alive, [router, *site.starts("a")]))


def test_a_second_one_is_refused_in_one_line(site: Site) -> None:
    first = site.up()
    second = site.up(waits=False)
    assert second.wait(PATIENCE_SECONDS) == 1
    (line,) = [line for line in site.err().splitlines() if line.startswith("error:")]
    assert str(first.pid) in line
    assert str(site.state) in line


def test_another_server_on_the_port_is_named(site: Site) -> None:
    pid, port = site.up().pid, site.port
    (site.folder / "other").mkdir()
    other = Site(site.folder / "other")
    other.port = port
    process = other.up(waits=False)
    assert process.wait(PATIENCE_SECONDS) == 1
    assert f"error: --port {port} is already in use on 127.0.0.1 by process {pid}" in other.err()
    other.end()


def test_models_of_a_file_come_up_by_priority(site: Site, tmp_path: Path) -> None:
    low, high = site.model("low"), site.model("high", load_error="not yet", load_errors=1)
    config = tmp_path / "site.toml"
    config.write_text(
        f'log_level = "debug"\nmax_restarts = 2\n\n[[models]]\nmodel = "{low}"\npriority = 1\n\n'
        f'[[models]]\nmodel = "{high}"\npriority = 2\npinned = true\nttl = 60\n'
    )
    site.up("--config", str(config))
    assert "knows low, high" in site.out()
    eventually(lambda: [each["state"] for each in site.models()] == ["ready", "ready"], "both")
    assert site.models()[1]["pinned"] is True
    high_ready = site.ask("GET", "/v1/models/high/events").json()["events"][-1]["at"]
    low_ready = site.ask("GET", "/v1/models/low/events").json()["events"][-1]["at"]
    assert high_ready < low_ready, "the higher priority comes first, though its first attempt failed"
    assert len(site.starts("high")) == 2


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("colour = 1", "'colour' is no flag of funitel up"),
        ("prot = 1", "did you mean"),
        ("port = {a = 1}", "port must be a text, a number"),
        ("[[models]]\nname = 'a'", "model 1: `model` must be given"),
        ("[[models]]\nmodel = 'a'\nttl = 'soon'", "model 1: `ttl`"),
        ("[[models]]\nmodel = 'a'\n[[models]]\nmodel = 'a'", "two models are called 'a'"),
        ("port = ", "is no TOML"),
        ("port = 'here'", "port"),
    ],
)
def test_a_wrong_file_is_one_line(site: Site, tmp_path: Path, text: str, error: str) -> None:
    config = tmp_path / "site.toml"
    config.write_text(text)
    argv = [sys.executable, str(FAKE_UP), "--config", str(config), "--state-dir", str(site.state)]
    ended = subprocess.run(argv, env=site.environ(), capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert error in ended.stderr.splitlines()[-1], ended.stderr
    assert not site.state.exists()


def test_the_program_imports_no_torch() -> None:
    code = "import sys, funitel.launcher.up.program, funitel.launcher.beside; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
