"""One key floods the server, another asks now and then, and hardly notices."""

import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any, Self

import httpx

from funitel_testing.clients import client_of
from funitel_testing.servers import Server

FLOODER, OTHER = {"authorization": "Bearer flooder"}, {"authorization": "Bearer other"}
# Small steps: a newcomer waits for the steps under way, at most two.
FLAGS = ("--max-batch-size", "8", "--max-concurrent-requests", "700", "--max-batch-total-tokens", "40000")


async def first_token(client: httpx.AsyncClient, prompt: str, num_tokens: int, key: dict[str, str]) -> float:
    """Seconds until the first token of a stream that is read to its end."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": num_tokens, "ignore_eos": True}}
    began, first = time.monotonic(), 0.0
    async with client.stream("POST", "/generate_stream", json=body, headers=key) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                assert "error" not in json.loads(line[5:]), line
                first = first or time.monotonic() - began
    return first


async def once_in_a_while(client: httpx.AsyncClient, count: int, pause: float, prompt: str, mark: str) -> list[float]:
    """Seconds to the first token of `count` requests, one every `pause` seconds."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(first_token(client, f"{mark} {number} {prompt}", 8, OTHER)))
        await asyncio.sleep(pause)
    return list(await asyncio.gather(*tasks))


class Flood:
    """A key that keeps `size` requests in the server: each that ends is followed by another.

    Its length is that of the `async with`, not a number of requests, so it outlasts a measurement on any machine.
    """

    def __init__(self, client: httpx.AsyncClient, size: int, prompt: str, num_tokens: int) -> None:
        self.client, self.size, self.prompt, self.num_tokens = client, size, prompt, num_tokens
        self.waited: list[float] = []
        self.is_over = False

    async def one_after_another(self, number: int) -> None:
        """Sends requests until the flood is over; reads the last one to its end."""
        for turn in itertools.count():
            prompt = f"flood {number} {turn} {self.prompt}"
            self.waited.append(await first_token(self.client, prompt, self.num_tokens, FLOODER))
            if self.is_over:
                return

    async def __aenter__(self) -> Self:
        self.tasks = [asyncio.create_task(self.one_after_another(number)) for number in range(self.size)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_over = True
        await asyncio.gather(*self.tasks)


async def test_a_flood_of_one_key_hardly_delays_another(
    launch: Any, tiny_model: Path, tmp_path: Path, is_full: bool, figures: dict[str, object]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("flooder\nother\n")
    size = 500 if is_full else 60
    num_tokens = 64 if is_full else 200
    prompt = "word and number " * (60 if is_full else 1)
    model = "smollm2-135m-instruct" if is_full else str(tiny_model)
    server: Server = launch("--model-id", model, "--api-key-file", str(keys), *FLAGS)
    count, pause = (20, 1.0) if is_full else (6, 0.2)
    async with client_of(server.url) as client:
        await once_in_a_while(client, 3, pause, prompt, "warm up")
        idle = await once_in_a_while(client, count, pause, prompt, "idle")
        async with Flood(client, size, prompt, num_tokens) as flood:
            await asyncio.sleep(1.0 if is_full else 0.2)
            busy = await once_in_a_while(client, count, pause, prompt, "busy")
    ratio = statistics.median(busy) / statistics.median(idle)
    figures["4.5 ms to the other key's first token, idle and beside the flood"] = (
        round(1e3 * statistics.median(idle)),
        round(1e3 * statistics.median(busy)),
    )
    figures["4.5 ratio, worst beside the flood in ms, flooder's own median in ms"] = (
        round(ratio, 2),
        round(1e3 * max(busy)),
        round(1e3 * statistics.median(flood.waited)),
    )
    assert statistics.median(busy) < statistics.median(flood.waited) / 2
    if is_full:
        assert ratio <= 2
