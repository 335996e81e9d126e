"""`truncation: auto` drops as few of the first turns as it must."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve

from funitel.proto.errors import ContextTooLong
from funitel.router.api.responses.schema_request import Item, MessageItem
from funitel.router.api.responses.truncation import Shortened, prepare_longest


def turn(number: int) -> list[dict[str, Any]]:
    return [
        {"type": "message", "role": "user", "content": f"Q{number} {'x' * 12}"},
        {"type": "message", "role": "assistant", "content": f"A{number}"},
    ]


CONVERSATION = [
    {"type": "message", "role": "system", "content": "Be brief."},
    *(item for number in range(8) for item in turn(number)),
    {"type": "message", "role": "user", "content": "Last"},
]


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/responses", json={"input": CONVERSATION, "max_output_tokens": 3} | fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_b7_the_first_turns_are_dropped(serve: Serve, stream: bool) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        refused = await ask(client)
        response = await ask(client, truncation="auto", stream=stream)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert response.status_code == 200
        if not stream:
            answer = response.json()
            assert answer["truncation"] == "auto"
            items = await client.get(f"/v1/responses/{answer['id']}/input_items", params={"limit": 100})
            assert len(items.json()["data"]) == len(CONVERSATION), "what is stored is whole"
    (request,) = engine.requests
    prompt = request.inputs
    assert prompt.startswith("[system]Be brief.\n[user]Q")
    assert prompt.endswith("[user]Last\n[assistant]")
    dropped = len("[user]Q0 xxxxxxxxxxxx\n[assistant]A0\n")
    assert 97 - dropped < len(request.input_ids) <= 97, "one more turn would not fit"


async def test_b7_what_never_fits_is_refused(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        response = await client.post("/v1/responses", json={"input": "x" * 300, "truncation": "auto"})
    assert response.status_code == 400


@pytest.mark.parametrize("fitting", range(1, 40))
async def test_b7_few_tries_find_the_longest_that_fits(fitting: int) -> None:
    tries = []

    async def prepare(items: Any) -> int:
        tries.append(len(items))
        if len(items) > fitting:
            raise ContextTooLong("too long")
        return len(items)

    conversations: Any = [["item"] * length for length in range(40, 0, -1)]
    assert await prepare_longest(conversations, prepare) == fitting
    assert len(tries) <= 8


async def test_many_short_turns_are_not_held_in_every_length() -> None:
    """Lists of all lengths of 64,000 turns, which fit into a body, would take 16 GB."""
    items = [MessageItem(role="user", content=[])] * 4000

    async def prepare(left: Sequence[Item]) -> int:
        if len(left) > 2000:
            raise ContextTooLong("too long")
        return len(left)

    tracemalloc.start()
    try:
        assert await prepare_longest(Shortened(items), prepare) == 2000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
