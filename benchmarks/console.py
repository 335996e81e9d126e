"""Measure what the console costs the router: its CPU time per token with no Live page open, and with five.

One server with a steady load of streams is measured in alternation; one that is started with --console false is the
third state. A page asks as console/assets/live.js does: every three seconds, over a connection that stays open. Five
pages cost less than the noise of a shared machine: --pages 50 shows ten times as much. A figure is the median over
rounds, with the smallest and the largest; a ratio is the median of those of the rounds. The last line is one JSON
object.

    python benchmarks/console.py [--model FOLDER] [--streams 16] [--pages 5] [--seconds 8] [--rounds 7] [-- FLAGS]
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx

from funitel_testing.cache import demo_folder
from funitel_testing.clients import client_of, stream
from funitel_testing.figures import spread
from funitel_testing.servers import Server, cpu_seconds, serving

LIVE_SECONDS = 3.0
OPEN, CLOSED, OFF = "pages open", "closed", "--console false"
PROMPT = "Tell me about the sea, its weather and the people who live by it."


async def page(url: str) -> None:
    """What a Live page asks, until cancelled."""
    since = 0.0
    async with httpx.AsyncClient(base_url=url) as client:
        while True:
            answer = await client.get(f"/v1/console/live?requests=true&since={since}")
            models = answer.raise_for_status().json()["models"]
            since = max((each["time"] for model in models for each in model["samples"]), default=since)
            await asyncio.sleep(LIVE_SECONDS)


@asynccontextmanager
async def pages(url: str, count: int) -> AsyncIterator[None]:
    """So many Live pages."""
    opened = [asyncio.create_task(page(url)) for _ in range(count)]
    await asyncio.sleep(0.5)
    try:
        yield
        assert not any(each.done() for each in opened), "a page has failed"
    finally:
        for each in opened:
            each.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*opened, return_exceptions=True)


async def measure(server: Server, given: argparse.Namespace, num_pages: int) -> tuple[float, float]:
    """Microseconds of the router's CPU per token, and tokens per second."""
    async with client_of(server.url) as client, pages(server.url, num_pages):

        async def one(place: int) -> None:
            while True:
                await stream(client, f"{place}. {PROMPT}", max_new_tokens=200, ignore_eos_token=True)

        load = [asyncio.create_task(one(place)) for place in range(given.streams)]
        await asyncio.sleep(1.5)
        router = server.router_pid()
        begin, cpu, tokens = time.monotonic(), cpu_seconds(router), num_tokens(server)
        await asyncio.sleep(given.seconds)
        seconds, spent, made = time.monotonic() - begin, cpu_seconds(router) - cpu, num_tokens(server) - tokens
        assert made > 0, "nothing was generated"
        for each in load:
            each.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    return 1e6 * spent / made, made / seconds


def num_tokens(server: Server) -> float:
    """Tokens that its steps have generated."""
    return server.metrics()['funitel_replica_generated_tokens_total{replica="0"}']


async def compare(on: Server, off: Server, given: argparse.Namespace) -> dict[str, object]:
    """The figures of each state."""
    states = {CLOSED: (on, 0), OPEN: (on, given.pages), OFF: (off, 0)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in states}
    for turn in range(given.rounds + 1):  # the first warms up
        order = list(states) if turn % 2 else list(reversed(states))
        for name in order:
            server, num_pages = states[name]
            cost, speed = await measure(server, given, num_pages)
            if turn:
                found[name].append((cost, speed))
                print(f"{name:16} {cost:7.1f} us of the router a token, {speed:8.1f} tokens/s", flush=True)
    return {
        "router_us_per_token": {name: spread([cost for cost, _ in rounds]) for name, rounds in found.items()},
        "tokens_per_second": {name: spread([speed for _, speed in rounds]) for name, rounds in found.items()},
        "open_over_closed": ratio(found[OPEN], found[CLOSED]),
        "closed_over_off": ratio(found[CLOSED], found[OFF]),
    }


def ratio(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[float]:
    """The costs of one state over those of another, round by round: median, smallest and largest."""
    return spread([a / b for (a, _), (b, _) in zip(one, other, strict=True)], num_digits=3)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ["--model-id", str(given.model or demo_folder()), "--hostname", "127.0.0.1", *given.flags]
        on = stack.enter_context(serving(folder, *flags))
        off = stack.enter_context(serving(folder, *flags, "--console", "false"))
        print(json.dumps(asyncio.run(compare(on, off, given))))


if __name__ == "__main__":
    main()
