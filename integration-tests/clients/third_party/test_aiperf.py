"""aiperf: profiles of each of the routes it knows, streamed and whole."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blame import ENCODER_URL, Calls

TOKENIZER = os.environ.get("FUNITEL_CLIENTS_TOKENIZER", "")
COUNT = 6


def profile(url: str, folder: Path, kind: str, *flags: str) -> dict[str, Any]:
    """The summary of a profile."""
    command = [
        *(Path(sys.executable).parent / "aiperf", "profile", "--model", "demo", "--url", url),
        *("--endpoint-type", kind, "--request-count", str(COUNT), "--concurrency", "2", "--tokenizer", TOKENIZER),
        *("--synthetic-input-tokens-mean", "32", "--artifact-dir", folder, "--ui", "none", *flags),
    ]
    environ = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    logs = "".join(path.read_text() for path in folder.rglob("aiperf.log"))
    assert done.returncode == 0, (done.stdout + done.stderr + logs)[-3000:]
    (found,) = folder.rglob("profile_export_aiperf.json")
    summary: dict[str, Any] = json.loads(found.read_text())
    return summary


@pytest.mark.parametrize("flags", [(), ("--streaming",)], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("kind", "path"),
    [("chat", "/v1/chat/completions"), ("completions", "/v1/completions")],
    ids=["chat", "completions"],
)
def test_every_request_succeeds(
    kind: str, path: str, flags: tuple[str, ...], url: str, calls: Calls, tmp_path: Path
) -> None:
    summary = profile(url, tmp_path, kind, "--output-tokens-mean", "8", *flags)
    calls.check(path)
    assert summary["request_count"]["avg"] == COUNT
    assert not summary.get("error_summary"), summary["error_summary"]
    assert summary["output_sequence_length"]["avg"] > 0


def test_embeddings(calls: Calls, tmp_path: Path) -> None:
    summary = profile(ENCODER_URL, tmp_path, "embeddings")
    calls.check("/v1/embeddings")
    assert summary["request_count"]["avg"] == COUNT
