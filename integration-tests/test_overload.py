"""Whatever arrives, memory is bounded and whoever asks properly is answered; and the benchmark of a flood works.

In the long form (`--full`) ten thousand connections at once.
"""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.servers import Server, descendants, wait_until

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "overload.py"
SHORT, LONG = 300, 10_000  # connections
MAX_BYTES_OF_A_CONNECTION, MAX_BYTES_OF_A_REQUEST = 12_000, 30_000
SLACK_BYTES = 15_000_000  # what allocators and the answers of the test itself take
MAX_UNREAD_BYTES = 8_000_000
MAX_SLOW_READERS = 1000  # each has the router write megabytes
PATIENCE_SECONDS = 120.0

BODY = json.dumps({"inputs": "the sea", "parameters": {"max_new_tokens": 5}}).encode()
POST = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n"
CROWDS = {
    "say nothing": (b"", MAX_BYTES_OF_A_CONNECTION),
    "send half a header": (POST, MAX_BYTES_OF_A_CONNECTION),
    "send half of a very long line": (b"GET /health HTTP/1.1\r\na: " + b"x" * 8000, MAX_BYTES_OF_A_REQUEST),
    "send half a body": (POST + b"\r\n" + BODY, MAX_BYTES_OF_A_REQUEST),
}


@pytest.fixture
def server(launch: Any, tiny_model: Path) -> Server:
    flags = ("--model-id", str(tiny_model), "--max-total-unread-bytes", str(MAX_UNREAD_BYTES))
    served: Server = launch(*flags, "--max-batch-total-tokens", "4096")
    return served


@pytest.fixture
def count(is_full: bool) -> int:
    """How many come at once; this process may have as many files open."""
    wanted = LONG if is_full else SHORT
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted + 100:
        pytest.skip(f"{wanted} connections need more open files than may be (ulimit -Hn: {hard})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted


class Router:
    """What the router's process takes of the machine."""

    def __init__(self, server: Server) -> None:
        pids = descendants(server.process.pid)
        (self._pid,) = [i for i in pids if b"funitel.router\0" in Path(f"/proc/{i}/cmdline").read_bytes()]

    @property
    def num_bytes(self) -> int:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self._pid}/fd"))


@contextmanager
def crowd(server: Server, count: int, sent: bytes, receive_buffer: int | None = None) -> Iterator[list[socket.socket]]:
    """So many connections that have sent the same, and read nothing."""
    sockets = []
    try:
        for _ in range(count):
            client = socket.socket()
            if receive_buffer is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            client.connect(("127.0.0.1", server.port))
            client.sendall(sent)
            sockets.append(client)
        yield sockets
    finally:
        for client in sockets:
            client.close()


def ask(server: Server) -> None:
    """Ask for a completion, on a connection of its own."""
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/generate", content=BODY, headers=headers, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text


def connections(server: Server) -> float:
    """Open connections, that of the question included."""
    return server.metrics()["funitel_connections"]


@pytest.mark.parametrize(("sent", "most"), CROWDS.values(), ids=list(CROWDS))
def test_a_crowd_that_wants_nothing_costs_little_and_keeps_out_nobody(
    server: Server, count: int, sent: bytes, most: int, figures: dict[str, object], request: pytest.FixtureRequest
) -> None:
    ask(server)
    # The router may still be closing connections of before: counted in, they would be missed later.
    wait_until(lambda: connections(server) == 1, PATIENCE_SECONDS, "only the one that asks is left")
    router = Router(server)
    num_bytes, num_files = router.num_bytes, router.num_files
    with crowd(server, count, sent):
        wait_until(lambda: connections(server) > count, PATIENCE_SECONDS, "all are connected")
        assert router.num_files >= count
        ask(server)
        of_each = (router.num_bytes - num_bytes) / count
        assert router.num_bytes - num_bytes <= count * most + SLACK_BYTES
        assert connections(server) >= count
    wait_until(lambda: router.num_files <= num_files + 2, PATIENCE_SECONDS, "all have left")
    figures[f"bytes of each of {count} connections that {request.node.callspec.id}"] = round(of_each)
    ask(server)


def test_what_nobody_reads_is_bounded(server: Server, count: int) -> None:
    count = min(count, MAX_SLOW_READERS)
    ask(server)
    router = Router(server)
    size = len(httpx.get(f"{server.url}/openapi.json").content)
    assert count * size > 3 * MAX_UNREAD_BYTES, "it would not all be kept"
    num_bytes = router.num_bytes
    with crowd(server, count, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4, receive_buffer=4096):
        wait_until(lambda: cut(server) > 0, PATIENCE_SECONDS, "those that read least are cut")
        ask(server)
        assert router.num_bytes - num_bytes <= MAX_UNREAD_BYTES + SLACK_BYTES + count * MAX_BYTES_OF_A_CONNECTION
    ask(server)


def cut(server: Server) -> float:
    return server.metrics().get('funitel_cut_connections_total{reason="total_unread_bytes"}', 0.0)


def test_a_slow_reader_holds_its_blocks_no_longer_than_others(server: Server) -> None:
    body = json.dumps({"inputs": "the sea", "parameters": {"max_new_tokens": 400, "ignore_eos": True}}).encode()
    head = "POST /generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    before = server.metrics()["tgi_request_success"]
    with crowd(server, 1, f"{head}\r\nconnection: close\r\n\r\n".encode() + body, receive_buffer=4096) as (client,):
        wait_until(lambda: server.metrics()["tgi_request_success"] > before, PATIENCE_SECONDS, "all is computed")
        metrics = server.metrics()
        assert metrics['funitel_blocks{state="used"}'] == metrics['funitel_sequences{state="running"}'] == 0
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.count(b"data: {") == 400, "and it gets all of it"


def test_the_benchmark_measures_a_flood(tiny_model: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARK),
        "--model-id",
        str(tiny_model),
        "--seconds",
        "2",
        "--capacity-seconds",
        "1",
    ]
    command += ["--clients", "2", "4", "--words", "10", "--tokens", "20", "--ttft-ms", "20000", "--itl-ms", "20000"]
    flags = ["--", "--max-concurrent-requests", "4", "--max-batch-total-tokens", "4096"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["other_statuses"] == {}, "a request is answered, or refused"
    assert report["broken_streams"] == 0
    assert report["accepted"] > 0
    assert report["refused"] > report["accepted"], "at ten times the capacity"
    assert report["accepted_within_target"] == 1
    assert report["capacity_tokens_s"] > 0
    assert report["capacity_clients"] in (2, 4)
    for name in ("ttft_ms", "itl_ms", "refusal_ms"):
        assert 0 <= report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    assert set(report["cpu_cores"]) == {"router", "shards", "generator"}
    ratio = report["goodput_tokens_s"] / report["capacity_tokens_s"]
    assert abs(report["goodput_of_capacity"] - ratio) < 0.01
    assert report["keeps_goodput"] == (ratio >= 0.9)


def test_what_cannot_be_measured_is_refused() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--tokens", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "every number must be > 0" in done.stderr
