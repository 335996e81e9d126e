"""Measure the cost of traces: CPU time of router and shard per request without a collector, with one, and traced.

A tiny random model, so that what is measured is not hidden behind what a model computes. Three kinds of request take
turns: to a server without `--otlp-endpoint`; to one with it, from a client that samples nothing; and to the same,
traced into a collector in this process. CPU time is that of all threads of a process, so what sends spans counts.
Figures are medians over the rounds in microseconds a request; the last line on stdout is one JSON object.

    python benchmarks/tracing.py --requests 200 --tokens 64 --rounds 5
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from funitel_testing.servers import Server, cpu_seconds, serving
from funitel_testing.spans import collecting
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

EXPORT_SECONDS = 0.5  # between two batches of spans; what a round leaves is sent before it is measured
PROMPT = "What does a trace cost? "


@dataclass(frozen=True)
class Kind:
    """A way to ask."""

    name: str
    server: Server
    flag: str  # of `traceparent`

    def ask(self, client: httpx.Client, count: int, num_tokens: int) -> dict[str, float]:
        """Ask so often; return the CPU microseconds of router and shard for a request."""
        pids = {"router": self.server.router_pid(), "shard": self.server.shard_pids()[0]}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        for number in range(1, count + 1):
            answer = client.post(
                f"{self.server.url}/generate_stream",
                json={"inputs": PROMPT, "parameters": {"max_new_tokens": num_tokens}},
                headers={"traceparent": f"00-{number:032x}-{number:016x}-{self.flag}"},
            )
            answer.raise_for_status()
        time.sleep(2 * EXPORT_SECONDS)
        return {name: (cpu_seconds(pid) - before[name]) / count * 1e6 for name, pid in pids.items()}


def compare(args: argparse.Namespace, stack: ExitStack) -> dict[str, object]:
    """Measure every kind by turns."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "model").mkdir()
    model = save_tiny("llama", folder / "model", max_position_embeddings=2048, eos_token_id=VOCAB_SIZE)
    flags = ("--model-id", str(model), "--dtype", "float32", "--max-batch-total-tokens", "8192")
    collector, place = stack.enter_context(collecting())
    environ = {"OTEL_BSP_SCHEDULE_DELAY": str(int(EXPORT_SECONDS * 1000))}
    plain = stack.enter_context(serving(folder, *flags))
    traced = stack.enter_context(serving(folder, *flags, "--otlp-endpoint", f"http://{place}", environ=environ))
    kinds = [Kind("off", plain, "01"), Kind("not sampled", traced, "00"), Kind("traced", traced, "01")]
    figures: dict[str, dict[str, list[float]]] = {kind.name: {"router": [], "shard": []} for kind in kinds}
    with httpx.Client(timeout=60) as client:
        for kind in kinds:
            kind.ask(client, 20, args.tokens)
        collector.spans.clear()
        for _ in range(args.rounds):
            for kind in kinds:
                for name, value in kind.ask(client, args.requests, args.tokens).items():
                    figures[kind.name][name].append(value)
    medians = {
        kind: {name: round(statistics.median(each)) for name, each in of.items()} for kind, of in figures.items()
    }
    for name, figure in medians.items():
        print(f"{name}: router {figure['router']:,} us, shard {figure['shard']:,} us a request", flush=True)
    spans = round(len(collector.spans) / (args.rounds * args.requests), 1)
    print(f"spans of a traced request: {spans}")
    return {"requests": args.requests, "tokens": args.tokens, "rounds": args.rounds, "spans": spans, "cpu_us": medians}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of a round")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each kind")
    args = parser.parse_args()
    with ExitStack() as stack:
        report = compare(args, stack)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
