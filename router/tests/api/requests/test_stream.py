"""Streams of every API that are left and followed again, over real sockets and an engine that follows a script."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually
from sockets import served
from starlette.applications import Starlette

from funitel.proto.errors import StepFailed
from funitel.router.app import build_app
from funitel.router.settings import RouterSettings

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50, "stream": True}
PIECES = tuple(f"word{number} " for number in range(12))
RESUMABLE = {"x-resume-seconds": "60", "x-request-id": "mine"}
URL = "/v1/requests/mine/stream"
APIS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate_stream", {"inputs": "x", "parameters": {"details": True, "max_new_tokens": 50}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 50, "stream": True}),
    ("/v1/messages", {**CHAT, "model": "m"}),
    ("/v1/responses", {"input": "x", "stream": True}),
    ("/v1/responses", {"input": "x", "stream": True, "background": True}),
    ("/invocations", CHAT),
)
_DRAWN = re.compile(r'(?<=_)[0-9a-f]{20,}|(?<=-)[0-9a-f]{20,}|"(created|created_at|completed_at)":\d+')

Listen = Callable[..., AbstractAsyncContextManager[tuple[httpx.AsyncClient, Starlette]]]


@pytest.fixture
def listen(model: Path) -> Listen:
    """`async with listen(engine, **settings) as (client, app)`: the application on a socket, ready."""

    @asynccontextmanager
    async def listening(engine: FakeEngine, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Starlette]]:
        app = build_app(RouterSettings(tokenizer_name=str(model), **settings), engine.connect)
        async with app.router.lifespan_context(app), served(app) as server:
            host, port = server.address
            async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=10) as client:

                async def is_started() -> bool:
                    return (await client.get("/health")).status_code == 200

                await eventually(is_started, "ready")
                yield client, app

    return listening


async def events(answer: httpx.Response, most: int = 1_000_000) -> list[str]:
    """The first events of a stream, as they were sent; keep-alives are none."""
    found: list[str] = []
    lines: list[str] = []
    async for line in answer.aiter_lines():
        if line:
            lines.append(line)
        elif lines:
            found += ["\n".join(lines)] if lines != [":"] else []
            lines = []
        if len(found) == most:
            break
    return found


async def begun(client: httpx.AsyncClient, path: str, body: dict[str, Any], most: int, **headers: str) -> list[str]:
    """The first events of a stream, the connection of which is closed then."""
    async with client.stream("POST", path, json=body, headers=RESUMABLE | headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["x-request-id"] == "mine"
        return await events(answer, most)


async def followed(client: httpx.AsyncClient, after: int | None = None, **headers: str) -> list[str]:
    """The events that follow, to the end."""
    query = {} if after is None else {"after": after}
    async with client.stream("GET", URL, params=query, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream"
        return await events(answer)


def without_ids(found: list[str]) -> list[str]:
    """Events as they are without numbers, and without what is drawn for each request."""
    for number, event in enumerate(found, 1):
        assert event.startswith(f"id: {number}\n"), event
    return [_DRAWN.sub("drawn", event.partition("\n")[2]) for event in found]


async def is_running(app: Starlette, count: int) -> bool:
    return bool(app.state.models.drain.num_running == count)


@pytest.mark.parametrize(("path", "body"), APIS)
@pytest.mark.parametrize("left_after", [0, 3])
async def test_every_api_goes_on_where_its_client_lost_it(
    listen: Listen, path: str, body: dict[str, Any], left_after: int
) -> None:
    engine = FakeEngine(pieces=PIECES, pause=0.01)
    async with listen(engine) as (client, _):
        async with client.stream("POST", path, json=body) as answer:
            plain = [_DRAWN.sub("drawn", event) for event in await events(answer)]
        first = await begun(client, path, body, left_after) if left_after else []
        if not left_after:  # gone with the head
            async with client.stream("POST", path, json=body, headers=RESUMABLE):
                pass
        rest = await followed(client, left_after)
        assert without_ids(first + rest) == plain
        assert first + rest == await followed(client), "all of it, after its end"
        assert not engine.cancelled


async def test_a_stream_without_the_header_has_no_numbers_and_ends_with_its_client(listen: Listen) -> None:
    engine = FakeEngine(pieces=PIECES, pause=0.05)
    async with listen(engine) as (client, _):
        async with client.stream("POST", "/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"}) as answer:
            (event,) = await events(answer, 1)
            assert event.startswith("data: ")
            assert (await client.get(URL)).status_code == 404
        await eventually(engine.was_cancelled, "cancelled")


async def test_the_number_of_the_query_wins_over_that_of_the_header(listen: Listen) -> None:
    async with listen(FakeEngine(pieces=PIECES, pause=0.01)) as (client, _):
        first = await begun(client, "/v1/chat/completions", CHAT, 2)
        by_header = await followed(client, **{"last-event-id": "2"})
        whole = first + by_header
        assert await followed(client, **{"Last-Event-ID": "5"}) == whole[5:]
        assert await followed(client, 1, **{"last-event-id": "5"}) == whole[1:]
        assert await followed(client, 0, **{"last-event-id": "5"}) == whole
        assert await followed(client, **{"last-event-id": ""}) == whole
        ended = await client.get(URL, headers={"last-event-id": str(len(whole))})
        assert (ended.status_code, ended.content) == (204, b"")


@pytest.mark.parametrize(
    ("query", "headers", "field", "said"),
    [
        ("?after=-1", {}, "after", "after: must be greater than or equal to 0. Given: '-1'"),
        ("?after=x", {}, "after", "Given: 'x'"),
        ("?after=9", {}, "after", "after: must be an event that the stream has sent, <= 2. Given: 9"),
        ("", {"last-event-id": "9"}, "last-event-id", "last-event-id: must be an event that the stream has sent, <= 2"),
        ("", {"last-event-id": "x"}, "last-event-id", "header last-event-id: must be an integer >= 0. Given: 'x'"),
    ],
)
async def test_a_wrong_number_is_refused(
    listen: Listen, query: str, headers: dict[str, str], field: str, said: str
) -> None:
    engine = FakeEngine(pieces=("a", "b"), pause=0.05)
    body = {"inputs": "x", "parameters": {"max_new_tokens": 2}}
    async with listen(engine) as (client, _):
        assert len(await begun(client, "/generate_stream", body, 2)) == 2
        answer = await client.get(f"{URL}{query}", headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
        assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "body"), APIS)
async def test_seconds_beyond_the_setting_are_refused(
    serve: Serve, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    async with serve(engine, max_resume_seconds=9) as client:
        for value in ("10", "0", "x"):
            answer = await client.post(path, json=body, headers={"x-resume-seconds": value})
            assert answer.status_code in (400, 422), answer.text  # TGI's routes have TGI's status
            said = f"header x-resume-seconds: must be an integer >= 1 and <= 9 (--max-resume-seconds). Given: '{value}'"
            assert said in answer.text
        assert (await client.post(path, json=body, headers={"x-resume-seconds": "9"})).status_code == 200
    async with serve(engine, max_resume_seconds=0) as client:
        answer = await client.post(path, json=body, headers={"x-resume-seconds": "1"})
        assert "no stream is kept, --max-resume-seconds is 0" in answer.text


async def test_a_stream_that_does_not_fit_is_whole_and_says_why_it_is_gone(listen: Listen) -> None:
    async with listen(FakeEngine(pieces=PIECES, pause=0.01), max_resume_bytes=2000) as (client, _):
        found = await begun(client, "/v1/chat/completions", CHAT, 1_000_000)
        assert found[-1].endswith("\ndata: [DONE]")
        without_ids(found)
        answer = await client.get(URL)
        assert answer.status_code == 410
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "gone")
        words = "stream 'mine' cannot be resumed any more: its events did not fit in --max-resume-bytes 2000"
        assert error["message"] == words


async def test_a_client_that_stays_away_too_long_ends_its_stream(listen: Listen) -> None:
    engine = FakeEngine(pieces=("word ",) * 1000, pause=0.05)
    async with listen(engine) as (client, app):
        await begun(client, "/v1/chat/completions", CHAT, 2, **{"x-resume-seconds": "1"})
        assert await is_running(app, 1), "it counts as running without its client"
        await eventually(engine.was_cancelled, "cancelled")
        await eventually(lambda: is_running(app, 0), "it has ended")
        answer = await client.get(URL)
        assert (answer.status_code, answer.json()["error"]["message"].partition(": ")[2]) == (
            410,
            "it had no client for 1 seconds",
        )


async def test_an_error_is_what_a_client_that_comes_back_gets(listen: Listen) -> None:
    engine = FakeEngine(pieces=PIECES, pause=0.05, error=StepFailed("broken"), fails_at=4)
    async with listen(engine) as (client, _):
        first = await begun(client, "/v1/chat/completions", CHAT, 2)
        rest = await followed(client, 2)
        assert "broken" in rest[-2]
        assert rest[-1] == f"id: {len(first + rest)}\ndata: [DONE]"
        engine.fails_at = 0
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=RESUMABLE | {"x-request-id": "other"})
        again = await client.get("/v1/requests/other/stream")
        assert (answer.status_code, again.status_code) == (424, 500)  # TGI's status, and OpenAI's
        assert "broken" in again.json()["error"]["message"]


# Owners, limits, drain -----------------------------------------------------------------------------------------------


def keys_in(folder: Path, *lines: dict[str, Any]) -> str:
    path = folder / "keys"
    path.write_text(
        "\n".join(
            json.dumps(
                {"sha256": hashlib.sha256(line["name"].encode()).hexdigest(), "created": "2026-01-01T00:00:00Z"} | line
            )
            for line in lines
        )
    )
    path.chmod(0o600)
    return str(path)


def with_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_a_stream_is_its_owners_alone(listen: Listen, tmp_path: Path) -> None:
    keys = keys_in(
        tmp_path,
        {"name": "one", "routes": ["/v1/chat/completions"]},
        {"name": "two"},
        {"name": "operator", "routes": ["/v1/requests*"]},
    )
    async with listen(FakeEngine(pieces=PIECES, pause=0.01), api_key_file=keys) as (client, _):
        first = await begun(client, "/v1/chat/completions", CHAT, 2, **with_key("one"))
        assert (await client.get(URL)).status_code == 401
        assert (await client.get(URL, headers=with_key("wrong"))).status_code == 401
        for other in ("two", "operator"):
            answer = await client.get(URL, headers=with_key(other))
            unknown = await client.get("/v1/requests/unknown/stream", headers=with_key(other))
            assert answer.status_code == unknown.status_code == 404
            assert answer.text.replace("mine", "unknown") == unknown.text
        rest = await followed(client, 2, **with_key("one"))
        assert (first + rest)[-1].endswith("[DONE]")


async def test_the_limits_of_a_key_count_a_stream_once(listen: Listen, tmp_path: Path) -> None:
    limits = {"requests_per_minute": 1, "max_concurrent_requests": 1}
    keys = keys_in(tmp_path, {"name": "one", **limits}, {"name": "plain"})
    async with listen(FakeEngine(pieces=PIECES, pause=0.03), api_key_file=keys) as (client, _):

        async def counts() -> dict[str, float]:
            lines = (await client.get("/metrics", headers=with_key("plain"))).text.splitlines()
            found = (line.rpartition(" ") for line in lines if line.startswith("funitel_key_") and 'key="one"' in line)
            return {name: float(value) for name, _, value in found}

        first = await begun(client, "/v1/chat/completions", CHAT, 2, **with_key("one"))
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=with_key("one"))
        assert refused.status_code == 429, "a stream without its client is one that runs"
        following = asyncio.create_task(followed(client, 2, **with_key("one")))
        other = await followed(client, 2, **with_key("one"))
        assert await following == other
        assert await followed(client, 1, **with_key("one")) == first[1:] + other
        found = await counts()
        tokens = {name: value for name, value in found.items() if "tokens" in name and "completion" in name}
        assert list(tokens.values()) == [len(PIECES) + 1], found
        requests = [value for name, value in found.items() if "requests" in name and "refused" not in name]
        assert requests[0] == 1, found


async def test_a_draining_router_waits_for_a_kept_stream_and_lets_its_client_follow(listen: Listen) -> None:
    async with listen(FakeEngine(pieces=PIECES, pause=0.03)) as (client, app):
        first = await begun(client, "/v1/chat/completions", CHAT, 2)
        app.state.models.drain.begin()
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
        assert await is_running(app, 1)
        rest = await followed(client, 2)
        assert (first + rest)[-1].endswith("[DONE]")
        await eventually(lambda: is_running(app, 0), "drained")


async def test_it_is_listed_and_aborted_without_its_client(listen: Listen) -> None:
    async with listen(FakeEngine(pieces=("word ",) * 1000, pause=0.02)) as (client, _):
        first = await begun(client, "/v1/chat/completions", CHAT, 2)
        (listed,) = (await client.get("/v1/requests")).json()["data"]
        assert listed["id"] == "mine"
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        rest = await followed(client, 2)
        assert '"finish_reason":"abort"' in rest[-2]
        assert len(first) == 2


async def test_keep_alives_have_no_number_and_are_of_each_client(listen: Listen) -> None:
    async with listen(FakeEngine(pieces=("a", "b", "c"), pause=0.1)) as (client, app):
        first = await begun(client, "/v1/chat/completions", CHAT, 1)
        stream = next(iter(app.state.models.resumable._streams.values()))
        stream._stream.keep_alive_seconds = 0.01
        async with client.stream("GET", URL, params={"after": 1}) as answer:
            text = (await answer.aread()).decode()
        assert ":\n\n" in text
        rest = [part for part in text.split("\n\n") if part not in ("", ":")]
        assert rest == (await followed(client))[1:]
        assert len(first) == 1
