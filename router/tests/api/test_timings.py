"""`timings`: what an answer says of its own speed, where a client asks for it."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ROUTES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "x"}),
    ("/generate", {"inputs": "x"}),
    ("/generate_stream", {"inputs": "x"}),
)
NAMES = ["queue_seconds", "time_to_first_token_seconds", "total_seconds", "tokens_per_second"]


def asked(path: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return body | ({"parameters": fields} if path.startswith("/generate") else fields)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = [line[5:].strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check(timings: dict[str, Any]) -> None:
    """A script of five tokens with 20 ms before each."""
    assert list(timings) == NAMES
    assert 0 <= timings["queue_seconds"] < timings["time_to_first_token_seconds"]
    assert 0.02 <= timings["time_to_first_token_seconds"] < timings["total_seconds"] - 0.06
    inference = timings["total_seconds"] - timings["queue_seconds"]
    assert 5 / inference - 1e-3 <= timings["tokens_per_second"] <= 5 / 0.08


@pytest.mark.parametrize(("path", "body"), ROUTES[:3])
async def test_d19_a_whole_answer_says_its_timings(serve: Serve, path: str, body: dict[str, Any]) -> None:
    async with serve(FakeEngine(pause=0.02)) as client:
        answer = await client.post(path, json=asked(path, body, timings=True))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    timings = (found["details"] if path == "/generate" else found)["timings"]
    check(timings)
    assert answer.headers["x-time-to-first-token"] == str(round(timings["time_to_first_token_seconds"] * 1000))


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize(("path", "body"), ROUTES[:2])
async def test_d19_a_stream_says_them_in_its_last_chunk(
    serve: Serve, path: str, body: dict[str, Any], options: dict[str, Any] | None
) -> None:
    more = {} if options is None else {"stream_options": options}
    async with serve(FakeEngine(pause=0.02)) as client:
        *others, last = events(await client.post(path, json=body | more | {"stream": True, "timings": True}))
    assert last["choices"] == []
    assert (last["usage"] is not None) == (options is not None)
    check(last["timings"])
    assert not any("timings" in each for each in others)


async def test_d19_a_native_stream_says_them_in_its_details(serve: Serve) -> None:
    async with serve(FakeEngine(pause=0.02)) as client:
        found = events(await client.post("/generate_stream", json={"inputs": "x", "parameters": {"timings": True}}))
    *others, last = found
    assert [each["index"] for each in found] == [1, 2, 3, 4, 5]
    assert not any(each["details"] for each in others)
    assert last["generated_text"] == "Hello world!"
    check(last["details"]["timings"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_d19_answers_are_without_them_by_default(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], streams: bool
) -> None:
    more = {} if path.startswith("/generate") else {"stream": streams}
    for fields in ({}, {"timings": False}):
        answer = await client.post(path, json=asked(path, body, **fields) | more)
        assert answer.status_code == 200, answer.text
        assert "timings" not in answer.text


async def test_d19_an_answer_without_a_token_has_no_time_to_its_first(serve: Serve) -> None:
    async with serve(FakeEngine(pause=60)) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"timings": True}))

        async def runs() -> bool:
            return bool((await client.get("/v1/requests")).json()["data"])

        await eventually(runs, "it runs")
        (running,) = (await client.get("/v1/requests")).json()["data"]
        await client.delete(f"/v1/requests/{running['id']}")
        timings = (await asking).json()["timings"]
    assert (timings["time_to_first_token_seconds"], timings["tokens_per_second"]) == (None, None)
