"""Responses in the background, and the events of stored responses, streamed again from any number on."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import ShardFailed
from funitel.router.api.responses.event_log import EventLog

RESPONSES = "/v1/responses"
TEXT = "Hello world!"
STILL = 0.01  # seconds between two steps: there is time to ask meanwhile


def parsed(text: str) -> list[Any]:
    return [json.loads(frame.partition("data: ")[2]) for frame in text.split("\n\n")[:-1] if "data: " in frame]


async def posted(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(RESPONSES, json={"input": "Hi", "background": True} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, id: str, **params: Any) -> list[Any]:
    response = await client.get(f"{RESPONSES}/{id}", params={"stream": "true"} | params)
    assert response.status_code == 200, response.text
    return parsed(response.text)


async def ended(client: httpx.AsyncClient, id: str) -> Any:
    found: dict[str, Any] = {}

    async def has_ended() -> bool:
        found.update((await client.get(f"{RESPONSES}/{id}")).json())
        return found["status"] not in ("queued", "in_progress")

    await eventually(has_ended, "the end")
    return found


async def test_b7_a_response_in_the_background(serve: Serve) -> None:
    async with serve(FakeEngine(pause=STILL)) as client:
        begun = await posted(client)
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        seen = set()

        async def has_ended() -> bool:
            seen.add((await client.get(f"{RESPONSES}/{begun['id']}")).json()["status"])
            return "completed" in seen

        await eventually(has_ended, "completed")
        assert seen <= {"queued", "in_progress", "completed"}
        answer = await ended(client, begun["id"])
        assert answer["output"][0]["content"][0]["text"] == TEXT
        assert answer["usage"]["output_tokens"] == 5
        follow = await client.post(RESPONSES, json={"input": "And?", "previous_response_id": begun["id"]})
        assert follow.status_code == 200


async def test_b7_its_events_are_those_of_a_stream(serve: Serve) -> None:
    async with serve(FakeEngine(pause=STILL)) as client:
        begun = await posted(client)
        live = await events(client, begun["id"])  # while it runs
        again = await events(client, begun["id"])
        rest = await events(client, begun["id"], starting_after=4)
        none = await events(client, begun["id"], starting_after=10_000)
    assert live == again
    assert [event["sequence_number"] for event in live] == list(range(len(live)))
    assert [event["type"] for event in live[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in live[:3]] == ["queued", "queued", "in_progress"]
    assert live[-1]["type"] == "response.completed"
    assert "".join(event["delta"] for event in live if event["type"].endswith("text.delta")) == TEXT
    assert rest == live[5:]
    assert none == []


async def test_b7_a_stream_in_the_background_outlives_its_client(
    listening: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.pause = 0.05
    fields = {"input": "Hi", "background": True, "stream": True}
    received = ""
    async with listening.stream("POST", RESPONSES, json=fields) as response:
        async for chunk in response.aiter_text():
            received += chunk
            if "response.in_progress" in received and received.endswith("\n\n"):
                break
    first = parsed(received)
    id = first[0]["response"]["id"]
    rest = await events(listening, id, starting_after=first[-1]["sequence_number"])
    assert not engine.cancelled
    assert [event["sequence_number"] for event in first + rest] == list(range(len(first + rest)))
    assert rest[-1]["type"] == "response.completed"


async def test_b7_a_response_is_cancelled(serve: Serve) -> None:
    engine = FakeEngine(pause=60)
    async with serve(engine) as client:
        begun = await posted(client)
        early = await client.post(RESPONSES, json={"input": "And?", "previous_response_id": begun["id"]})
        assert early.status_code == 400
        assert "has not ended" in early.json()["error"]["message"]
        following = asyncio.create_task(events(client, begun["id"]))
        await asyncio.sleep(0)
        for _ in range(2):
            cancelled = await client.post(f"{RESPONSES}/{begun['id']}/cancel")
            assert cancelled.status_code == 200
            assert cancelled.json()["status"] == "cancelled"
        assert len(engine.cancelled) == 1
        assert [event["type"] for event in await following] == ["response.created", "response.queued"]
        assert (await client.get(f"{RESPONSES}/{begun['id']}")).json()["status"] == "cancelled"
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_b7_what_has_ended_is_not_changed_by_a_cancel(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        begun = await posted(client)
        answer = await ended(client, begun["id"])
        assert (await client.post(f"{RESPONSES}/{begun['id']}/cancel")).json() == answer


async def test_b7_deleting_a_response_ends_it(serve: Serve) -> None:
    engine = FakeEngine(pause=60)
    async with serve(engine) as client:
        begun = await posted(client)
        assert (await client.delete(f"{RESPONSES}/{begun['id']}")).json()["deleted"] is True
        await eventually(engine.was_cancelled, "cancel")
        assert (await client.get(f"{RESPONSES}/{begun['id']}")).status_code == 404


async def test_b7_a_failure_in_the_background(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"), fails_at=1, pause=STILL)) as client:
        begun = await posted(client)
        failed = await ended(client, begun["id"])
        assert failed["status"] == "failed"
        assert "rank 1 died" in failed["error"]["message"]
        assert (await events(client, begun["id"]))[-1]["type"] == "response.failed"


async def test_b7_wrong_requests_are_refused_at_once(serve: Serve) -> None:
    engine = FakeEngine(pause=60, max_requests=1)
    async with serve(engine) as client:
        wrong = await client.post(RESPONSES, json={"input": "x" * 500, "background": True})
        assert wrong.status_code == 400
        await posted(client)
        full = await client.post(RESPONSES, json={"input": "Hi", "background": True})
        assert full.status_code == 429


async def test_b7_it_counts_as_a_request_of_its_key(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    digest = hashlib.sha256(b"secret-of-a").hexdigest()
    keys.write_text(json.dumps({"name": "a", "sha256": digest, "max_concurrent_requests": 1}) + "\n")
    async with serve(FakeEngine(pause=60), api_key_file=str(keys)) as client:
        client.headers["authorization"] = "Bearer secret-of-a"
        begun = await posted(client)
        assert (await client.post(RESPONSES, json={"input": "Hi", "background": True})).status_code == 429
        assert begun["status"] == "queued"


@pytest.mark.parametrize("stream", [False, True])
async def test_b7_every_stored_response_can_be_streamed(client: httpx.AsyncClient, stream: bool) -> None:
    response = await client.post(RESPONSES, json={"input": "Hi", "stream": stream})
    sent = parsed(response.text) if stream else []
    id = sent[0]["response"]["id"] if stream else response.json()["id"]
    again = await events(client, id)
    if stream:
        assert again == sent
    assert "".join(event["delta"] for event in again if event["type"].endswith("text.delta")) == TEXT
    assert again[-1]["response"] == (await client.get(f"{RESPONSES}/{id}")).json()
    assert await events(client, id, starting_after=len(again) - 2) == again[-1:]


@pytest.mark.parametrize(
    ("params", "param"),
    [({"starting_after": "1"}, "starting_after"), ({"stream": "true", "starting_after": "-1"}, "starting_after")]
    + [({"stream": "perhaps"}, "stream")],
)
async def test_b7_what_cannot_be_retrieved(client: httpx.AsyncClient, params: Any, param: str) -> None:
    id = (await client.post(RESPONSES, json={"input": "Hi"})).json()["id"]
    response = await client.get(f"{RESPONSES}/{id}", params=params)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_b7_events_are_kept_small_and_whole() -> None:
    log, frames = EventLog(), [b'event: x\ndata: {"delta":"%d"}\n\n' % number for number in range(1000)]
    for frame in frames:
        log.add(frame)
    log.end()
    log.end()
    sent: list[Any] = []
    await log.follow(-1, sent.append)
    assert sent == frames
    assert log.num_bytes < sum(map(len, frames)) / 3
