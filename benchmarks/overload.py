"""Measure goodput under overload: first the capacity, then ten times as many requests.

Goodput is tokens a second of requests that kept the latency target: the first token within `--ttft-ms`, and all but one
in a hundred of the gaps behind it within `--itl-ms`. Capacity is the best goodput of a closed loop, over some numbers
of clients. Then requests come as they like, at random instants, ten times as many a second as capacity would serve,
for `--seconds`. A refused request is not repeated.

Printed are goodput against capacity (it should stay within 10 %), what accepted requests waited for, how long a refusal
took (429, p99 within 50 ms), and whatever else came back; the shares of a core that router, shards and this program
took; and what a refusal costs the router: its CPU time less what the tokens cost it before. This program shares the
machine with the server, so it may take a fifth of a core, and says when it took more. Requests share connections, and
an answer is not parsed beyond its status and its events. The last line on stdout is one JSON object.

    python benchmarks/overload.py --seconds 120
    python benchmarks/overload.py --model-id org/model --tokens 64 -- --max-concurrent-requests 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from funitel.launcher.bench.figures import Failure, Objectives, Timeline, percentile
from funitel_testing.servers import Server, cpu_seconds, descendants, serving

FLOOD = 10.0  # times the capacity
MIN_SHARE_OF_CAPACITY = 0.9
MAX_SECONDS_TO_REFUSE = 0.05
MAX_OWN_CPU = 0.2  # of a core
RAMP_SHARE = 0.1  # of a phase, at its beginning, that is not counted: nothing runs yet
WORDS = "the sea is deep and blue while mountains rise over quiet valleys where rivers run to meet it again".split()
EVENT, LAST_CHUNK = b"data: {", b"0\r\n\r\n"
DRAIN_SECONDS = 300.0


# Clients


@dataclass(slots=True)
class Exchange:
    """One request and what became of it; instants in seconds on the monotonic clock."""

    started: float
    ended: float = 0.0
    status: int = 0  # 0: the connection ended
    arrivals: list[float] = field(default_factory=list)  # of tokens
    has_failed: bool = False  # behind its first token

    @property
    def timeline(self) -> Timeline:
        """The same as the load generator's figures have it."""
        is_whole = self.status == 200 and self.arrivals and not self.has_failed
        failure = None if is_whole else Failure(str(self.status), "")
        return Timeline(self.started, self.ended, tuple(self.arrivals), len(self.arrivals), failure=failure)


class Connection(asyncio.Protocol):
    """A connection for one request after the other."""

    def __init__(self) -> None:
        self.is_open = False
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.is_open = True
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end()

    async def ask(self, request: bytes) -> Exchange:
        """Send a request; return once its answer has ended."""
        self._received = b""
        self._exchange = exchange = Exchange(time.monotonic())
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        return exchange

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._received += data
        if not exchange.status:
            head, found, body = self._received.partition(b"\r\n\r\n")
            if not found:
                return
            exchange.status = int(head[9:12])
            self._received = body
            if exchange.status != 200:
                self._length = int(head.lower().partition(b"content-length:")[2].split()[0])
        if exchange.status != 200:
            if len(self._received) >= self._length:
                self._end()
            return
        num_events = self._received.count(EVENT)
        exchange.arrivals += [time.monotonic()] * num_events
        exchange.has_failed |= b'"error_type"' in self._received
        is_last = self._received.endswith(LAST_CHUNK)
        self._received = self._received[1 - len(EVENT) :]
        if is_last:
            self._end()

    def _end(self) -> None:
        if self._exchange is not None and self._done is not None and not self._done.done():
            self._exchange.ended = time.monotonic()
            self._done.set_result(None)
        self._exchange = None


