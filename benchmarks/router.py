"""Measure the router's cost of a token: many clients stream from a router over a shard that answers at once.

The same bytes are streamed, in the same run and by turns, by the least that uvicorn can be asked for: an ASGI function
that writes recorded events, one write for each, without looking at anything. Both serve as many clients from one
process; what the router adds is gRPC, planning, the scheduler's books, texts, metrics and the events themselves. All
streams run side by side, so a step has a token for each of them, as it has in production, and what a step costs is
shared by them. Measured is from the instant that every stream has its first token until all have their last: taking
requests in is not part of it. CPU time is that of all threads of a process, by the kernel's scheduler; neighbours
disturb it less than they do the clock. The latency of a token is from its making in the shard until the client has
read it. How long a stream waits for its first token is told too (the bare server sends none before all have asked),
and the CPU time of taking a stream in: until all have their first. Figures are medians over the rounds, the ratio is
that of tokens a second; the last line on stdout is one JSON object.

    python benchmarks/router.py --streams 1000 --tokens 100 --rounds 3 [--pin]

With `--intake`, what it costs to take requests in, alone (`router_intake`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers
import uvicorn
import uvloop
from router_intake import (
    INTAKE_ROUTES,
    chat_text,
    cost_of,
    http_request,
    last_first_token,
    make_prompts,
    median_cost,
    write_chat_model,
)

from funitel_testing.instant_shard import STAMP_DIGITS, stamp
from funitel_testing.servers import cpu_seconds, free_port

MAX_TOKENS = 4096  # the shard ends every stream before; it gives a token to those that wait for the others to begin
ROUTES: dict[str, dict[str, Any]] = {
    "/generate_stream": {"inputs": "a", "parameters": {"max_new_tokens": MAX_TOKENS}},
    "/v1/completions": {"prompt": "a", "max_tokens": MAX_TOKENS, "stream": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": MAX_TOKENS,
        "stream": True,
    },
}
STAMP = re.compile(rb" \d{%d}" % STAMP_DIGITS)
END = b"\n0\r\n\r\n"  # of a chunked answer, after an event
PATIENCE_SECONDS = 300.0
SPARE_FILES = 64
STEP_SECONDS = 0.005  # of the shard of --intake: no model answers at once


# Clients


class Stream(asyncio.Protocol):
    """One request and its answer. Parses no more than where the answer ends; `first` and `last` are told of it."""

    def __init__(self, request: bytes, first: Callable[[], None], last: Callable[[], None]) -> None:
        self.received: list[bytes] = []
        self.times: list[float] = []
        self._request = request
        self._first = first
        self._last = last
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)
        self._began = time.monotonic()

    def data_received(self, data: bytes) -> None:
        if not self._tail and b"data:" in data:
            self.first_token_seconds = time.monotonic() - self._began
            self._first()
            self._tail = data
        self.received.append(data)
        self.times.append(time.monotonic())
        if self._tail:
            self._tail = (self._tail + data)[-len(END) :]
            if self._tail == END:
                self._transport.close()
                self._last()

    def events(self) -> list[bytes]:
        """The events of the whole answer."""
        head, _, body = b"".join(self.received).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"error: a stream was answered with {head[:80]!r} {body[:200]!r}")
        return re.findall(rb"data:[^\n]*\n\n", body)

    def stamps(self) -> list[bytes]:
        """When each of its tokens was made."""
        return [found[0] for event in self.events() if (found := STAMP.search(event))]

    def latencies(self, since: float) -> Iterator[float]:
        """Seconds that each token which came after an instant was on its way."""
        for instant, data in zip(self.times, self.received, strict=True):
            if instant > since:
                micros = round(instant * 1e6) % 10**STAMP_DIGITS
                for event in data.split(b"\n\n"):
                    if found := STAMP.search(event):
                        yield (micros - int(found[0])) / 1e6


@dataclass(frozen=True)
class Run:
    """What one crowd of clients saw: times in seconds, CPU time of one token, and of taking one stream in."""

    tokens_per_second: float
    server_cpu: float
    client_cpu: float
    latencies: list[float]
    intake_cpu: float
    first_tokens: list[float]


@dataclass(frozen=True)
class Side:
    """A server to stream from."""

    name: str
    port: int
    pid: int


async def stream_all(side: Side, path: str, num_streams: int) -> tuple[Run, list[Stream]]:
    """Run so many streams of one route at once to their ends."""
    body = json.dumps(ROUTES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    streams: list[Stream] = []
    waiting = {"first": num_streams, "last": num_streams}
    marks: dict[str, tuple[float, float, float]] = {}
    done = asyncio.Event()

    def reached(stage: str) -> None:
        waiting[stage] -= 1
        if not waiting[stage]:
            marks[stage] = (time.monotonic(), cpu_seconds(side.pid), time.process_time())
            if stage == "last":
                done.set()

    def new_stream() -> Stream:
        streams.append(Stream(request, lambda: reached("first"), lambda: reached("last")))
        return streams[-1]

    cpu_before = cpu_seconds(side.pid)
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(num_streams):
            await asyncio.get_running_loop().create_connection(new_stream, "127.0.0.1", side.port)
        await done.wait()
    since = marks["first"][0]
    latencies = [latency for stream in streams for latency in stream.latencies(since)]
    seconds, server_cpu, client_cpu = (
        after - before for before, after in zip(marks["first"], marks["last"], strict=True)
    )
    count = len(latencies)
    intake_cpu = (marks["first"][1] - cpu_before) / num_streams
    first_tokens = [stream.first_token_seconds for stream in streams]
    return Run(count / seconds, server_cpu / count, client_cpu / count, latencies, intake_cpu, first_tokens), streams


# Servers


def write_model(folder: Path) -> None:
    """A model's folder with all that a router reads of it."""
    model = tokenizers.models.WordLevel({word: place for place, word in enumerate(("?", "a", "b", "c"))}, "?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


@contextmanager
def child(arguments: Sequence[str], core: int | None) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process for the length of a `with`, on a core of its own if one is named."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def get(port: int, path: str) -> bytes:
    """A page of a server on this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server says that it is healthy."""
    async with asyncio.timeout(60):
        while True:
            if process.poll() is not None:
                raise SystemExit(f"error: {process.args!r} ended with {process.returncode}")
            try:
                if b" 200 " in (await get(port, "/health")).split(b"\r\n")[0]:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.05)


