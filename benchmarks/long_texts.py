"""Measure what texts far beyond the context cost other clients: bodies of 1.9 MB, alone and 50 a second.

A server of the demo model answers `GET /health` every 20 ms and a request for three tokens every half second, before
and during the bodies, which come from a process of their own. Printed for each kind of body are the seconds one alone
takes, p50, p99 and the maximum of `/health`, the median and the maximum of the small request, statuses of the bodies,
and the largest memory of the router and its children. With `--keys` bodies and small requests have keys of their own,
the first with `--max-concurrent-requests 8 --tokens-per-minute 10000`. `--context 131072` serves the same weights with
positions that the model was not trained for. The last line on stdout is one JSON object.

    python benchmarks/long_texts.py --seconds 10
    python benchmarks/long_texts.py --context 131072 --keys
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from funitel.launcher.bench.figures import percentile
from funitel_testing.servers import Server, descendants, serving

BODY_CHARACTERS = 1_900_000
TEXTS = {"digits": "1", "letters": "a", "aA ": "aA "}
HEALTH_SECONDS, OTHER_SECONDS = 0.02, 0.5
PATIENCE_SECONDS = 120.0


def post(port: int, body: bytes, key: str | None) -> tuple[int, float]:
    """Send a body to /generate; return the status, 0 for a lost connection, and the seconds until the answer."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST", "/generate", body, headers)
        status = connection.getresponse().status
    except OSError:
        status = 0
    finally:
        connection.close()
    return status, time.monotonic() - began


def attack(port: int, text: str, key: str | None, rate: float, seconds: float, results: Any) -> None:
    """Send bodies of a text at a rate, whatever becomes of them, and put the statuses into a queue."""
    body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": 3}}).encode()
    statuses: Counter[int] = Counter()
    threads = []
    began = time.monotonic()
    for number in range(int(rate * seconds)):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        thread = threading.Thread(target=lambda: statuses.update([post(port, body, key)[0]]), daemon=True)
        thread.start()
        threads.append(thread)
    while time.monotonic() < began + seconds + PATIENCE_SECONDS and any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
    results.put(dict(statuses))


class Watch:
    """Asks for /health and for three tokens until told to stop, and notes memory."""

    def __init__(self, port: int, router: int, key: str | None) -> None:
        self.port, self.router, self.key = port, router, key
        self.health: list[float] = []
        self.other: list[float] = []
        self.peak_bytes = 0
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._watch_health, self._ask, self._watch_memory)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _watch_health(self) -> None:
        while not self._ends.wait(HEALTH_SECONDS):
            began = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
            with suppress(OSError):  # one that times out has taken the whole patience
                connection.request("GET", "/health")
                connection.getresponse().read()
            connection.close()
            self.health.append(time.monotonic() - began)

    def _ask(self) -> None:
        number = 0
        while not self._ends.wait(OTHER_SECONDS):
            number += 1
            body = json.dumps({"inputs": f"{number}: the sea is", "parameters": {"max_new_tokens": 3}}).encode()
            status, seconds = post(self.port, body, self.key)
            self.other.append(seconds if status == 200 else PATIENCE_SECONDS)

    def _watch_memory(self) -> None:
        while not self._ends.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, sum(map(resident_bytes, {self.router, *descendants(self.router)})))

    def figures(self) -> dict[str, float]:
        """Milliseconds, and megabytes."""
        health, other = sorted(self.health), sorted(self.other)
        return {
            "health_p50_ms": round(percentile(health, 50) * 1e3, 1),
            "health_p99_ms": round(percentile(health, 99) * 1e3, 1),
            "health_max_ms": round(health[-1] * 1e3, 1),
            "other_p50_ms": round(percentile(other, 50) * 1e3, 1),
            "other_max_ms": round(other[-1] * 1e3, 1),
            "peak_mb": round(self.peak_bytes / 1e6),
        }


def resident_bytes(pid: int) -> int:
    """Of a process; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def measure(server: Server, args: argparse.Namespace, keys: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Figures at rest, then of each kind of body, alone and at a rate."""
    port, router = server.port, server.router_pid()
    good, bad = keys.get("other"), keys.get("attacker")
    post(port, b'{"inputs": "warm", "parameters": {"max_new_tokens": 3}}', good)
    with Watch(port, router, good) as watch:
        time.sleep(args.seconds)
    yield {"body": "none"} | watch.figures()
    for name in args.kinds:
        text = (TEXTS[name] * BODY_CHARACTERS)[:BODY_CHARACTERS]
        body = json.dumps({"inputs": text, "parameters": {"max_new_tokens": 3}}).encode()
        with Watch(port, router, good) as watch:
            time.sleep(OTHER_SECONDS * 2)
            status, seconds = post(port, body, bad)
            time.sleep(OTHER_SECONDS)
        yield {"body": name, "rate": 0, "status": status, "seconds": round(seconds, 3)} | watch.figures()
        spawn = multiprocessing.get_context("spawn")
        results: Any = spawn.Queue()
        sender = spawn.Process(target=attack, args=(port, text, bad, args.rate, args.seconds, results))
        with Watch(port, router, good) as watch:
            sender.start()
            statuses = results.get()
            sender.join()
        yield {"body": name, "rate": args.rate, "statuses": statuses} | watch.figures()


@contextmanager
def model(context: int) -> Iterator[list[str]]:
    """Flags for the demo model, or for a copy of it with more positions."""
    if not context:
        yield []
        return
    found = max(Path("~/.cache/funitel").expanduser().glob("SmolLM2*/"), key=lambda folder: folder.stat().st_mtime)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model"
        shutil.copytree(found, copy, ignore=shutil.ignore_patterns("funitel-manifest.json"))
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
        yield ["--model-id", str(copy), "--max-total-tokens", str(context), "--max-batch-total-tokens", str(context)]


@contextmanager
def key_file(wanted: bool) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Flags for a file of two keys, and the keys by name."""
    if not wanted:
        yield [], {}
        return
    with tempfile.TemporaryDirectory() as folder:
        path, keys = str(Path(folder) / "keys"), {}
        limits = {"attacker": ["--max-concurrent-requests", "8", "--tokens-per-minute", "10000"], "other": []}
        for name, more in limits.items():
            words = [sys.executable, "-m", "funitel", "key", "new", "--name", name, "--api-key-file", path, *more]
            keys[name] = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1]
        yield ["--api-key-file", path], keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=0, help="tokens; the model's own 8192 by default")
    parser.add_argument("--keys", action="store_true", help="bodies and small requests have keys of their own")
    parser.add_argument("--rate", type=float, default=50.0, help="bodies a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--kinds", nargs="+", choices=[*TEXTS], default=[*TEXTS])
    args = parser.parse_args()
    with model(args.context) as model_flags, key_file(args.keys) as (key_flags, keys):
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *model_flags, *key_flags) as server:
            rows = []
            for row in measure(server, args, keys):
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    print(json.dumps({"context": args.context or 8192, "keys": args.keys, "rows": rows}))


if __name__ == "__main__":
    main()