class Clients:
    """As many connections as are needed at once, for requests that are alike and never the same."""

    def __init__(self, port: int, num_words: int, num_tokens: int) -> None:
        self._port = port
        self._num_words = num_words
        self._num_tokens = num_tokens
        self._free: list[Connection] = []
        self._random = random.Random(0)
        self.num_connections = 0

    def _request(self) -> bytes:
        words = [str(self._random.randrange(10**6)), *self._random.choices(WORDS, k=self._num_words - 1)]
        parameters = {"max_new_tokens": self._num_tokens, "ignore_eos": True}
        body = json.dumps({"inputs": " ".join(words), "parameters": parameters}).encode()
        head = "POST /generate_stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def ask(self) -> Exchange:
        """One request, on a connection that is free."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                break
        else:
            self.num_connections += 1
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
            except OSError:
                now = time.monotonic()
                return Exchange(now, now)
        exchange = await connection.ask(self._request())
        if connection.is_open:
            self._free.append(connection)
        return exchange

    async def closed_loop(self, num_clients: int, seconds: float) -> list[Exchange]:
        """So many clients, each of which asks again as soon as it was answered."""
        until = time.monotonic() + seconds
        exchanges = []

        async def client() -> None:
            while time.monotonic() < until:
                exchanges.append(await self.ask())

        async with asyncio.timeout(seconds + DRAIN_SECONDS):
            await asyncio.gather(*(client() for _ in range(num_clients)))
        return exchanges

    async def open_loop(self, requests_per_second: float, seconds: float) -> tuple[list[Exchange], list[float]]:
        """Requests at random instants, whatever becomes of those before; how late each was sent, too."""
        loop, tasks, delays = asyncio.get_running_loop(), [], []
        began = loop.time()
        at = began
        while (at := at + self._random.expovariate(requests_per_second)) < began + seconds:
            delay = at - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            delays.append(max(0.0, loop.time() - at))
            tasks.append(asyncio.create_task(self.ask()))
        async with asyncio.timeout(DRAIN_SECONDS):
            return await asyncio.gather(*tasks), delays


# Figures


@dataclass(frozen=True, slots=True)
class Window:
    """A phase without its beginning, and the CPU seconds of all of it, by process."""

    began: float
    ended: float
    seconds: float  # of the whole phase
    cpu: dict[str, float]

    def goodput(self, exchanges: Sequence[Exchange], objectives: Objectives) -> float:
        """Tokens a second, of requests that kept the objectives."""
        good = [each for each in exchanges if objectives.are_met(each.timeline)]
        num_tokens = sum(self.began <= instant < self.ended for each in good for instant in each.arrivals)
        return num_tokens / (self.ended - self.began)


class Watch:
    """Takes the time of a phase."""

    def __init__(self, server: Server, seconds: float) -> None:
        pids = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(server.process.pid)}
        self._pids = {
            "router": [pid for pid, line in pids.items() if b"funitel.router\0" in line],
            "shards": [pid for pid, line in pids.items() if b"funitel.model_server\0serve\0" in line],
        }
        self._began = time.monotonic()
        self._seconds = seconds
        self._cpu = self._now()

    def _now(self) -> dict[str, float]:
        cpu = {name: sum(map(cpu_seconds, pids)) for name, pids in self._pids.items()}
        return cpu | {"generator": time.process_time()}

    def window(self) -> Window:
        """The phase, now that it has ended."""
        began = self._began + RAMP_SHARE * self._seconds
        spent = {name: after - self._cpu[name] for name, after in self._now().items()}
        return Window(began, self._began + self._seconds, time.monotonic() - self._began, spent)


def milliseconds(values: Sequence[float]) -> dict[str, float | None]:
    """Percentiles of some seconds."""
    found = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {name: None if value is None else round(value * 1e3, 1) for name, value in found.items()}


def shares(window: Window) -> dict[str, float]:
    """CPU time by process, as shares of one core."""
    return {name: round(seconds / window.seconds, 3) for name, seconds in window.cpu.items()}


# The measurement


@dataclass(frozen=True, slots=True)
class Level:
    """One closed loop."""

    num_clients: int
    goodput: float
    router_cpu_per_token: float  # seconds


async def measure_capacity(clients: Clients, server: Server, args: argparse.Namespace, target: Objectives) -> Level:
    """The level of the closed loop with the best goodput."""
    levels = []
    for num_clients in args.clients:
        watch = Watch(server, args.capacity_seconds)
        exchanges = await clients.closed_loop(num_clients, args.capacity_seconds)
        window = watch.window()
        num_tokens = sum(len(each.arrivals) for each in exchanges)
        if not num_tokens:
            raise SystemExit(f"error: no token came; {Counter(each.status for each in exchanges)}")
        level = Level(num_clients, window.goodput(exchanges, target), window.cpu["router"] / num_tokens)
        levels.append(level)
        found = f"goodput {level.goodput:.1f} tokens/s, shares of a core {shares(window)}"
        print(f"closed loop, {num_clients} clients: {found}", flush=True)
    best = max(levels, key=lambda level: level.goodput)
    if not best.goodput:
        raise SystemExit("error: no request kept the latency target: see --ttft-ms and --itl-ms")
    return best


async def measure(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Capacity, then the flood."""
    target = Objectives(ttft=args.ttft_ms / 1e3, itl=args.itl_ms / 1e3)
    clients = Clients(server.port, args.words, args.tokens)
    await clients.ask()
    best = await measure_capacity(clients, server, args, target)
    rate = FLOOD * best.goodput / args.tokens
    print(f"capacity {best.goodput:.1f} tokens/s with {best.num_clients} clients; now {rate:.1f} requests/s")
    watch = Watch(server, args.seconds)
    exchanges, delays = await clients.open_loop(rate, args.seconds)
    window = watch.window()
    accepted = [each for each in exchanges if each.status == 200]
    refused = [each.ended - each.started for each in exchanges if each.status == 429]
    num_tokens = sum(len(each.arrivals) for each in accepted)
    timelines = [each.timeline for each in accepted if each.arrivals]
    cost = (window.cpu["router"] - num_tokens * best.router_cpu_per_token) / max(1, len(refused))
    goodput, cpu = window.goodput(exchanges, target), shares(window)
    kept = sum(target.are_met(each.timeline) for each in accepted) / max(1, len(accepted))
    return {
        "capacity_tokens_s": round(best.goodput, 1),
        "capacity_clients": best.num_clients,
        "flood_requests_s": round(rate, 1),
        "goodput_tokens_s": round(goodput, 1),
        "goodput_of_capacity": round(goodput / best.goodput, 3),
        "accepted": len(accepted),
        "accepted_within_target": round(kept, 4),
        "ttft_ms": milliseconds([each.ttft for each in timelines]),
        "itl_ms": milliseconds([gap for each in timelines for gap in each.gaps]),
        "target_ms": {"ttft": args.ttft_ms, "itl": args.itl_ms},
        "refused": len(refused),
        "refusal_ms": milliseconds(refused),
        "other_statuses": dict(Counter(str(each.status) for each in exchanges if each.status not in (200, 429))),
        "broken_streams": sum(each.has_failed for each in accepted),
        "sent_late_ms": milliseconds(delays),
        "connections": clients.num_connections,
        "cpu_cores": cpu,
        "router_cpu_us_per_refusal": round(cost * 1e6, 1),
        "keeps_goodput": goodput >= MIN_SHARE_OF_CAPACITY * best.goodput,
        "refuses_in_time": bool(refused) and (percentile(refused, 99) or 0.0) <= MAX_SECONDS_TO_REFUSE,
        "generator_was_cheap": cpu["generator"] <= MAX_OWN_CPU,
    }


