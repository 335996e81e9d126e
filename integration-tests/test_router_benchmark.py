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


def test_the_cost_of_taking_in_is_measured_on_every_route_and_the_last_of_a_crowd_has_its_first_token() -> None:
    command = [sys.executable, str(BENCHMARK), "--intake", "--streams", "8", "--tokens", "20", "--rounds", "1"]
    options = ["--prompt-tokens", "20", "--requests", "8"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]  # the tool itself looks for 200 in every answer
    report = json.loads(done.stdout.splitlines()[-1])
    routes = ("/generate", "/v1/completions", "/v1/chat/completions")
    assert set(report["costs"]) == {f"{route} 20 tokens, {crowd} at once" for route in routes for crowd in (1, 8)}
    assert all(0 <= cost["cpu_ms"] < 1e4 for cost in report["costs"].values())
    [chats] = report["first_tokens"]
    assert chats["seconds"] >= chats["bare_seconds"] > 0  # the shard computes no prompt sooner


def test_what_cannot_be_measured_is_refused() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--tokens", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--tokens > 1" in done.stderr
