"""Measure the overhead of HTTP, router and gRPC: streams over HTTP against the executor called in a process.

Both compute the same batch: the same prompts, greedy, with the same precision and as many threads, until the model or
the limit ends each; the totals of tokens must agree. The executor is called by a loop that does nothing else: take the
prompts in, then decode until all have ended. Over HTTP each prompt is one streamed request of one client process, and
the time is from the first request sent to the last event read, so that staggered beginnings and the last answer count
too. One of each runs after the other, with steps pipelined and not (`--pipeline-steps` 2 and 1), and over again; a
ratio is that of the medians.

Layouts: `split` gives the shard, and the executor, one core and one thread, router and client the other core; `shared`
lets all of them use both cores, with two threads. CPU time is that of all threads of a process, by the kernel; for the
shard, what it takes beyond the executor is gRPC and encoding. The last line on stdout is one JSON object.

    python benchmarks/http_overhead.py smollm2-135m-instruct --streams 1 16 --tokens 256 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from funitel_testing.servers import Server, cpu_seconds, serving

LAYOUTS = ("split", "shared")
PIPELINE_STEPS = (2, 1)
POOL_TOKENS = 32_768
MAX_PROMPT_TOKENS = 64
POOL_FLAGS = ("--max-batch-total-tokens", str(POOL_TOKENS), "--prefix-caching", "false")
END = b"\n0\r\n\r\n"  # of a chunked answer, after an event
MICROS = 1e6


def prompts_of(count: int) -> list[str]:
    """Different prompts of about the same length, which the model answers at length."""
    return [f"Write {i + 3} things about the number {i * 7 + 11} and explain each of them:" for i in range(count)]


def precision_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The flags that say so, if they were given."""
    given = {"--dtype": arguments.dtype, "--quantize": arguments.quantize}
    return tuple(word for flag, value in given.items() if value for word in (flag, value))


# In process


class Worker:
    """The executor in a process of its own."""

    def __init__(self, arguments: argparse.Namespace, threads: int) -> None:
        program = Path(__file__).with_name("executor_worker.py")
        command = [sys.executable, program, arguments.model, *precision_of(arguments), "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        if self._answer() != "ready":
            raise SystemExit("error: the executor did not start")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, streams: int, tokens: int) -> Run:
        """Compute one batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{streams} {tokens}\n")
        self._process.stdin.flush()
        count, seconds, cpu = self._answer().split()
        return Run(int(count), float(seconds), {"shard": float(cpu)})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


# Over HTTP


@dataclass(frozen=True)
class Run:
    """One batch: tokens, seconds from begin to end, CPU seconds by process."""

    tokens: int
    seconds: float
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


async def stream(port: int, prompt: str, tokens: int) -> int:
    """One streamed request; reads to the end and returns how many tokens came."""
    body = json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": tokens}}).encode()
    head = "POST /generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = bytearray()
    while not answer.endswith(END):
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"error: the router hung up after {bytes(answer[-300:])!r}")
        answer += data
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"error: a request was answered with {bytes(answer[:300])!r}")
    return answer.count(b"\ndata:")


def run_http(server: Server, streams: int, tokens: int) -> Run:
    """All streams at once."""

    async def all_at_once() -> int:
        return sum(await asyncio.gather(*(stream(server.port, prompt, tokens) for prompt in prompts_of(streams))))

    pids = {"router": server.router_pid(), "shard": server.shard_pids()[0]}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    client_cpu, begin = time.process_time(), time.monotonic()
    count = asyncio.run(all_at_once())
    seconds = time.monotonic() - begin
    cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    return Run(count, seconds, cpu | {"client": time.process_time() - client_cpu})


def pin(pid: int, cores: Sequence[int]) -> None:
    """Keep all threads of a process on some cores; those it will start inherit that."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


# The comparison


def compare(arguments: argparse.Namespace, layout: str) -> list[dict[str, Any]]:
    """Run all of one layout; a row for each number of streams and each length of the pipeline."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    for_shard, for_others = (cores[:1], cores[1:]) if layout == "split" else (cores, cores)
    threads = len(for_shard)
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[int, Server] = {}
        for steps in PIPELINE_STEPS:
            flags = ("--model-id", arguments.model, *precision_of(arguments), "--num-threads", str(threads))
            server = stack.enter_context(serving(folder, *flags, *POOL_FLAGS, "--pipeline-steps", str(steps)))
            pin(server.shard_pids()[0], for_shard)
            pin(server.router_pid(), for_others)
            servers[steps] = server
        worker = stack.enter_context(Worker(arguments, threads))
        pin(worker.pid, for_shard)
        mine = os.sched_getaffinity(0)
        pin(os.getpid(), for_others)
        for streams in arguments.streams:
            rows += measure(arguments, layout, streams, worker, servers)
        pin(os.getpid(), sorted(mine))
    return rows


def measure(
    arguments: argparse.Namespace, layout: str, streams: int, worker: Worker, servers: dict[int, Server]
) -> list[dict[str, Any]]:
    """Runs by turns, the first of each thrown away."""
    inside: list[Run] = []
    outside: dict[int, list[Run]] = {steps: [] for steps in servers}
    for _ in range(arguments.rounds + 1):
        inside.append(worker.run(streams, arguments.tokens))
        for steps, server in servers.items():
            outside[steps].append(run_http(server, streams, arguments.tokens))
            if outside[steps][-1].tokens != inside[-1].tokens:
                raise SystemExit(f"error: {outside[steps][-1].tokens} tokens over HTTP, {inside[-1].tokens} without")
    alone = statistics.median(run.speed for run in inside[1:])
    alone_cpu = cpu_of(inside[1:], "shard")
    rows = []
    for steps, runs in outside.items():
        speed = statistics.median(run.speed for run in runs[1:])
        row = {
            "layout": layout,
            "streams": streams,
            "pipeline_steps": steps,
            "executor_tokens_per_second": round(alone, 1),
            "http_tokens_per_second": round(speed, 1),
            "ratio": round(speed / alone, 3),
            "router_us_per_token": round(cpu_of(runs[1:], "router"), 1),
            "shard_extra_us_per_token": round(cpu_of(runs[1:], "shard") - alone_cpu, 1),
            "client_us_per_token": round(cpu_of(runs[1:], "client"), 1),
        }
        print("  ".join(f"{value!s:>{max(8, len(name))}}" for name, value in row.items()), flush=True)
        rows.append(row)
    return rows


def cpu_of(runs: Sequence[Run], name: str) -> float:
    """CPU microseconds of a process for each token, the median of some runs."""
    return MICROS * statistics.median(run.cpu[name] / run.tokens for run in runs)


def main() -> None:
    """Parse the command line; run every layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", help="precision, as the server is told; its default when not given")
    parser.add_argument("--quantize", help="as the server is told")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("error: two cores are needed")
    names = "layout streams pipeline_steps executor_tokens_per_second http_tokens_per_second ratio"
    names += " router_us_per_token shard_extra_us_per_token client_us_per_token"
    print("  ".join(f"{name:>8}" for name in names.split()), flush=True)
    rows = [row for layout in arguments.layouts for row in compare(arguments, layout)]
    conditions = {"model": arguments.model, "precision": precision_of(arguments), "tokens": arguments.tokens}
    print(json.dumps(conditions | {"rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
