"""Measure what the keeper costs: microseconds of the router's processor time for a token and for a request.

Two servers of a tiny model, one with the keeper and one without, are asked in alternation: streams of few and of many
tokens, of which the difference is the cost of a token, then requests of one token, each on a connection of its own. The
processor time is that of the router and of the keeper together. A figure is the median over rounds, with the smallest
and the largest. The last line is one JSON object.

    python benchmarks/takeover.py [--streams 16] [--tokens 1200] [--requests 400] [--rounds 5] [-- FLAGS]
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from funitel_testing.clients import client_of, stream
from funitel_testing.faults.model import save_endless
from funitel_testing.figures import spread
from funitel_testing.servers import Server, cpu_seconds, serving

FEW_TOKENS = 200


def spent(server: Server, *, has_keeper: bool) -> float:
    """Processor time of the router, and of the keeper, in seconds."""
    return cpu_seconds(server.router_pid()) + (cpu_seconds(server.keeper_pid()) if has_keeper else 0.0)


async def streams_of(client: httpx.AsyncClient, given: argparse.Namespace, num_tokens: int) -> None:
    """Streams side by side."""
    limits: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos_token": True}
    await asyncio.gather(*(stream(client, f"stream {place}", **limits) for place in range(given.streams)))


async def requests_of(client: httpx.AsyncClient, given: argparse.Namespace) -> None:
    """Requests of one token, so many at once."""
    left = iter(range(given.requests))

    async def ask() -> None:
        for place in left:
            await stream(client, f"request {place}", max_new_tokens=1)

    await asyncio.gather(*(ask() for _ in range(given.streams)))


async def costs(server: Server, given: argparse.Namespace, *, has_keeper: bool) -> dict[str, float]:
    """Microseconds of one token, and of one request."""

    async def microseconds(load: Coroutine[Any, Any, None]) -> float:
        before = spent(server, has_keeper=has_keeper)
        await load
        return 1e6 * (spent(server, has_keeper=has_keeper) - before)

    async with client_of(server.url) as client:
        few = await microseconds(streams_of(client, given, FEW_TOKENS))
        many = await microseconds(streams_of(client, given, given.tokens))
        requests = await microseconds(requests_of(client, given))
    num_tokens = given.streams * (given.tokens - FEW_TOKENS)
    return {"token": (many - few) / num_tokens, "request": requests / given.requests}


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    found: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in ("token", "request")}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = save_endless(folder / "model")
        flags = ("--model-id", str(model), "--hostname", "127.0.0.1", *given.flags)
        servers = {}
        for kept in (True, False):
            place = folder / str(kept)
            place.mkdir()
            paths = ("--shard-uds-path", str(place / "shard"), "--keeper", str(kept).lower())
            servers[kept] = stack.enter_context(serving(place, *flags, *paths))
        for turn in range(given.rounds + 1):
            for kept in (True, False) if turn % 2 else (False, True):
                for name, value in asyncio.run(costs(servers[kept], given, has_keeper=kept)).items():
                    if turn:  # the first one warms up
                        found[name][kept].append(value)
    result = {
        name: {
            "kept_us": spread(values[True], 3),
            "plain_us": spread(values[False], 3),
            "ratio": spread([a / b for a, b in zip(values[True], values[False], strict=True)], 3),
        }
        for name, values in found.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
