"""The measurement of what each precision costs works; its verdicts on a real model are for whoever runs it."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "accuracy.py"


def test_every_tier_is_held_against_torch(tiny_model: Path) -> None:
    command = [sys.executable, str(BENCHMARK), str(tiny_model), "--num-tokens", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr[-3000:]  # 1: a promise that a random model does not keep
    tiers = json.loads(done.stdout.splitlines()[-1])["tiers"]
    assert set(tiers) >= {"torch float32", "float32", "float16", "int8 int8", "int8 int16"}
    assert tiers["float32"]["relative_error"] < 1e-4
    errors = [tiers[name]["relative_error"] for name in ("float32", "float16", "int8 int16")]
    assert errors == sorted(errors)
    assert tiers["int8 int16"]["same"] < tiers["int8 int16"]["relative_error"]
