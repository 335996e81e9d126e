"""The Compose file and the Kubernetes manifests of the pages: flags, paths and numbers against the code."""

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from funitel.router.api.routes import OPERATIONS
from funitel.router.middleware.operation import Access
from funitel_testing.documents.command_lines import problems_of
from funitel_testing.servers import run_launcher

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
IMAGE_PORT = int(re.findall(r"PORT=(\d+)", (ROOT / "Dockerfile").read_text())[0])
DRAIN_SECONDS = 90  # default of --graceful-termination-timeout
WRITTEN = {"/data", "/tmp"}  # by the server


def open_probes() -> set[str]:
    """Paths that answer health without a key."""
    return {found.path for found in OPERATIONS if found.path.startswith("/health") and found.access is Access.PROBE}


def problem_of(words: list[str]) -> str | None:
    (problem,) = problems_of([(["text-generation-launcher", *words], {})])
    return problem


# Compose


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    """The only service."""
    (found,) = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())["services"].values()
    return dict(found)


def test_the_command_of_compose_parses(service: dict[str, Any]) -> None:
    words = shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["command"]))
    assert problem_of(words) is None
    assert problem_of([*words, "--no-such-flag"]) is not None


def test_compose_publishes_and_checks_the_port_of_the_image(service: dict[str, Any]) -> None:
    assert [port.rpartition(":")[2] for port in service["ports"]] == [str(IMAGE_PORT)]
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", service["healthcheck"]["test"][-1])
    assert int(url[0]) == IMAGE_PORT
    assert url[1] in open_probes()


def test_compose_leaves_writable_what_the_server_writes(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert not service["user"].startswith(("0", "root"))
    assert {*service["tmpfs"], *(volume.partition(":")[2] for volume in service["volumes"])} == WRITTEN
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that answers every GET with a status; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False)])
def test_the_health_check_of_compose_tells_ready_from_not(
    service: dict[str, Any], status: int, is_healthy: bool
) -> None:
    kind, program, *words = service["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    with answering(status) as port:
        words = [word.replace(f":{IMAGE_PORT}/", f":{port}/") for word in words]
        assert (subprocess.run([sys.executable, *words], capture_output=True).returncode == 0) is is_healthy


# Kubernetes


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """The manifests by kind."""
    text = (EXAMPLES / "kubernetes" / "funitel.yaml").read_text()
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def pod(manifests: dict[str, Any]) -> dict[str, Any]:
    """The spec of the pods."""
    return dict(manifests["Deployment"]["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    """The only container."""
    (found,) = pod["containers"]
    return dict(found)


@pytest.fixture(scope="module")
def flags(container: dict[str, Any]) -> dict[str, str]:
    """Values of the flags with one."""
    return dict(word.split("=", 1) for word in container["args"] if "=" in word)


def test_the_flags_of_the_deployment_parse(container: dict[str, Any]) -> None:
    assert "command" not in container  # the image's entry point
    assert problem_of(container["args"]) is None


def test_probes_and_service_lead_to_the_server(
    manifests: dict[str, Any], container: dict[str, Any], flags: dict[str, str]
) -> None:
    (port,) = container["ports"]
    assert str(port["containerPort"]) == flags["--port"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert {probe["path"] for probe in probes.values()} <= open_probes()
    assert probes["liveness"]["path"] == "/health/live"  # /health would kill pods whose shards are being restarted
    template = manifests["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    service = manifests["Service"]["spec"]
    assert service["selector"] == labels
    assert [found["targetPort"] for found in service["ports"]] == [port["name"]]
    annotations = template["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == flags["--port"]
    assert annotations["prometheus.io/path"] in {found.path for found in OPERATIONS}


def test_a_pod_is_given_longer_than_its_drain(
    pod: dict[str, Any], container: dict[str, Any], flags: dict[str, str]
) -> None:
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    drain = int(flags["--graceful-termination-timeout"])
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + drain


def test_what_is_mounted_is_there_and_is_all_the_server_writes(
    manifests: dict[str, Any], pod: dict[str, Any], container: dict[str, Any], flags: dict[str, str]
) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert set(mounts) >= WRITTEN | {"/dev/shm"}
    claim = volumes[mounts["/data"]]["persistentVolumeClaim"]["claimName"]
    assert claim == manifests["PersistentVolumeClaim"]["metadata"]["name"]
    keys = Path(flags["--api-key-file"])
    assert keys.name in {item["path"] for item in volumes[mounts[str(keys.parent)]]["secret"]["items"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]


def test_threads_fit_into_the_limit(container: dict[str, Any], flags: dict[str, str]) -> None:
    assert int(flags["--num-threads"]) < int(container["resources"]["limits"]["cpu"])


def test_a_link_to_a_service_is_not_used(pod: dict[str, Any]) -> None:
    assert pod["enableServiceLinks"] is False
    ended = run_launcher("--model-id", "/nowhere", environ={"PROMETHEUS_PORT": "tcp://10.0.0.1:9090"})
    assert "PROMETHEUS_PORT=tcp://10.0.0.1:9090 is not used" in ended.err
    assert ended.last_line == "error: no such folder or file: /nowhere"
