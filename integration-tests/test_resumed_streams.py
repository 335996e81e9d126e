"""Clients of every API lose their connections at random bytes, follow their streams again, and have lost nothing."""

import asyncio
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import client_of
from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import ALIKE, LIMITS
from funitel_testing.servers import Server, serving
from funitel_testing.takeovers.asks import ASKS, RawAsk, comparable
from funitel_testing.takeovers.raw import RawAnswer

STREAMED = [ask for ask in ASKS if "whole" not in ask.name]
NUM_TOKENS = 120
MAX_READ = 6000  # bytes that a client reads before its connection is lost
RESUME = {"x-resume-seconds": "30"}
LEFT = {
    'funitel_sequences{state="waiting"}': 0.0,
    'funitel_sequences{state="running"}': 0.0,
    'funitel_blocks{state="used"}': 0.0,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("resumed")
    model = save_endless(folder / "model")
    with serving(folder, "--model-id", str(model), *LIMITS, *ALIKE) as server:
        yield server


@dataclass
class Followed:
    """The events of one stream, as its client has put them together, and how often it lost them."""

    events: list[bytes] = field(default_factory=list)
    num_losses: int = 0
    is_whole: bool = False

    async def read(self, answer: httpx.Response, most: int) -> None:
        """Read at most so many bytes; an event that was not received to its end is none."""
        received = b""
        async for data in answer.aiter_bytes():
            received += data[: most - len(received)]
            if len(received) == most:
                break
        else:
            self.is_whole = True
        *whole, rest = received.split(b"\n\n")
        assert not self.is_whole or not rest
        for event in whole:
            number, _, content = event.partition(b"\n")
            if event != b":":
                self.events.append(content)
                assert number == b"id: %d" % len(self.events), event

    @property
    def comparable(self) -> list[bytes]:
        return comparable(RawAnswer(head=b"", chunks=self.events))[1]


async def undisturbed(client: httpx.AsyncClient, ask: RawAsk, number: int) -> Followed:
    route, body = ask.make(number, NUM_TOKENS)
    found = Followed()
    async with client.stream("POST", route, json=body, headers=RESUME) as answer:
        assert answer.status_code == 200, await answer.aread()
        await found.read(answer, 1 << 30)
    return found


async def disturbed(client: httpx.AsyncClient, ask: RawAsk, number: int, dice: random.Random) -> Followed:
    route, body = ask.make(number, NUM_TOKENS)
    found, name = Followed(), f"{ask.name}, {number}".replace(" ", "-").replace(",", "")
    asking = client.stream("POST", route, json=body, headers=RESUME | {"x-request-id": name})
    while not found.is_whole:
        async with asking as answer:
            if answer.status_code == 204:  # the last event was the last byte that it got
                break
            assert answer.status_code == 200, await answer.aread()
            await found.read(answer, dice.choice([0, dice.randrange(MAX_READ)]))
        found.num_losses += not found.is_whole
        await asyncio.sleep(dice.choice([0, dice.random() / 10]))
        how: dict[str, Any] = {"params": {"after": len(found.events)}}
        if dice.random() < 0.5:
            how = {"headers": {"last-event-id": str(len(found.events))}}
        asking = client.stream("GET", f"/v1/requests/{name}/stream", **how)
    return found


async def test_streams_that_are_lost_at_random_are_whole(
    server: Server, is_full: bool, figures: dict[str, object]
) -> None:
    numbers = range(8 if is_full else 2)
    asks = [(ask, number) for ask in STREAMED for number in numbers]
    async with client_of(server.url) as client:
        expected = await asyncio.gather(*(undisturbed(client, *each) for each in asks))
        before = server.metrics()
        found = await asyncio.gather(
            *(disturbed(client, *each, random.Random(place)) for place, each in enumerate(asks))
        )
        after = server.metrics()
    for (ask, number), one, other in zip(asks, expected, found, strict=True):
        assert other.comparable == one.comparable, f"{ask.name} {number}, lost {other.num_losses} times"
    num_losses = sum(each.num_losses for each in found)
    assert num_losses > 2 * len(asks)
    assert after["funitel_cancelled_total"] == before["funitel_cancelled_total"], "none ended with its client"
    figures["streams followed again"] = f"{len(asks)}, connections lost: {num_losses}, bytes lost: 0"


async def test_a_stream_that_is_not_followed_leaves_nothing(server: Server) -> None:
    async with client_of(server.url) as client:
        for ask in STREAMED:
            route, body = ask.make(1, 400)
            name = re.sub(r"\W+", "-", ask.name)
            headers = {"x-resume-seconds": "1", "x-request-id": name}
            async with client.stream("POST", route, json=body, headers=headers) as answer:
                assert answer.status_code == 200, await answer.aread()
        held: dict[str, float] = {}
        for _ in range(100):
            held = {name: server.metrics()[name] for name in LEFT}
            if held == LEFT:
                break
            await asyncio.sleep(0.1)
        assert held == LEFT
        assert (await client.get("/v1/requests")).json()["data"] == []