def serve_bare(port: int, num_streams: int, recorded: Path) -> None:
    """Stream recorded events by their path, each with the microsecond it is written in, once all requests are there."""
    texts: dict[str, list[str]] = json.loads(recorded.read_text())
    events = {path: [_halves(text.encode()) for text in each] for path, each in texts.items()}
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    waiting: list[asyncio.Future[None]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] not in events:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        while (await receive()).get("more_body"):
            pass
        gate = asyncio.get_running_loop().create_future()
        waiting.append(gate)
        if len(waiting) == num_streams:
            for each in waiting:
                each.set_result(None)
            waiting.clear()
        await gate
        await send(start)
        for before, after in events[scope["path"]]:
            body = before if after is None else before + stamp().encode() + after
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(0)  # as its token would: else the loop makes one write of many events
        await send({"type": "http.response.body"})

    config = uvicorn.Config(
        app, port=port, loop="uvloop", http="httptools", ws="none", lifespan="off", log_config=None, access_log=False
    )
    uvicorn.Server(config).run()


def _halves(event: bytes) -> tuple[bytes, bytes | None]:
    """What stands before and after the stamp of an event; some have none."""
    found = STAMP.search(event)
    return (event[: found.start()], event[found.end() :]) if found else (event, None)


# The comparison


async def start_router(
    stack: ExitStack, folder: Path, args: argparse.Namespace, core: int | None, shard: Sequence[object] = ()
) -> Side:
    """The router over an instant shard, with its arguments behind the socket; it serves the model of a folder."""
    socket, port = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "shard-0", free_port()
    words = [str(word) for word in (shard or [args.tokens])]
    stack.enter_context(child(["-m", "funitel_testing.instant_shard", str(socket), *words], None))
    options = {
        "--hostname": "127.0.0.1",
        "--port": port,
        "--tokenizer-name": folder,
        "--master-shard-uds-path": socket,
        "--shard-connect-timeout": 30,
        "--max-concurrent-requests": args.streams,
    }
    flags = [str(word) for option in options.items() for word in option]
    router = stack.enter_context(child(["-m", "funitel.router", *flags], core))
    await wait_ready(port, router)
    return Side("router", port, router.pid)


async def start_bare(stack: ExitStack, folder: Path, args: argparse.Namespace, core: int | None, router: Side) -> Side:
    """The bare server, with what the router streams to one client."""
    events = {}
    for path in args.routes:
        _, [stream] = await stream_all(router, path, 1)
        events[path] = [event.decode() for event in stream.events()]
    recorded, port = folder / "events", free_port()
    recorded.write_text(json.dumps(events))
    bare = stack.enter_context(child([__file__, "--serve-bare", str(port), str(args.streams), str(recorded)], core))
    await wait_ready(port, bare)
    return Side("bare", port, bare.pid)


