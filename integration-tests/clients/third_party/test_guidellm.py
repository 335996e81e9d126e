"""guidellm: benchmarks of each of the routes it knows, streamed and whole."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blame import ENCODER_URL, Calls

TOKENIZER = os.environ.get("FUNITEL_CLIENTS_TOKENIZER", "")
COUNT = 12
FORMATS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def bench(url: str, folder: Path, backend: str, profile: str = "kind=concurrent,streams=3") -> dict[str, Any]:
    """The first benchmark of the report."""
    command = [
        *(Path(sys.executable).parent / "guidellm", "run"),
        *("--backend", f"kind=openai_http,target={url},{backend}"),
        *("--profile", profile),
        *("--constraint", f"kind=max_requests,count={COUNT}"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", "kind=json,path=report.json", "--disable-console-interactive"),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["benchmarks"][0]
    return found


def check(found: dict[str, Any], calls: Calls, route: str) -> None:
    """Check that every request succeeded; guidellm may end before it has counted the last one."""
    calls.check(route)
    assert sum(call["path"] == route for call in calls.all) == COUNT
    totals = found["metrics"]["request_totals"]
    assert totals["errored"] == 0
    assert totals["successful"] >= COUNT - 1


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("route", FORMATS)
def test_every_request_succeeds(route: str, stream: str, url: str, calls: Calls, tmp_path: Path) -> None:
    found = bench(url, tmp_path, f"request_format={route},stream={stream}")
    check(found, calls, route)
    tokens = found["metrics"]["output_token_count"]["successful"]
    assert tokens["mean"] == pytest.approx(8, abs=0.01), "the tokens of `usage` are not those asked for"


def test_a_rate_of_requests(url: str, calls: Calls, tmp_path: Path) -> None:
    found = bench(url, tmp_path, "request_format=/v1/chat/completions", "kind=poisson,rate=4")
    check(found, calls, "/v1/chat/completions")
    assert found["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


def test_embeddings(calls: Calls, tmp_path: Path) -> None:
    found = bench(ENCODER_URL, tmp_path, "request_format=/v1/embeddings")
    check(found, calls, "/v1/embeddings")
