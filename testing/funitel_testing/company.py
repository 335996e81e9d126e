"""Background load for tests: requests that keep joining and leaving while a test sends its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from funitel_testing.clients import stream


@asynccontextmanager
async def in_company(client: httpx.AsyncClient, strangers: int) -> AsyncIterator[None]:
    """Keep a server busy for the length of a block; fail if one of the strangers failed."""
    busy = asyncio.create_task(_company(client, strangers))
    try:
        yield
    finally:
        busy.cancel()
        (ended,) = await asyncio.gather(busy, return_exceptions=True)
    if not isinstance(ended, asyncio.CancelledError):
        raise ended  # with what is in the group


async def _company(client: httpx.AsyncClient, strangers: int) -> None:
    """Some finish, some hang up, sampled and greedy, short and long."""

    async def one(number: int) -> None:
        round_number = 0
        while True:
            round_number += 1
            prompt = f"Visitor {number} says, in round {round_number}: " + "and so on " * (7 * number % 40)
            leave = 3 + number if number % 3 == 0 else None
            await stream(
                client, prompt, leave_after=leave, max_new_tokens=5 + 2 * number, do_sample=number % 2 == 0, seed=number
            )

    async with asyncio.TaskGroup() as group:
        for number in range(strangers):
            group.create_task(one(number))