def show(report: dict[str, Any]) -> None:
    """What the report says, for people."""
    print(f"goodput {report['goodput_tokens_s']} tokens/s: {report['goodput_of_capacity']:.1%} of capacity")
    print(
        f"accepted {report['accepted']}, {report['accepted_within_target']:.1%} within the target {report['target_ms']}"
    )
    print(f"  first token {report['ttft_ms']} ms, gaps {report['itl_ms']} ms, {report['broken_streams']} broken off")
    refusal, cost = report["refusal_ms"], report["router_cpu_us_per_refusal"]
    print(f"refused {report['refused']}: 429 after {refusal} ms, {cost} us of the router each")
    print(f"others {report['other_statuses'] or 'none'}; requests sent late by {report['sent_late_ms']} ms")
    print(f"shares of a core {report['cpu_cores']}")
    if not report["generator_was_cheap"]:
        print(f"warning: this program took more than {MAX_OWN_CPU} of a core: what it measured it disturbed")


@contextmanager
def server_of(args: argparse.Namespace) -> Iterator[Server]:
    """The server under test, with its default flags but for those that were given."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), "--model-id", args.model_id, *args.flags) as server,
    ):
        yield server


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", default="smollm2-135m-instruct")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the flood")
    parser.add_argument("--capacity-seconds", type=float, default=30.0, help="of each closed loop")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[16, 32, 64, 128], help="of the closed loops, in turn"
    )
    parser.add_argument("--words", type=int, default=30, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--ttft-ms", type=float, default=2000.0, help="target: until the first token")
    parser.add_argument("--itl-ms", type=float, default=500.0, help="target: between tokens")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    args = parser.parse_args()
    numbers = (args.seconds, args.capacity_seconds, args.words, args.tokens, args.ttft_ms, args.itl_ms, *args.clients)
    if min(numbers) <= 0:
        parser.error("every number must be > 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the server too
    with server_of(args) as server:
        report = uvloop.run(measure(args, server))
    show(report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
