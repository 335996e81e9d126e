"""The measurement of the router's hot path works; what it measures is for a quiet machine to say."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "router.py"
NUM_STREAMS, NUM_TOKENS = 20, 200  # all are there before the first ends


def test_every_route_streams_every_token_to_every_client() -> None:
    command = [sys.executable, str(BENCHMARK), "--streams", str(NUM_STREAMS), "--tokens", str(NUM_TOKENS)]
    done = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]  # the tool itself looks at every stream it was given
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["streams"], report["tokens"]) == (NUM_STREAMS, NUM_TOKENS)
    assert set(report["routes"]) == {"/generate_stream", "/v1/completions", "/v1/chat/completions"}
    for figures in report["routes"].values():
        for side in (figures["router"], figures["bare"]):
            assert side["tokens_per_second"] > 0
            assert 0 <= side["cpu_us_per_token"] < 1e4  # the kernel counts in ticks: so short a run may have none
            assert 0 <= side["p50_latency_ms"] <= side["p99_latency_ms"]
        expected = figures["router"]["tokens_per_second"] / figures["bare"]["tokens_per_second"]
        assert abs(figures["ratio"] - expected) < 0.01


def test_what_cannot_be_measured_is_refused() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--tokens", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--tokens > 1" in done.stderr
