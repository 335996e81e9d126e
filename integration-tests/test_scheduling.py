"""A pool that is too small fails nobody and stays full; long prompts and running streams share the machine."""

import asyncio
import random
import re
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import Server, samples_of
from funitel_testing.tiny import save_tiny

BLOCK = 16
FLOOR = 4  # tokens by which a prompt advances under a target that cannot be held
IMPOSSIBLE = ("--target-itl-ms", "0.001")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose context is larger than the pool."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


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


async def test_prompts_advance_under_a_target_that_cannot_be_held(launch: Any, model: Path) -> None:
    server: Server = launch("--model-id", str(model), "--max-batch-total-tokens", "65536", *IMPOSSIBLE)
    async with client_of(server.url) as client, eight_streams(client, 5, count=1):
        before = server.metrics()
        answer = await stream(client, "y" * 800, max_new_tokens=2)
        after = server.metrics()
    assert len(answer.ids) == 2
    steps = after["funitel_steps_total"] - before["funitel_steps_total"]
    assert steps >= 800 / FLOOR, "more than the least was computed although the target was missed by far"
    told = [line for line in server.log.read_text().splitlines() if "--target-itl-ms 0.001 cannot be held" in line]
    assert len(told) == 1
    assert f"prompts advance by {FLOOR} tokens a step" in told[0]


# One quarter of the pool ----------------------------------------------------------------------------------------------


async def quarter_of_the_pool(
    launch: Any, flags: tuple[str, ...], longest: int, name: str, figures: dict[str, object]
) -> Server:
    """64 requests with all the memory they want, then with a quarter; returns the server with the small pool."""
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
    assert statistics.mean(filled) > 0.9
    return small


async def test_a_quarter_of_the_pool_is_enough(
    launch: Any, model: Path, is_full: bool, figures: dict[str, object]
) -> None:
    small = await quarter_of_the_pool(launch, ("--model-id", str(model)), 160, "tiny model", figures)
    await what_cannot_fit_is_refused(small)


async def test_a_quarter_of_the_pool_is_enough_for_the_demo_model(
    launch: Any, is_full: bool, figures: dict[str, object]
) -> None:
    if not is_full:
        pytest.skip("the long form of the test above")
    await quarter_of_the_pool(launch, (), 240, "demo model", figures)


async def what_cannot_fit_is_refused(server: Server) -> None:
    """A request larger than the pool is refused by every route, with both numbers; one that just fits is served."""
    async with client_of(server.url) as client:
        pool = (await client.get("/info")).json()["max_total_tokens"]
        prompt, most = "x" * (pool - 100), 101
        message = [{"role": "user", "content": prompt}]
        native = {"inputs": prompt, "parameters": {"max_new_tokens": most}}
        bodies: dict[str, Any] = {
            "/": native,
            "/generate": native,
            "/generate_stream": native,
            "/v1/completions": {"prompt": prompt, "max_tokens": most},
            "/v1/chat/completions": {"messages": message, "max_tokens": most},
            "/v1/responses": {"input": prompt, "max_output_tokens": most},
            "/v1/messages": {"model": "any", "messages": message, "max_tokens": most},
            "/invocations": native,
            "/vertex": {"instances": [{"messages": message, "max_tokens": most}]},
        }
        for path, body in bodies.items():
            answer = await client.post(path, json=body)
            assert answer.status_code in (400, 422), (path, answer.status_code, answer.text)
            numbers = rf"must be <= {pool}\. Given: (\d+) `\w+` tokens and {most} `"
            given = re.search(numbers, answer.text)
            assert given is not None, (path, answer.text)
            assert int(given[1]) >= len(prompt)
        fits = await generate(client, prompt, max_new_tokens=100, ignore_eos=True)
        assert len(fits.ids) == 100
        assert server.metrics()["tgi_queue_size"] == 0


# Long prompts beside streams ------------------------------------------------------------------------------------------


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


async def beside_streams(server: Server, num_tokens: int) -> dict[str, float]:
    """Time of a long prompt alone and among 8 streams, and gaps of the same tokens of the streams without and with it.

    The same tokens, for streams become slower as they grow, and a long prompt lasts for hundreds of tokens. In ms.
    """
    async with client_of(server.url) as client:
        await stream(client, long_prompt(0, num_tokens), max_new_tokens=1)  # a server's first long prompt learns
        alone = await stream(client, long_prompt(1, num_tokens), max_new_tokens=1)
        async with eight_streams(client, 50) as streams:
            first = [len(instants) for instants in streams]
            beside = await stream(client, long_prompt(2, num_tokens), max_new_tokens=1)
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


async def test_a_long_prompt_among_eight_streams(launch: Any, is_full: bool, figures: dict[str, object]) -> None:
    """The default keeps both promises; a tighter and a looser target move the balance to either side."""
    if not is_full:
        pytest.skip("measures; the mechanism is tested above and in router/tests/scheduler/cost/test_step_cost.py")
    table: dict[str, dict[str, float]] = {}
    server: Server = launch("--max-batch-total-tokens", "48000")
    table["default"] = await beside_streams(server, 7000)
    usual = table["default"]["gap p50 without"]
    for factor in (1.6, 5.0):
        target = round(factor * usual)
        server = launch("--max-batch-total-tokens", "48000", "--target-itl-ms", str(target))
        table[f"--target-itl-ms {target}"] = await beside_streams(server, 7000)
    for setting, row in table.items():
        figures[f"4.3 {setting}"] = ", ".join(f"{name} {value:.2f}" for name, value in row.items())
    tight, loose = (table[name] for name in list(table)[1:])
    assert table["default"]["p99 ratio"] < 3
    assert table["default"]["first token ratio"] < 3
    assert tight["gap p50 with"] < table["default"]["gap p50 with"] < loose["gap p50 with"]
    assert tight["first token beside"] > table["default"]["first token beside"] > loose["first token beside"]
