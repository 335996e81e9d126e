"""Clients that leave at any moment leave nothing behind."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.servers import Server

CLIENTS = 200
GONE = {
    'funitel_sequences{state="waiting"}': 0.0,
    'funitel_sequences{state="running"}': 0.0,
    'funitel_blocks{state="used"}': 0.0,
    "funitel_cached_batches": 0.0,
}


@pytest.mark.parametrize("model", ["tiny", "demo"])
async def test_two_hundred_clients_leave_nothing(
    model: str, launch: Any, tiny_model: Path, is_full: bool, figures: dict[str, object]
) -> None:
    count = CLIENTS if is_full or model == "tiny" else 40
    flags = ("--model-id", str(tiny_model)) if model == "tiny" else ("--max-batch-total-tokens", "40000")
    # All may be in flight at once: a router that was not scheduled for a second admits those that left meanwhile.
    server: Server = launch(*flags, "--max-concurrent-requests", str(count), "--max-batch-prefill-tokens", "256")
    dice = random.Random(5)
    async with client_of(server.url) as client:
        before = await generate(client, "the next request", max_new_tokens=12)
        gate = asyncio.Semaphore(48)

        async def visit(number: int) -> None:
            async with gate:
                await _leave_somehow(client, number, dice)

        await asyncio.gather(*(visit(number) for number in range(count)))
        held = await _settled(server)
        assert held == GONE
        after = await generate(client, "the next request", max_new_tokens=12)
        assert after.ids == before.ids
        # Were one of those that left still counted as in flight, one of these would be refused.
        await asyncio.gather(*(generate(client, "one token", max_new_tokens=1) for _ in range(count)))
    metrics = server.metrics()
    figures[f"6 clients that left, {model} model"] = (
        f"{count}, {int(metrics['funitel_cancelled_total'])} cancelled midway; left behind: {sum(held.values()):.0f}"
    )
    assert metrics["funitel_cancelled_total"] > count / 4


async def _leave_somehow(client: httpx.AsyncClient, number: int, dice: random.Random) -> None:
    """Stream or not, long prompt or short; gone after some tokens, at the headers, or after a moment."""
    prompt = f"Client {number} " + "talks and talks " * dice.choice([0, 3, 12])
    kind = dice.randrange(4)
    if kind == 0:
        await stream(client, prompt, leave_after=dice.randrange(1, 12), max_new_tokens=60)
    elif kind == 1:
        await stream(client, prompt, leave_after=0, max_new_tokens=60)
    else:
        call = stream if kind == 2 else generate
        task = asyncio.create_task(call(client, prompt, max_new_tokens=60))
        await asyncio.sleep(dice.random() * 0.4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _settled(server: Server) -> dict[str, float]:
    """What is held once it stops changing, at most five seconds later."""
    held: dict[str, float] = {}
    for _ in range(50):
        await asyncio.sleep(0.1)
        metrics = server.metrics()
        held = {name: metrics[name] for name in GONE}
        if held == GONE:
            break
    return held


async def test_a_client_that_left_is_in_no_later_step(launch: Any, tiny_model: Path) -> None:
    """With one stream running, a second one that hangs up stops adding rows at once."""
    server: Server = launch("--model-id", str(tiny_model), "--max-batch-prefill-tokens", "64")
    async with client_of(server.url) as client:
        running = asyncio.create_task(stream(client, "keep on", max_new_tokens=450))
        await asyncio.sleep(0.1)
        await stream(client, "and leave", leave_after=5, max_new_tokens=400)
        await asyncio.sleep(0.05)
        before = server.metrics()
        await asyncio.sleep(0.1)
        after = server.metrics()
        rows = after["funitel_forward_rows_sum"] - before["funitel_forward_rows_sum"]
        steps = after["funitel_steps_total"] - before["funitel_steps_total"]
        await running
    if steps:  # a fast machine may have finished the running stream by now
        assert rows == steps
