"""Measure what the keeper costs: microseconds of the router's processor time for a token and for a request.

Two servers of the demo model, one with the keeper and one without, are asked in alternation: streams of many tokens,
then requests of one token. The processor time is that of the router and of the keeper together. A figure is the median
over rounds, with the smallest and the largest. The last line is one JSON object.

    python benchmarks/takeover.py [--streams 16] [--tokens 400] [--requests 400] [--rounds 5] [-- FLAGS]
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from funitel_testing.clients import client_of, stream
from funitel_testing.faults.model import save_endless
from funitel_testing.figures import spread
from funitel_testing.servers import Server, cpu_seconds, serving


def spent(server: Server, *, has_keeper: bool) -> float:
    """Processor time of the router, and of the keeper, in seconds."""
    return cpu_seconds(server.router_pid()) + (cpu_seconds(server.keeper_pid()) if has_keeper else 0.0)


async def many_tokens(client: httpx.AsyncClient, given: argparse.Namespace) -> int:
    """Streams side by side; returns the number of tokens."""
    limits = {"max_new_tokens": given.tokens, "ignore_eos_token": True}
    await asyncio.gather(*(stream(client, f"stream {place}", **limits) for place in range(given.streams)))
    return int(given.streams * given.tokens)


async def many_requests(client: httpx.AsyncClient, given: argparse.Namespace) -> int:
    """Requests of one token, so many at once; returns their number."""
    left = iter(range(given.requests))

    async def ask() -> None:
        for place in left:
            await stream(client, f"request {place}", max_new_tokens=1)

    await asyncio.gather(*(ask() for _ in range(given.streams)))
    return int(given.requests)


Load = Callable[[httpx.AsyncClient, argparse.Namespace], Coroutine[Any, Any, int]]


async def cost(server: Server, load: Load, given: argparse.Namespace, *, has_keeper: bool) -> float:
    """Microseconds of one token or request."""
    async with client_of(server.url) as client:
        before = spent(server, has_keeper=has_keeper)
        count = await load(client, given)
        return 1e6 * (spent(server, has_keeper=has_keeper) - before) / count


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    loads: dict[str, Load] = {"token": many_tokens, "request": many_requests}
    found: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in loads}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
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
                for load, run in loads.items():
                    value = asyncio.run(cost(servers[kept], run, given, has_keeper=kept))
                    if turn:
                        found[load][kept].append(value)
    result = {
        load: {
            "kept_us": spread(values[True], 3),
            "plain_us": spread(values[False], 3),
            "ratio": spread([a / b for a, b in zip(values[True], values[False], strict=True)], 3),
        }
        for load, values in found.items()
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
