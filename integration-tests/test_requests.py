"""Requests of a running server that are listed, paused, resumed and aborted over HTTP, on one replica and on two."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import client_of
from funitel_testing.servers import Server

GONE = {
    'funitel_sequences{state="waiting"}': 0.0,
    'funitel_sequences{state="running"}': 0.0,
    'funitel_blocks{state="used"}': 0.0,
    "funitel_cached_batches": 0.0,
}
NUM_REQUESTS = 80


def body_of(number: int) -> dict[str, Any]:
    sampled = {"temperature": 0} if number % 2 else {"seed": number, "temperature": 1.1}
    prompt = f"{'many words ' * (number % 5)}{number % 9}"
    return {"prompt": prompt, "max_tokens": 100 + number % 60, "ignore_eos": True, "stream": True, **sampled}


async def ask(client: httpx.AsyncClient, number: int, **headers: str) -> tuple[str, str]:
    """The text of a streamed completion, and why it ended."""
    text, reason = "", ""
    async with client.stream("POST", "/v1/completions", json=body_of(number), headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
    return text, reason


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_requests_disturbed_at_random_leave_nothing(launch: Any, tiny_model: Path, num_replicas: int) -> None:
    flags = ("--model-id", str(tiny_model), "--max-batch-total-tokens", "2000", "--max-concurrent-requests", "128")
    server: Server = launch(*flags, "--num-replicas", str(num_replicas))
    dice = random.Random(7)
    async with client_of(server.url) as client:
        expected = await asyncio.gather(*(ask(client, number) for number in range(NUM_REQUESTS)))
        aborted: set[str] = set()
        counts = dict.fromkeys(("pause", "resume", "abort", "missing"), 0)

        async def disturb() -> None:
            while True:
                answer = await client.get("/v1/requests")
                for found in dice.sample(answer.json()["data"], k=min(4, len(answer.json()["data"]))):
                    url = f"/v1/requests/{dice.choice([found['id'], found['response_id']])}"
                    if found["state"] == "paused":
                        done, name = await client.post(f"{url}/resume"), "resume"
                    elif int(found["id"].removeprefix("r")) % 5 == 0 and dice.random() < 0.5:
                        done, name = await client.delete(url), "abort"
                        aborted.add(found["id"])
                    else:
                        done, name = await client.post(f"{url}/pause"), "pause"
                    assert done.status_code in (200, 404), done.text
                    counts[name if done.status_code == 200 else "missing"] += 1
                await asyncio.sleep(0.001)

        for _ in range(10):  # a fast machine may answer before there is a pause, a resume and an abort
            if all(counts[name] for name in ("pause", "resume", "abort")):
                break
            aborted.clear()
            disturbing = asyncio.create_task(disturb())
            asking = [ask(client, number, **{"x-request-id": f"r{number}"}) for number in range(NUM_REQUESTS)]
            answered = await asyncio.wait_for(asyncio.gather(*asking), 120)
            assert not disturbing.done() or disturbing.exception() is None
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
            for number, ((text, reason), (whole, end)) in enumerate(zip(answered, expected, strict=True)):
                if reason == "abort":
                    assert f"r{number}" in aborted
                    assert whole.startswith(text.rstrip("\ufffd"))
                else:
                    assert (text, reason) == (whole, end)
        assert all(counts[name] for name in ("pause", "resume", "abort")), counts
        held: dict[str, float] = {}
        for _ in range(50):
            metrics = server.metrics()
            held = {name: metrics[name] for name in GONE}
            if held == GONE:
                break
            await asyncio.sleep(0.1)
        assert held == GONE
        assert (await client.get("/v1/requests")).json()["data"] == []
