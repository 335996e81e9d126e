"""Rehearse a pod's life without a cluster: the server as the manifests start it, a kubelet and a load balancer.

    python deploy/kubernetes/rehearse.py --model FOLDER [--short]

Reads the server's container from the manifests and starts its command on this machine, with its probes, its preStop and
its grace period. What must differ on a machine without the container (port, model, threads, key file) is changed and
said. One line is printed for each step; the exit code is 1 if one of them is wrong.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).parent
PROPAGATION_SECONDS = 3.0  # from a change of a pod until every balancer has heard of it
QUEUE_FLAG = "--max-batch-size=4"  # few sequences at once, so that a small burst queues
BURST = 24  # requests
GAUGE_FLAGS = ("--total-queued-requests-metric", "--kv-cache-usage-percentage-metric")


class Wrong(Exception):
    """A step did not go as it must; one line."""


def require(holds: object, message: str) -> None:
    """Raise Wrong unless something holds."""
    if not holds:
        raise Wrong(message)


@dataclass(frozen=True)
class Probe:
    """A probe over HTTP; times in seconds."""

    path: str
    period: float
    max_failures: int

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> "Probe":
        """The probe of a container."""
        return cls(spec["httpGet"]["path"], spec.get("periodSeconds", 10), spec.get("failureThreshold", 3))


@dataclass(frozen=True)
class Container:
    """What the manifests say of the server."""

    args: list[str]
    probes: dict[str, Probe]
    pre_stop: list[str] | None
    grace_seconds: float

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> "Container":
        """The first container of a pod."""
        spec = pod["containers"][0]
        probes = {name: Probe.of(spec[f"{name}Probe"]) for name in ("startup", "liveness", "readiness")}
        pre_stop = spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        return cls(list(spec["args"]), probes, pre_stop, pod["terminationGracePeriodSeconds"])

    def flag(self, name: str) -> str:
        """The value of a flag."""
        found = [word.partition("=")[2] for word in self.args if word.startswith(f"{name}=")]
        require(found, f"the container has no {name}")
        return found[-1]


def documents_of(overlay: str) -> list[dict[str, Any]]:
    """The objects of an overlay by kubectl; the files of the base where there is none."""
    if shutil.which("kubectl") is not None:
        done = subprocess.run(["kubectl", "kustomize", HERE / "overlays" / overlay], capture_output=True, text=True)
        if done.returncode == 0:
            return [found for found in yaml.safe_load_all(done.stdout) if found]
    return [yaml.safe_load((HERE / "base" / "deployment.yaml").read_text())]


def queries_of() -> dict[str, str]:
    """The queries that KEDA scales by."""
    text = (HERE / "components" / "keda" / "scaled-object.yaml").read_text()
    return {trigger["name"]: trigger["metadata"]["query"] for trigger in yaml.safe_load(text)["spec"]["triggers"]}


def gauges_of() -> list[str]:
    """The gauges that the endpoint picker of the inference extension reads."""
    text = (HERE / "components" / "inference-pool" / "endpoint-picker.yaml").read_text()
    args = next(yaml.safe_load_all(text))["spec"]["template"]["spec"]["containers"][0]["args"]
    given = dict(word.split("=", 1) for word in args if "=" in word)
    return [given[flag] for flag in GAUGE_FLAGS]


@dataclass
class Balancer:
    """Sends requests to the pod while it is among the endpoints of the Service, on connections that are kept."""

    client: httpx.AsyncClient
    is_listed: bool = False
    num_sent: int = 0
    failures: list[str] = field(default_factory=list)

    async def request(self, num_tokens: int) -> None:
        """One stream; anything but a whole answer is a failure."""
        self.num_sent += 1
        body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": num_tokens}}
        try:
            async with self.client.stream("POST", "/generate_stream", json=body) as response:
                if response.status_code != 200:
                    raise Wrong(f"status {response.status_code}: {(await response.aread()).decode()[:200]}")
                lines = [line async for line in response.aiter_lines() if line.startswith("data:")]
            last = json.loads(lines[-1].removeprefix("data:"))
            require(last.get("generated_text") is not None, f"a stream ended with {lines[-1][:200]}")
        except (Wrong, httpx.HTTPError, IndexError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    @asynccontextmanager
    async def traffic(self, num_clients: int, num_tokens: int) -> AsyncIterator[None]:
        """Clients that ask one request after the other while the pod is listed; all are answered before the end."""
        is_over = asyncio.Event()

        async def ask() -> None:
            while not is_over.is_set():
                if self.is_listed:
                    await self.request(num_tokens)
                else:
                    await asyncio.sleep(0.05)

        clients = [asyncio.create_task(ask()) for _ in range(num_clients)]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*clients)


class Kubelet:
    """Starts the container, probes it, and stops it in Kubernetes' order."""

    def __init__(self, container: Container, command: Sequence[str], log: Path, port: int, scale: float) -> None:
        self.container = container
        self.scale = scale  # of the periods of probes
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        self.began = time.monotonic()
        self.is_ready = False
        self.num_liveness_failures = 0
        self.balancer = Balancer(self.client)
        self._log = log
        self._probing: list[asyncio.Task[None]] = []

    async def status(self, path: str) -> int:
        """The status of a GET; 0 where nothing answers."""
        try:
            return (await self.client.get(path, timeout=5)).status_code
        except httpx.HTTPError:
            return 0

    async def start_up(self) -> int:
        """Probe until the startup probe succeeds; returns how often it has failed before."""
        probe = self.container.probes["startup"]
        for failures in range(probe.max_failures):
            if self.process.poll() is not None:
                raise Wrong(f"the server ended with {self.process.returncode}: {self._log.read_text()[-500:]}")
            if await self.status(probe.path) == 200:
                return failures
            await asyncio.sleep(probe.period * self.scale)
        raise Wrong(f"the startup probe has failed {probe.max_failures} times")

    def begin_probing(self) -> None:
        """Probe liveness and readiness from now on; the balancer hears of readiness late."""
        self._probing = [asyncio.create_task(self._live()), asyncio.create_task(self._ready())]

    async def _live(self) -> None:
        probe = self.container.probes["liveness"]
        while True:
            if await self.status(probe.path) != 200:
                self.num_liveness_failures += 1
            await asyncio.sleep(probe.period * self.scale)

    async def _ready(self) -> None:
        probe, loop = self.container.probes["readiness"], asyncio.get_running_loop()
        while True:
            is_ready = await self.status(probe.path) == 200
            if is_ready != self.is_ready:
                self.is_ready = is_ready
                loop.call_later(PROPAGATION_SECONDS, self._list, is_ready)
            await asyncio.sleep(probe.period * self.scale)

    def _list(self, is_listed: bool) -> None:
        self.balancer.is_listed = is_listed

    async def terminate(self) -> float:
        """Take the pod from the Service and stop it, as kubelet does both at once; returns the seconds it took."""
        began = time.monotonic()
        asyncio.get_running_loop().call_later(PROPAGATION_SECONDS, self._list, False)
        if self.container.pre_stop:
            await asyncio.to_thread(subprocess.run, self.container.pre_stop, timeout=self.container.grace_seconds)
        self.process.send_signal(signal.SIGTERM)
        left = self.container.grace_seconds - (time.monotonic() - began)
        try:
            await asyncio.to_thread(self.process.wait, left)
        except subprocess.TimeoutExpired:
            raise Wrong(f"it had to be killed after {self.container.grace_seconds:g} s of grace") from None
        finally:
            await self.stop_probing()
        return time.monotonic() - began

    async def stop_probing(self) -> None:
        """Probe no more."""
        for task in self._probing:
            task.cancel()
        await asyncio.gather(*self._probing, return_exceptions=True)
        self._probing = []

    async def close(self) -> None:
        """End whatever is left."""
        await self.stop_probing()
        await self.client.aclose()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def shard_pids(self) -> list[int]:
        """The processes of the model."""
        listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()]
        launcher = str(self.process.pid)
        return [int(pid) for pid, parent, args in rows if parent == launcher and "funitel.model_server serve" in args]

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its full name; labels are those of the server."""
        text = (await self.client.get("/metrics")).text
        return {
            f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


async def until(holds: Callable[[], Awaitable[bool]], seconds: float, message: str) -> float:
    """Wait until something holds; returns the seconds."""
    began = time.monotonic()
    while not await holds():
        require(time.monotonic() - began < seconds, f"{message} within {seconds:g} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


class Rehearsal:
    """The steps, each of which returns its line."""

    def __init__(self, kubelet: Kubelet, num_tokens: int, is_short: bool) -> None:
        self.kubelet = kubelet
        self.balancer = kubelet.balancer
        self.num_tokens = num_tokens
        self.is_short = is_short

    async def starts(self) -> str:
        """Not ready before it can answer, and the first request after it is answered."""
        failures = await self.kubelet.start_up()
        require(failures > 0, "it was ready at once, before a model could be loaded")
        await self.balancer.request(4)
        require(not self.balancer.failures, f"ready, but the first request failed: {self.balancer.failures}")
        self.kubelet.begin_probing()
        await until(self._listed, 30, "it was not listed")
        return f"ready after {failures} failed startup probes, and the first request is answered"

    async def serves(self) -> str:
        """Traffic while it is listed."""
        sent = self.balancer.num_sent
        async with self.balancer.traffic(4, 8):
            await asyncio.sleep(3 if self.is_short else 15)
        self._check_failures()
        return f"{self.balancer.num_sent - sent} requests over kept connections, none failed"

    async def scales(self) -> str:
        """What KEDA asks for rises with a queue, and falls again."""
        queries = queries_of()
        names = {name for query in queries.values() for name in re.findall(r"\b(?:tgi|funitel)_\w+", query)}
        before = await self.kubelet.metrics()
        for name in names:
            require(any(sample.startswith(name + "{") for sample in before), f"/metrics has no {name}")
        burst = [asyncio.create_task(self.balancer.request(self.num_tokens)) for _ in range(BURST)]
        highest = {"tgi_queue_size": 0.0, "funitel_kv_cache_utilisation": 0.0}
        while not all(task.done() for task in burst):
            now = await self.kubelet.metrics()
            highest = {name: max(value, _total(now, name)) for name, value in highest.items()}
            await asyncio.sleep(0.02)
        for name, value in highest.items():
            require(value > 0, f"{name} did not rise with {BURST} requests")
        after = await self.kubelet.metrics()
        waited = [_total(each, "tgi_request_queue_duration_sum") for each in (before, after)]
        require(waited[1] > waited[0], "the queue wait did not rise")

        async def is_idle() -> bool:
            now = await self.kubelet.metrics()
            return all(_total(now, name) == 0 for name in highest)

        await until(is_idle, 10, "queue and KV utilisation did not fall to 0")
        self._check_failures()
        queue, used = highest.values()
        seconds = waited[1] - waited[0]
        return f"a burst of {BURST}: queue up to {queue:g}, KV up to {used:.1%}, {seconds:.1f} s waited in all; 0 later"

    async def tells_gateways(self) -> str:
        """The gauges of the inference extension parse, and are of the kind that it wants."""
        text = (await self.kubelet.client.get("/metrics")).text
        kinds = {family.name: family for family in text_string_to_metric_families(text)}
        for name in gauges_of():
            require(name in kinds and kinds[name].type == "gauge", f"{name} is no gauge of /metrics")
            require(all(sample.value >= 0 for sample in kinds[name].samples), f"{name} is negative")
        share = kinds[gauges_of()[1]].samples
        require(all(sample.value <= 1 for sample in share), f"{gauges_of()[1]} is above 1")
        return f"the endpoint picker finds {' and '.join(gauges_of())}"

    async def loses_its_shard(self) -> str:
        """Not ready while no replica serves, alive all the time, and ready again."""
        (pid,) = self.kubelet.shard_pids()
        failed = self.kubelet.num_liveness_failures
        os.kill(pid, signal.SIGKILL)
        path = self.kubelet.container.probes["readiness"].path

        async def is_unready() -> bool:
            return await self.kubelet.status(path) == 503

        await until(is_unready, 10, "readiness did not fall with the shard")
        held = asyncio.create_task(self.balancer.request(4))  # came before the balancer had heard of it

        async def is_back() -> bool:
            return await self.kubelet.status(path) == 200

        seconds = await until(is_back, 180, "readiness did not return")
        await held
        self._check_failures()
        require(self.kubelet.num_liveness_failures == failed, "liveness failed with the shard")
        await until(self._listed, 30, "it was not listed again")
        return f"readiness fell with the shard and was back after {seconds:.1f} s; liveness stayed 200"

    async def drains(self) -> str:
        """Terminated under traffic: nothing fails, streams end, and the process is gone within its grace."""
        sent, failed = self.balancer.num_sent, self.kubelet.num_liveness_failures
        streams = [asyncio.create_task(self.balancer.request(8 * self.num_tokens)) for _ in range(3)]
        await asyncio.sleep(0.3)
        async with self.balancer.traffic(4, 8):
            seconds = await self.kubelet.terminate()
        await asyncio.gather(*streams)
        self._check_failures()
        require(self.kubelet.process.returncode == 0, f"it ended with {self.kubelet.process.returncode}")
        # The last probe may come once the port is closed.
        require(self.kubelet.num_liveness_failures - failed <= 1, "liveness failed during the drain")
        grace = self.kubelet.container.grace_seconds
        sent = self.balancer.num_sent - sent
        return f"{sent} requests while it was terminated, none failed; gone after {seconds:.1f} s of {grace:g}"

    async def _listed(self) -> bool:
        return self.balancer.is_listed

    def _check_failures(self) -> None:
        require(
            not self.balancer.failures, f"{len(self.balancer.failures)} requests failed: {self.balancer.failures[:3]}"
        )


def _total(samples: Mapping[str, float], name: str) -> float:
    return sum(value for sample, value in samples.items() if sample.startswith(name + "{"))


def new_key(key_file: Path) -> str:
    """Make a file of keys, as for the Secret; returns the key."""
    key_file.touch(mode=0o600)
    command = [sys.executable, "-m", "funitel.launcher", "key", "new", "--name=rehearsal", f"--api-key-file={key_file}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


def here(container: Container, model: str, port: int, key_file: Path, *, is_short: bool) -> Container:
    """The container with what must differ on this machine; says what that is."""
    changed = {"--model-id": model, "--port": str(port), "--num-threads": "1", "--api-key-file": str(key_file)}
    if is_short:
        changed["--shutdown-delay"] = str(PROPAGATION_SECONDS + 2)
    require(
        float(container.flag("--shutdown-delay")) > PROPAGATION_SECONDS, "--shutdown-delay is too short to be heard of"
    )
    args = []
    for word in container.args:
        name, _, value = word.partition("=")
        args.append(f"{name}={changed[name]}" if name in changed else word)
        if name in changed:
            print(f"     here {name}={changed[name]} instead of {value}")
    added = [QUEUE_FLAG, "--hostname=127.0.0.1"]
    print(f"     here {' '.join(added)} besides")
    return Container([*args, *added], container.probes, container.pre_stop, container.grace_seconds)


def free_port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def rehearse(overlay: str, model: str, *, is_short: bool) -> int:
    """Go through all steps; returns the exit code."""
    (deployment,) = [
        found
        for found in documents_of(overlay)
        if found["kind"] == "Deployment" and found["metadata"]["name"] == "funitel"
    ]
    container = Container.of(deployment["spec"]["template"]["spec"])
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        key = new_key(folder / "keys")
        made = here(container, model, port, folder / "keys", is_short=is_short)
        command = [sys.executable, "-m", "funitel.launcher", *made.args]
        kubelet = Kubelet(made, command, folder / "log", port, scale=0.1 if is_short else 1.0)
        kubelet.client.headers["authorization"] = f"Bearer {key}"
        rehearsal = Rehearsal(kubelet, num_tokens=64, is_short=is_short)
        try:
            steps = (
                rehearsal.starts,
                rehearsal.serves,
                rehearsal.scales,
                rehearsal.tells_gateways,
                rehearsal.loses_its_shard,
                rehearsal.drains,
            )
            for step in steps:
                try:
                    print(f"ok   {step.__name__}: {await step()}", flush=True)
                except Wrong as wrong:
                    print(f"FAIL {step.__name__}: {wrong}", flush=True)
                    return 1
        finally:
            await kubelet.close()
    return 0


def main() -> None:
    """Parse the command line and rehearse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="model to serve instead of the manifests': a folder or a name")
    parser.add_argument("--overlay", default="single", help="overlay with a Deployment of the server")
    parser.add_argument("--short", action="store_true", help="probe ten times as often, and wait less")
    given = parser.parse_args()
    sys.exit(asyncio.run(rehearse(given.overlay, given.model, is_short=given.short)))


if __name__ == "__main__":
    main()
