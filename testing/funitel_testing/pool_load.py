"""Load that a pool is too small for, and long prompts beside running streams: what is asked, and what is measured."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import Server, samples_of

BLOCK = 16
IMPOSSIBLE = ("--target-itl-ms", "0.001")


def asked_of(number: int, longest: int) -> tuple[str, dict[str, Any]]:
    """A prompt and its parameters; every other one is sampled."""
    source = random.Random(number)
    prompt = "".join(source.choice("abcdefgh ") for _ in range(source.randint(20, 60)))
    how: dict[str, Any] = {"max_new_tokens": source.randint(longest // 2, longest)}
    if number % 2:
        how |= {"do_sample": True, "seed": number, "temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.1}
    return prompt, how


async def answers_to(client: httpx.AsyncClient, asked: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    return await asyncio.gather(*(generate(client, prompt, **how) for prompt, how in asked))


def blocks(metrics: dict[str, float], state: str) -> float:
    return metrics[f'funitel_blocks{{state="{state}"}}']


@asynccontextmanager
async def watching(client: httpx.AsyncClient) -> AsyncIterator[list[tuple[float, float]]]:
    """Samples of (share of the pool in use, waiting sequences), taken while the `with` lasts."""
    samples: list[tuple[float, float]] = []

    async def watch() -> None:
        while True:
            metrics = samples_of((await client.get("/metrics")).text)
            used, free = blocks(metrics, "used"), blocks(metrics, "free")
            samples.append((used / (used + free), metrics["tgi_queue_size"]))
            await asyncio.sleep(0.01)

    watcher = asyncio.create_task(watch())
    try:
        yield samples
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def quarter_of_the_pool(
    launch: Any, flags: tuple[str, ...], longest: int, name: str, figures: dict[str, object], least_use: float = 0.9
) -> Server:
    """64 requests with all the memory they want, then with a quarter; returns the server with the small pool.

    While sequences wait, more than `least_use` of that is used, on average since it was full first.
    """
    asked = [asked_of(number, longest) for number in range(64)]
    plenty: Server = launch(*flags, "--max-batch-total-tokens", "65536", *IMPOSSIBLE)
    async with client_of(plenty.url) as client:
        counted = [await client.post("/tokenize", json={"inputs": prompt}) for prompt, _ in asked]
        expected = await answers_to(client, asked)
    assert plenty.metrics()["funitel_preempted_total"] == 0
    wanted = sum(len(tokens.json()) + how["max_new_tokens"] for tokens, (_, how) in zip(counted, asked, strict=True))
    pool = wanted // 4 // BLOCK * BLOCK
    small: Server = launch(*flags, "--max-batch-total-tokens", str(pool))
    async with client_of(small.url) as client, watching(client) as samples:
        began = time.monotonic()
        found = await answers_to(client, asked)
        seconds = time.monotonic() - began
    metrics = small.metrics()
    assert [(a.ids, a.text, a.finish_reason) for a in found] == [(a.ids, a.text, a.finish_reason) for a in expected]
    assert metrics["funitel_preempted_total"] > 0, "the pool was large enough"
    computed = sum(len(answer.ids) for answer in found)
    full = next(i for i, (share, _) in enumerate(samples) if share > 0.9)
    waiting = [share for share, num_waiting in samples if num_waiting]
    filled = [share for share, num_waiting in samples[full:] if num_waiting]
    figures[f"4.1 {name}: tokens wanted, pool"] = [wanted, pool]
    figures[f"4.1 {name}: mean pool use while sequences wait, and since it first was full"] = [
        round(statistics.mean(waiting), 3),
        round(statistics.mean(filled), 3),
    ]
    figures[f"4.1 {name}: lowest of those, samples, seconds"] = [round(min(filled), 3), len(filled), round(seconds, 1)]
    figures[f"4.1 {name}: preempted, tokens computed again, completion tokens"] = [
        metrics["funitel_preempted_total"],
        metrics["funitel_recomputed_tokens_total"],
        computed,
    ]
    assert len(filled) >= 5, "too few samples to say anything"
    assert statistics.mean(filled) > least_use
    return small


@asynccontextmanager
async def eight_streams(client: httpx.AsyncClient, num_tokens: int, count: int = 8) -> AsyncIterator[list[list[float]]]:
    """Streams that run while the `with` lasts, each of them `num_tokens` tokens long when it begins: their instants."""
    streams: list[list[float]] = [[] for _ in range(count)]
    tasks = [asyncio.create_task(endless(client, i, instants)) for i, instants in enumerate(streams)]
    try:
        while min(map(len, streams)) < num_tokens:
            assert not any(task.done() for task in tasks), "a stream has ended"
            await asyncio.sleep(0.01)
        yield streams
        assert not any(task.done() for task in tasks), "a stream has ended before the prompt was answered"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def endless(client: httpx.AsyncClient, number: int, instants: list[float]) -> None:
    """A stream that outlasts the prompt beside it; notes when each token came."""
    how = {"max_new_tokens": 8000, "ignore_eos": True}
    body = {"inputs": f"Stream {number}: once upon a time", "parameters": how}
    async with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                instants.append(time.monotonic())


def gaps_of(streams: list[list[float]], indices: list[tuple[int, int]]) -> list[float]:
    """Gaps before the tokens of each stream from one index to another."""
    return [
        now - before
        for instants, (first, end) in zip(streams, indices, strict=True)
        for before, now in zip(instants[first - 1 :], instants[first:end], strict=False)
    ]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def long_prompt(number: int, num_tokens: int) -> str:
    """Some `num_tokens` tokens of the demo model that begin like no other number's."""
    return f"{number} " + "word and number " * (num_tokens // 3)


async def beside_streams(
    server: Server, num_tokens: int, make_prompt: Callable[[int, int], str] = long_prompt
) -> dict[str, float]:
    """Time of a long prompt alone and among 8 streams, and gaps of the same tokens of the streams without and with it.

    The same tokens, for streams become slower as they grow, and a long prompt lasts for hundreds of tokens. In ms.
    `make_prompt` takes a number that no other prompt has, and `num_tokens`.
    """
    async with client_of(server.url) as client:
        await stream(client, make_prompt(0, num_tokens), max_new_tokens=1)  # a server's first long prompt learns
        alone = await stream(client, make_prompt(1, num_tokens), max_new_tokens=1)
        async with eight_streams(client, 50) as streams:
            first = [len(instants) for instants in streams]
            beside = await stream(client, make_prompt(2, num_tokens), max_new_tokens=1)
            indices = [(begin, len(instants)) for begin, instants in zip(first, streams, strict=True)]
        during = gaps_of(streams, indices)
        async with eight_streams(client, max(end for _, end in indices)) as streams:
            pass
        without = gaps_of(streams, indices)
    first_alone, first_beside = alone.instants[0] - alone.began, beside.instants[0] - beside.began
    return {
        "gap p50 without": 1e3 * statistics.median(without),
        "gap p99 without": 1e3 * percentile(without, 0.99),
        "gap p50 with": 1e3 * statistics.median(during),
        "gap p99 with": 1e3 * percentile(during, 0.99),
        "p99 ratio": percentile(during, 0.99) / percentile(without, 0.99),
        "first token alone": 1e3 * first_alone,
        "first token beside": 1e3 * first_beside,
        "first token ratio": first_beside / first_alone,
    }
