"""What a GPU is measured by does all it does without one, on a tiny shape, to its last line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def test_every_section_is_rehearsed(tmp_path: Path, is_full: bool) -> None:
    if not is_full:
        pytest.skip("minutes; with --full")
    command = [sys.executable, str(BENCHMARK), "--rehearse", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["is_rehearsal"]
    assert summary["errors"] == {}
    assert json.loads((tmp_path / "report.json").read_text())["lines"]
