"""Many models on one port over their whole life: launch, cancel, loss, a control plane that is killed, autostart."""

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.faults.model import save_endless
from funitel_testing.servers import descendants, free_port, samples_of, serving
from funitel_testing.takeovers.asks import RawAsk
from funitel_testing.takeovers.load import Comparison, disturbed, report, undisturbed
from funitel_testing.tiny import save_tiny

PATIENCE_SECONDS = 180.0
FUNITEL = [sys.executable, "-m", "funitel"]
NUM_STREAMS, NUM_TOKENS = 8, 800
STREAM = {"model": "tiny", "ignore_eos": True, "stream": True}
STREAMS = [
    RawAsk("a stream", lambda n, t: ("/v1/completions", STREAM | {"prompt": f"{n} cats", "seed": n, "max_tokens": t}))
]


def eventually(claim: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> float:
    """Wait until `claim` holds; returns the seconds it took."""
    began = time.monotonic()
    while not claim():
        assert time.monotonic() - began < seconds, f"in vain waited for: {what}"
        time.sleep(0.1)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class ManyModels:
    """A server of many models, whose control plane can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self.pids: set[int] = set()

    def up(self, *flags: str) -> float:
        """Start the control plane; returns the seconds until it is ready."""
        self.num_starts += 1
        out = self.folder / f"out-{self.num_starts}"
        argv = [*FUNITEL, "up", "--port", str(self.port), "--state-dir", str(self.state), "--device", "cpu"]
        with out.open("w") as stdout, self.log.open("w") as stderr:
            self.process = subprocess.Popen([*argv, *flags], stdout=stdout, stderr=stderr, start_new_session=True)
        process = self.process
        seconds = eventually(lambda: "ready:" in out.read_text() or process.poll() is not None, "the ready line")
        assert process.poll() is None, self.log.read_text()
        return seconds

    @property
    def log(self) -> Path:
        """What the control plane of the last start has logged."""
        return self.folder / f"err-{self.num_starts}"

    def kill(self) -> None:
        """End the control plane as `kill -9` does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command of the program on this server."""
        argv = [*FUNITEL, words[0], "--url", self.url, *words[1:]]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        return httpx.request(method, self.url + path, json=body, timeout=PATIENCE_SECONDS)

    def launch(self, model: Path, **more: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/models?wait_ready=true", {"model": str(model), **more})
        assert answer.status_code == 200, answer.text
        entry: dict[str, Any] = answer.json()
        self.note()
        return entry

    def note(self) -> None:
        """Remember the processes, to look for them at the end."""
        for replica in self.ask("GET", "/v1/models/instances").json()["instances"]:
            self.pids |= {*replica["pids"]}

    def entries(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.ask("GET", "/v1/models").json()["data"]}

    def state_of(self, name: str) -> str:
        return str(self.entries().get(name, {}).get("state"))

    def shard_pids(self, name: str) -> list[int]:
        return [pid for replica in self.entries()[name]["replicas"] for pid in replica["pids"]]

    def router_pid(self) -> int:
        record = json.loads((self.state / "router.json").read_text())
        return int(record["pid"])

    def complete(self, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": "abc", "max_tokens": 5, "temperature": 0, **more}
        return self.ask("POST", "/v1/completions", body)

    def down(self) -> None:
        subprocess.run([*FUNITEL, "down", "--state-dir", str(self.state)], check=True, timeout=PATIENCE_SECONDS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ManyModels]:
    """A server without a model; none of its processes is left at the end."""
    made = ManyModels(tmp_path)
    made.up()
    yield made
    made.pids.add(made.router_pid())
    made.down()
    assert made.process is not None
    made.process.wait(PATIENCE_SECONDS)
    assert not any(map(is_alive, made.pids))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("other"), seed=1)


def test_a_model_is_launched_listed_and_terminated_by_command_and_by_rest(server: ManyModels, tiny: Path) -> None:
    assert server.entries() == {}
    server.run("launch", str(tiny), "--name", "first")
    assert "first" in server.run("list")
    assert server.complete("first").status_code == 200
    pids = server.shard_pids("first")
    server.launch(tiny, name="second")
    assert {*server.entries()} == {"first", "second"}
    assert server.complete("nothing").status_code == 404
    samples = samples_of(server.ask("GET", "/metrics").text)
    assert samples['funitel_load_duration_seconds_count{model="second"}'] == 1
    server.run("terminate", "first")
    assert {*server.entries()} == {"second"}
    assert not any(map(is_alive, pids))
    assert server.complete("second").status_code == 200
    assert server.ask("DELETE", "/v1/models/second").status_code == 200
    assert server.entries() == {}


def test_a_launch_is_cancelled_midway(server: ManyModels, tiny: Path) -> None:
    began = time.monotonic()
    answer = server.ask("POST", "/v1/models?wait_ready=false", {"model": str(tiny), "name": "tiny"})
    assert answer.status_code == 202
    assert time.monotonic() - began < 5
    seen = []
    while server.state_of("tiny") != "loading":
        seen.append(server.ask("GET", "/v1/models/tiny/progress").json()["progress"])
        time.sleep(0.05)
    assert seen == sorted(seen)
    pids = server.shard_pids("tiny")
    waiting: list[httpx.Response] = []
    load = threading.Thread(target=lambda: waiting.append(server.ask("POST", "/v1/models/tiny/load?wait_ready=true")))
    load.start()
    time.sleep(0.2)
    assert server.ask("POST", "/v1/models/tiny/cancel").status_code == 200
    load.join()
    assert waiting[0].status_code == 499
    assert server.entries() == {}
    assert not any(map(is_alive, pids))
    assert server.ask("GET", "/v1/models/tiny/events").json()["events"][-1]["stage"] == "cancelled"


def test_a_lost_replica_is_back_within_a_minute_under_load(server: ManyModels, tiny: Path) -> None:
    server.launch(tiny, name="tiny", replicas=2)
    victim = server.shard_pids("tiny")[0]
    statuses: list[int] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            statuses.append(server.complete("tiny", max_tokens=20).status_code)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    os.kill(victim, signal.SIGKILL)
    took = eventually(
        lambda: (
            victim not in server.shard_pids("tiny")
            and all(each["state"] == "ready" for each in server.entries()["tiny"]["replicas"])
        ),
        "the lost replica",
        60,
    )
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    server.note()
    assert took < 60
    assert {*statuses} == {200}, "the other replica has taken over"
    eventually(lambda: "restart 1 of 5 in 0 s" in server.log.read_text(), "the restart in the log", 5)


def test_a_killed_control_plane_is_replaced_while_a_stream_runs(server: ManyModels, tiny: Path, other: Path) -> None:
    server.launch(tiny, name="tiny", replicas=2)
    server.launch(other, name="other", ttl=3600)
    router = server.router_pid()
    pids = {name: server.shard_pids(name) for name in ("tiny", "other")}
    whole = server.complete("tiny", max_tokens=200, ignore_eos=True).json()["choices"][0]["text"]

    async def stream() -> str:
        text = ""
        body = {
            "model": "tiny",
            "prompt": "abc",
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client,
            client.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as answer,
        ):
            async for line in answer.aiter_lines():
                if not text:
                    server.kill()
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text

    before = server.entries()
    assert asyncio.run(stream()) == whole
    assert server.complete("other").status_code == 200, "without a control plane"
    server.up()
    assert "adopted router" in (server.folder / "out-2").read_text()
    assert server.router_pid() == router
    assert {name: server.shard_pids(name) for name in ("tiny", "other")} == pids
    changing = ("last_used", "bytes")
    for name, entry in server.entries().items():
        kept = {key: value for key, value in entry.items() if key not in changing}
        assert kept == {key: value for key, value in before[name].items() if key not in changing}
    assert server.complete("tiny").status_code == 200
    victim = pids["other"][0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: server.shard_pids("other") not in ([], [victim]), "its restart by the new control plane")
    eventually(lambda: server.complete("other").status_code == 200, "its answer")
    server.note()


def test_a_router_that_dies_comes_back_and_uses_the_models_again(server: ManyModels, tiny: Path) -> None:
    server.launch(tiny, name="tiny")
    pids, router = server.shard_pids("tiny"), server.router_pid()
    os.kill(router, signal.SIGKILL)
    eventually(lambda: server.router_pid() != router, "another router")
    eventually(lambda: server.complete("tiny").status_code == 200, "an answer", 60)
    assert server.shard_pids("tiny") == pids


def test_a_router_that_dies_leaves_the_sequences_of_all_replicas(server: ManyModels, tmp_path: Path) -> None:
    model = save_endless(tmp_path / "model")
    server.launch(model, name="tiny", replicas=2, settings={"num_threads": 1})
    pids, router = server.shard_pids("tiny"), server.router_pid()
    known = asyncio.run(undisturbed(server.port, NUM_STREAMS, NUM_TOKENS, STREAMS))
    assert {answer.status for answer in known.values()} == {200}
    comparison = Comparison()

    async def strike() -> None:
        await asyncio.sleep(0.3)
        os.kill(router, signal.SIGKILL)

    asyncio.run(disturbed(server.port, NUM_STREAMS, NUM_TOKENS, known, strike, comparison, STREAMS))
    assert not comparison.problems, report(comparison)
    eventually(lambda: "took over sequences=" in server.log.read_text(), "the sequences in the log", 10)
    line = next(each for each in server.log.read_text().splitlines() if "took over sequences=" in each)
    assert re.search(r"sequences=[1-9]\d* .*resumed=0 recomputed=0", line), line
    samples = samples_of(server.ask("GET", "/metrics").text)
    assert not sum(value for name, value in samples.items() if name.startswith("funitel_blocks{") and '"used"' in name)
    assert server.shard_pids("tiny") == pids


def test_models_are_loaded_on_demand_evicted_and_restored(server: ManyModels, tiny: Path, other: Path) -> None:
    server.launch(tiny, name="tiny", ttl=2)
    eventually(lambda: server.state_of("tiny") == "registered", "the end of its ttl")
    answer = server.complete("tiny")
    assert answer.status_code == 200, answer.text
    eventually(lambda: server.state_of("tiny") == "ready", "the state of what serves already")
    server.launch(other, name="other", priority=5)
    server.note()
    assert server.process is not None
    server.process.terminate()
    server.process.wait(PATIENCE_SECONDS)
    assert not any(map(is_alive, server.pids))
    server.up()
    eventually(lambda: server.state_of("other") == "ready", "the model that was wanted")
    assert server.complete("other").status_code == 200
    server.note()
    # With room for one, a request for the other evicts the first.
    server.process.terminate()
    server.process.wait(PATIENCE_SECONDS)
    most = max(entry["bytes"] for entry in map(json.loads, _stored(server)))
    server.up("--memory-budget", str(int(most * 1.5)))
    eventually(lambda: "ready" in (server.state_of("tiny"), server.state_of("other")), "one of them")
    for name, rest in (("tiny", "other"), ("other", "tiny"), ("tiny", "other")):
        answer = server.complete(name)
        assert answer.status_code == 200, answer.text
        assert server.state_of(rest) == "registered"
    server.note()


def _resident_bytes(pids: set[int]) -> int:
    """Memory of processes; what they share with others counts in shares."""
    found = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return found


def test_d20_an_unloaded_model_gives_its_memory_back_and_answers_alike_once_loaded_again(
    tmp_path: Path, demo_model: Path
) -> None:
    server = ManyModels(tmp_path)
    server.up("--wait-for-load", "0", "--num-threads", "1")
    assert server.process is not None

    def resident() -> int:
        assert server.process is not None
        return _resident_bytes(
            {server.process.pid, server.router_pid(), *descendants(server.process.pid), *server.pids}
        )

    try:
        server.launch(demo_model, name="demo", dtype="float32")
        ask = {"prompt": "The capital of France is", "max_tokens": 24}
        first = server.complete("demo", **ask).json()["choices"]
        loaded, weights = resident(), 134_515_008 * 4
        assert server.ask("POST", "/v1/models/demo/unload").status_code == 200
        eventually(lambda: server.state_of("demo") == "registered", "the end of the model")
        eventually(lambda: loaded - resident() >= 0.8 * weights, "less memory", 20)
        answer = server.complete("demo", **ask)
        assert answer.status_code == 503
        assert "is not loaded; its load has begun" in answer.text
        eventually(lambda: server.state_of("demo") == "ready", "the model again")
        server.note()
        assert server.complete("demo", **ask).json()["choices"] == first
    finally:
        server.pids.add(server.router_pid())
        server.down()
        server.process.wait(PATIENCE_SECONDS)
    assert not any(map(is_alive, server.pids))


def _stored(server: ManyModels) -> list[str]:
    """The JSON of the entries in the state."""
    with sqlite3.connect(server.state / "fleet.db") as database:
        return [row[0] for row in database.execute("SELECT entry FROM models")]


def test_a_server_of_one_model_takes_further_ones_and_upgrades(tmp_path: Path, tiny: Path, other: Path) -> None:
    with serving(tmp_path, "--model-id", str(tiny), "--served-model-name", "first", "--device", "cpu") as server:

        def entries() -> dict[str, Any]:
            data = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
            return {each["name"]: each for each in data if "name" in each}

        def complete(model: str) -> int:
            body = {"model": model, "prompt": "abc", "max_tokens": 5}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS).status_code

        eventually(lambda: entries().get("first", {}).get("is_static"), "the control plane")
        first = entries()["first"]["replicas"][0]["pids"]
        assert httpx.delete(f"{server.url}/v1/models/first", timeout=30).status_code == 409
        body = {"model": str(other), "name": "second"}
        answer = httpx.post(f"{server.url}/v1/models?wait_ready=true", json=body, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
        second = entries()["second"]["replicas"][0]["pids"]
        assert [complete(name) for name in ("first", "second", "tgi", "third")] == [200, 200, 200, 404]
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: entries()["first"]["replicas"][0]["pids"] not in ([], first), "the upgrade")
        assert entries()["second"]["replicas"][0]["pids"] == second
        assert [complete(name) for name in ("first", "second")] == [200, 200]
    assert not any(map(is_alive, [*first, *second])), "further models end with the launcher"
