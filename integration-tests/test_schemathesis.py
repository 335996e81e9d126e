"""Whatever our OpenAPI document allows, and much that it does not, is answered as it says: never with a 5xx."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.cache import share_engines
from funitel_testing.fuzz_requests import FLAGS, Target
from funitel_testing.servers import Server, serving

CONFIG = Path(__file__).with_name("schemathesis.toml")
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
SHORT = ("--phases", "fuzzing", "--max-examples", "4", "--generation-deterministic")
FULL = ("--phases", "coverage,fuzzing", "--max-examples", "60")
MIN_CASES, MIN_CASES_FULL = 250, 5000


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny server that shall outlive every case.

    Its caches are its own: schemathesis gives names of answers to further requests, and deletes models it was shown.
    """
    cache, environ = tmp_path_factory.mktemp("cache"), {"HF_HUB_CACHE": str(tmp_path_factory.mktemp("hub"))}
    share_engines(cache)
    flags = ("--model-id", str(tiny_model), "--cache-dir", str(cache), *FLAGS)
    with serving(tmp_path_factory.mktemp("server"), *flags, environ=environ) as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()
        assert running.process.poll() is None


async def test_damaged_requests_are_refused(server: Server) -> None:
    """The short form of `make fuzz` for requests, which tries thousands more."""
    target = Target(server)
    for kind in (target.bodies, target.heads):
        for number in range(30):
            assert await kind(random.Random(number)) == "", number
    target.close()


def test_the_document_holds(server: Server, tmp_path: Path, is_full: bool, figures: dict[str, object]) -> None:
    """Run schemathesis over every operation of the served document."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)]
    command += ["run", f"{server.url}/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--continue-on-failure", "--no-color", "--no-shrink"]
    command += ["--report", "json", "--report-json-path", str(report), *(FULL if is_full else SHORT)]
    # Most texts it draws are no segment of a path, so a route with nothing but a name in its path draws in vain.
    command += ["--suppress-health-check", "filter_too_much"]
    environ = os.environ | {"SCHEMATHESIS_HOOKS": "funitel_testing.schemathesis_hooks"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environ, cwd=tmp_path)
    assert report.exists(), ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["failures"] == [], ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert found["operations"]["tested"] == found["operations"]["total"]
    num_cases = found["test_cases"]["generated"]
    assert num_cases >= (MIN_CASES_FULL if is_full else MIN_CASES), ended.stdout
    figures["schemathesis cases without a failure"] = num_cases
