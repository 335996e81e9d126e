"""The Compose file: flags, paths and numbers against the code. Manifests of Kubernetes: test_kubernetes.py."""

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from funitel.router.api.routes import OPERATIONS
from funitel.router.auth.access import Access
from funitel_testing.documents.command_lines import problems_of

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
IMAGE_PORT = int(re.findall(r"PORT=(\d+)", (ROOT / "Dockerfile").read_text())[0])
DRAIN_SECONDS = 90  # default of --graceful-termination-timeout
WRITTEN = {"/data", "/tmp"}  # by the server


def open_probes() -> set[str]:
    """Paths that answer health without a key."""
    return {found.path for found in OPERATIONS if found.path.startswith("/health") and found.access is Access.PROBE}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services by name."""
    return dict(yaml.safe_load(COMPOSE.read_text())["services"])


@pytest.fixture(params=["funitel", "fleet", "worker"])
def service(request: pytest.FixtureRequest, services: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each service."""
    return services[request.param]


@pytest.fixture(params=["funitel", "fleet"])
def server(request: pytest.FixtureRequest, services: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each service with a port."""
    return services[request.param]


def test_the_services_are_all_tested(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"funitel", "fleet", "worker"}
    assert [name for name, each in services.items() if "profiles" not in each] == ["funitel"]


def test_the_command_of_compose_parses(service: dict[str, Any]) -> None:
    program = service.get("entrypoint", ["text-generation-launcher"])
    words = [*program, *shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["command"]))]
    if program != ["text-generation-launcher"] and not has_fleet():
        pytest.skip("this version has no funitel up")
    assert problems_of([(words, {})]) == [None]
    assert problems_of([([*words, "--no-such-flag"], {})]) != [None]


def has_fleet() -> bool:
    """Whether this version serves many models."""
    return find_spec("funitel.launcher.worker") is not None and find_spec("funitel.launcher.up") is not None


def test_compose_publishes_and_checks_the_port_of_the_image(server: dict[str, Any]) -> None:
    assert [port.rpartition(":")[2] for port in server["ports"]] == [str(IMAGE_PORT)]
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", server["healthcheck"]["test"][-1])
    assert int(url[0]) == IMAGE_PORT
    assert url[1] in open_probes()


def test_the_worker_joins_where_the_fleet_listens(services: dict[str, dict[str, Any]]) -> None:
    port = re.findall(r"--worker-port (\d+)", services["fleet"]["command"])
    assert re.findall(r"--join http://fleet:(\d+)", services["worker"]["command"]) == port
    assert set(services["worker"]["depends_on"]) == {"fleet"}
    networks = yaml.safe_load(COMPOSE.read_text())["networks"]
    assert {*services["worker"]["networks"], *services["fleet"]["networks"]} == {"default", *networks}
    assert "networks" not in services["funitel"]  # the worker port is without TLS


def test_compose_leaves_writable_what_the_server_writes(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert not service["user"].startswith(("0", "root"))
    assert {*service["tmpfs"], *(volume.partition(":")[2] for volume in service["volumes"])} == WRITTEN
    assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(
        yaml.safe_load(COMPOSE.read_text())["volumes"]
    )
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
    server: dict[str, Any], status: int, is_healthy: bool
) -> None:
    kind, program, *words = server["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    with answering(status) as port:
        words = [word.replace(f":{IMAGE_PORT}/", f":{port}/") for word in words]
        assert (subprocess.run([sys.executable, *words], capture_output=True).returncode == 0) is is_healthy