async def compare(args: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Measure every route by turns."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    core = 0 if args.pin else None
    if args.pin:
        os.sched_setaffinity(0, set(range(1, os.cpu_count() or 1)) or {0})
    write_model(folder)
    router = await start_router(stack, folder, args, core)
    bare = await start_bare(stack, folder, args, core, router)
    routes = {}
    for path in args.routes:
        runs: dict[Side, list[Run]] = {router: [], bare: []}
        for _ in range(args.rounds):
            for side in runs:
                run, streams = await stream_all(side, path, args.streams)
                if side is router:
                    check_whole(streams, args.tokens)
                runs[side].append(run)
        figures = {side.name: summary(each) for side, each in runs.items()}
        ratio = round(figures["router"]["tokens_per_second"] / figures["bare"]["tokens_per_second"], 3)
        routes[path] = figures | {"ratio": ratio}
        for name, figure in figures.items():
            print(f"{path} {name}: " + ", ".join(f"{key} {value:,}" for key, value in figure.items()), flush=True)
        print(f"{path} router / bare: {ratio}", flush=True)
    return {"streams": args.streams, "tokens": args.tokens, "rounds": args.rounds, "routes": routes}


async def measure_intake(args: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Measure the cost of taking requests in, and when the last of a crowd has its first token."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    tokenizer = write_chat_model(folder)
    core = 0 if args.pin else None
    with ExitStack() as of_costs:
        router = await start_router(of_costs, folder, args, core, [1, math.inf, STEP_SECONDS])
        costs = {}
        for route in INTAKE_ROUTES:
            for num_tokens in args.prompt_tokens:
                for at_once in sorted({1, min(64, args.streams), args.streams}):
                    prompts = make_prompts(tokenizer, num_tokens, max(at_once, args.requests))
                    requests = [http_request(route, prompt) for prompt in prompts]
                    await cost_of(router.port, router.pid, requests[: max(at_once, 8)], at_once)
                    runs = [await cost_of(router.port, router.pid, requests, at_once) for _ in range(args.rounds)]
                    costs[f"{route} {num_tokens} tokens, {at_once} at once"] = median_cost(runs)
                    print(list(costs.items())[-1], flush=True)
    with ExitStack() as of_chats:
        router = await start_router(of_chats, folder, args, core, [args.tokens, args.model_speed])
        prompts = make_prompts(tokenizer, args.chat_tokens, args.streams)
        num_tokens = sum(len(tokenizer.encode(chat_text(prompt)).ids) for prompt in prompts)
        chats = [await last_first_token(router.port, prompts, num_tokens, args.model_speed) for _ in range(args.rounds)]
    return {"rounds": args.rounds, "costs": costs, "first_tokens": chats}


def check_whole(streams: Sequence[Stream], num_tokens: int) -> None:
    """Make sure that no token was lost: a stream that began later has the last tokens of the one that began first."""
    all_stamps = [stream.stamps() for stream in streams]
    longest = max(all_stamps, key=len)
    if any(len(stamps) < num_tokens or longest[-len(stamps) :] != stamps for stamps in all_stamps):
        raise SystemExit("error: a stream of the router has not all its tokens, or not in order")


def summary(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over some runs."""

    def at(share: float, values: Callable[[Run], list[float]]) -> float:
        return statistics.median(sorted(values(run))[int(share * (len(values(run)) - 1))] * 1e3 for run in runs)

    def latencies(run: Run) -> list[float]:
        return run.latencies

    def first_tokens(run: Run) -> list[float]:
        return run.first_tokens

    return {
        "tokens_per_second": round(statistics.median(run.tokens_per_second for run in runs)),
        "cpu_us_per_token": round(statistics.median(run.server_cpu for run in runs) * 1e6, 1),
        "client_cpu_us_per_token": round(statistics.median(run.client_cpu for run in runs) * 1e6, 1),
        "p50_latency_ms": round(at(0.5, latencies), 2),
        "p99_latency_ms": round(at(0.99, latencies), 2),
        "p50_first_token_ms": round(at(0.5, first_tokens), 1),
        "last_first_token_ms": round(at(1.0, first_tokens), 1),
        "intake_cpu_us_per_stream": round(statistics.median(run.intake_cpu for run in runs) * 1e6, 1),
    }


def allow_files(count: int) -> None:
    """Let this process and its children hold so many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"error: {count} open files are needed, the hard limit is {hard} (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] == ["--serve-bare"]:
        serve_bare(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="clients at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server on each route")
    parser.add_argument("--routes", nargs="+", choices=list(ROUTES), default=list(ROUTES), metavar="ROUTE")
    parser.add_argument("--pin", action="store_true", help="the server under test on the first core, all else off it")
    parser.add_argument("--intake", action="store_true", help="what it costs to take requests in, alone")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[20, 500, 4000], help="of --intake")
    parser.add_argument("--chat-tokens", type=int, default=20, help="of each message of --intake's crowd of chats")
    parser.add_argument("--requests", type=int, default=128, help="of each round of --intake, where fewer are at once")
    parser.add_argument("--model-speed", type=float, default=20000, help="tokens/s of the shard of --intake's chats")
    args = parser.parse_args()
    if min(args.streams, args.tokens - 1, args.rounds) < 1:
        parser.error("--streams and --rounds must be > 0, --tokens > 1")
    allow_files(args.streams + SPARE_FILES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the children too
    with ExitStack() as stack:
        report = uvloop.run((measure_intake if args.intake else compare)(args, stack))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
