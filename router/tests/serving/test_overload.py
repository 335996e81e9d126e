"""What a client sees of the queue: refusals in each API's shape, deadlines, priorities, whose share it takes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually
from starlette.types import Receive, Scope, Send

from funitel.proto.errors import DeadlineExceeded, FunitelError, NotReady, Overloaded, SettingsError
from funitel.router.app import build_app
from funitel.router.core.request import Request
from funitel.router.settings import RouterSettings
from funitel.router.text.encode_pool import EncodePool
from funitel.router.transport.sse import EventStream

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ROUTES: dict[str, dict[str, Any]] = {
    "/": {"inputs": "hi"},
    "/generate": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT | {"model": "any"},
    "/invocations": {"inputs": "hi"},
    "/vertex": {"instances": [{"inputs": "hi"}]},
    "/v2/models/m/versions/1/infer": {
        "inputs": [{"name": "p", "shape": [1], "datatype": "BYTES", "data": ["hi"]}],
        "outputs": [{"name": "o"}],
    },
}
JSON = {"content-type": "application/json"}
OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Refusing(FakeEngine):
    """Has no place for anybody."""

    def submit(self, request: Any) -> Any:
        raise Overloaded(": 7 requests in flight, at most 7", position=5, wait_seconds=2.25)


def kind_of(path: str, body: dict[str, Any]) -> str:
    """What an error is called, in the API of a route."""
    if path == "/v1/messages":
        return str(body["error"]["type"])
    return str(body["error"]["code"] if path in OPENAI else body["error_type"])


def message_of(path: str, body: dict[str, Any]) -> str:
    return str(body["error"]["message"] if path.startswith("/v1/") else body["error"])


@pytest.mark.parametrize(
    ("path", "streams"), [(path, False) for path in ROUTES] + [(path, True) for path in ("/", *OPENAI, "/v1/messages")]
)
async def test_a_refusal_says_when_to_come_again_and_what_the_queue_is_like(
    serve: Serve, path: str, streams: bool
) -> None:
    async with serve(Refusing()) as client:
        answer = await client.post(path, json=ROUTES[path] | ({"stream": True} if streams else {}))
    assert answer.status_code == (529 if path == "/v1/messages" else 429)
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-queue-position"] == "5"
    assert answer.headers["x-estimated-wait"] == "2.250"
    body = answer.json()
    assert (body["queue_position"], body["estimated_wait_seconds"]) == (5, 2.25)
    assert kind_of(path, body) == ("overloaded_error" if path == "/v1/messages" else "overloaded")
    assert message_of(path, body).startswith("Model is overloaded")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_deadline_that_passes_is_a_504_in_the_routes_shape(serve: Serve, path: str) -> None:
    engine = FakeEngine(error=DeadlineExceeded("the deadline passed before its first token"))
    async with serve(engine) as client:
        answer = await client.post(path, json=ROUTES[path])
    assert answer.status_code == 504
    assert "retry-after" not in answer.headers
    assert "queue_position" not in answer.json()
    assert kind_of(path, answer.json()) == ("timeout_error" if path == "/v1/messages" else "timeout")
    assert message_of(path, answer.json()) == "Request timed out: the deadline passed before its first token"


async def test_a_deadline_that_passes_while_streaming_is_the_last_event(serve: Serve) -> None:
    engine = FakeEngine(error=DeadlineExceeded("the deadline passed after 2 tokens"), fails_at=2)
    async with serve(engine) as client:
        answer = await client.post("/generate_stream", json={"inputs": "hi"})
    last = answer.text.strip().split("\n\n")[-1]
    assert last == 'data: {"error":"Request timed out: the deadline passed after 2 tokens","error_type":"timeout"}'


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("x-request-timeout", value) for value in ("0", "-1", "soon", "nan", "inf", "1e6", "", "1_0", "2,5")),
        *(("x-request-priority", value) for value in ("101", "-101", "high", "1.5", "", "99999999999999999999")),
    ],
)
async def test_a_bad_header_is_named_with_its_value_and_limits(
    client: httpx.AsyncClient, path: str, name: str, value: str
) -> None:
    answer = await client.post(path, json=ROUTES[path], headers={name: value})
    assert answer.status_code == (400 if path in ("/v1/messages", "/v1/responses") else 422)
    message = message_of(path, answer.json())
    limits = "seconds > 0 and <= 86400" if name.endswith("timeout") else "an integer >= -100 and <= 100"
    assert f"header {name}: must be {limits}. Given: {value!r}" in message


@pytest.mark.parametrize("path", ROUTES)
async def test_headers_reach_the_queue_on_every_route(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    headers = {"x-request-timeout": "2.5", "x-request-priority": "-3", "authorization": "Bearer somebody"}
    assert (await client.post(path, json=ROUTES[path], headers=headers)).status_code == 200
    assert (await client.post(path, json=ROUTES[path])).status_code == 200
    told, untold = engine.requests
    assert (told.priority, untold.priority) == (-3, 0)
    assert told.deadline is not None
    assert untold.deadline is None
    assert told.key != b"" == untold.key
    assert b"somebody" not in told.key
    assert ", key=" not in repr(told)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
async def test_a_priority_in_the_body_wins_and_is_bounded(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    def body(priority: int) -> dict[str, Any]:
        if path == "/generate":
            return {"inputs": "hi", "parameters": {"priority": priority}}
        return ROUTES[path] | {"priority": priority}

    answer = await client.post(path, json=body(7), headers={"x-request-priority": "-3"})
    assert answer.status_code == 200
    assert engine.requests[0].priority == 7
    answer = await client.post(path, json=body(101))
    assert answer.status_code == 422
    assert "priority" in answer.text
    assert "100" in answer.text


async def test_a_key_is_the_same_however_it_is_carried_and_another_is_another(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for headers in ({"authorization": "Bearer a"}, {"x-api-key": "a"}, {"authorization": "bearer b"}, {}):
        await client.post("/generate", json={"inputs": "hi"}, headers=headers)
    first, same, other, nobody = (request.key for request in engine.requests)
    assert first == same
    assert len({first, other, nobody}) == 3


async def test_any_key_of_the_file_is_let_in_and_no_other(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("second\n\n  third \n")
    engine = FakeEngine()
    async with serve(engine, api_key="first", api_key_file=str(keys)) as client:
        for token in ("first", "second", "third"):
            headers = {"authorization": f"Bearer {token}"}
            assert (await client.post("/generate", json={"inputs": "hi"}, headers=headers)).status_code == 200
        for token in ("", "fourth", "first\tsecond"):
            headers = {"authorization": f"Bearer {token}"}
            assert (await client.post("/generate", json={"inputs": "hi"}, headers=headers)).status_code == 401
        wrong_and_right = {"authorization": "Bearer fourth", "x-api-key": "first"}
        assert (await client.post("/generate", json={"inputs": "hi"}, headers=wrong_and_right)).status_code == 200
    keys_seen = [request.key for request in engine.requests]
    assert len(set(keys_seen[:3])) == 3
    assert keys_seen[3] == keys_seen[0], "the wrong token is nobody's"


def test_an_empty_key_or_file_lets_nobody_in(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--api-key must not be empty"):
        RouterSettings(api_key="")
    empty = tmp_path / "keys"
    empty.write_text("\n \n")

    async def never(*_: object) -> Any:
        raise FunitelError("not reached")

    for path, why in ((empty, "must contain keys"), (tmp_path / "absent", "No such file")):
        with pytest.raises(SettingsError, match=f"--api-key-file .*{why}"):
            build_app(RouterSettings(api_key_file=str(path)), never)


# At the admission gate -----------------------------------------------------------------------------------------------


class Full(FakeEngine):
    """Is full, and counts who asks."""

    num_asked = 0

    def check_room(self, incoming: Request) -> None:
        self.num_asked += 1
        raise Overloaded(": 7 requests in flight, at most 7", position=5, wait_seconds=2.25)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_there_is_no_room_for_is_refused_before_its_body_is_read(serve: Serve, path: str) -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    engine = Full()
    headers = {"content-type": "application/json", "x-request-priority": "-3", "authorization": "Bearer somebody"}
    async with serve(engine) as client:
        answer = await client.post(path, content=body(), headers=headers)
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == (529 if path == "/v1/messages" else 429)
    assert answer.headers["retry-after"] == "3"
    assert answer.headers["x-queue-position"] == "5"
    assert answer.headers["x-estimated-wait"] == "2.250"
    assert message_of(path, answer.json()).startswith("Model is overloaded: 7 requests in flight")
    assert (answer.json()["queue_position"], answer.json()["estimated_wait_seconds"]) == (5, 2.25)
    assert engine.num_asked == 1
    assert 'tgi_request_failure{err="overloaded"} 1.0' in metrics
    assert "\ntgi_request_count 1.0" in metrics


async def test_a_refusal_costs_no_thread(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(Full()) as client:
        monkeypatch.setattr("starlette._exception_handler.run_in_threadpool", pytest.fail)
        assert (await client.post("/generate", json={"inputs": "hi"})).status_code == 429
        assert (await client.post("/nowhere")).status_code == 404


async def test_a_door_is_asked_about_the_request_that_comes(serve: Serve) -> None:
    asked: list[Request] = []

    class Asking(FakeEngine):
        def check_room(self, incoming: Request) -> None:
            asked.append(incoming)

    headers = {"x-request-timeout": "2.5", "x-request-priority": "-3", "authorization": "Bearer somebody"}
    engine = Asking()
    async with serve(engine) as client:
        await client.post("/generate", json={"inputs": "hi"}, headers=headers)
    assert len(asked) == 2, "before its body is read, and after"
    for newcomer in asked:
        told = engine.requests[0]
        assert (newcomer.key, newcomer.priority, newcomer.deadline) == (told.key, told.priority, told.deadline)


class Slow:
    """Tokenizes when it is told to."""

    may_go_on = asyncio.Event()
    num_texts = 0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    run = EncodePool.run

    async def run_when_told(*positional: Any, **named: Any) -> Any:
        Slow.num_texts += 1
        await Slow.may_go_on.wait()
        return await run(*positional, **named)

    monkeypatch.setattr(EncodePool, "run", run_when_told)
    Slow.may_go_on, Slow.num_texts = asyncio.Event(), 0
    return Slow


@pytest.mark.parametrize("path", ROUTES)
async def test_no_more_is_tokenized_than_there_is_room_for(serve: Serve, slow: type[Slow], path: str) -> None:
    engine = FakeEngine(max_requests=3)
    async with serve(engine) as client:
        asking = [asyncio.create_task(client.post(path, json=ROUTES[path])) for _ in range(20)]

        async def are_refused() -> bool:
            return sum(each.done() for each in asking) == 17

        await eventually(are_refused, "all but three are refused while those are tokenized")
        assert slow.num_texts == 3
        slow.may_go_on.set()
        statuses = sorted([(await each).status_code for each in asking])
        assert statuses == [200] * 3 + [529 if path == "/v1/messages" else 429] * 17
        assert (await client.post(path, json=ROUTES[path])).status_code == 200, "every place is free again"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "hi"}),
        ("/chat_tokenize", CHAT),
        ("/v1/messages/count_tokens", {"messages": CHAT["messages"], "model": "any"}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ],
)
async def test_what_is_only_tokenized_is_bounded_too(
    serve: Serve, slow: type[Slow], path: str, body: dict[str, Any]
) -> None:
    async with serve(FakeEngine(), max_concurrent_requests=3) as client:
        asking = [asyncio.create_task(client.post(path, json=body)) for _ in range(10)]

        async def are_refused() -> bool:
            return sum(each.done() for each in asking) == 7

        await eventually(are_refused, "all but three are refused")
        slow.may_go_on.set()
        statuses = sorted([(await each).status_code for each in asking])
        assert statuses == [200] * 3 + [529 if path.startswith("/v1/messages") else 429] * 7
        assert 'funitel_refused_total{reason="tokenizing"} 7.0' in (await client.get("/metrics")).text


async def test_a_place_is_free_again_whatever_becomes_of_a_request(serve: Serve) -> None:
    engine = FakeEngine(max_requests=1)
    async with serve(engine) as client:
        for body in ({}, {"inputs": ""}, {"inputs": "x" * 1000}, {"inputs": "hi", "parameters": {"top_p": 7}}):
            for path in ("/generate", "/generate_stream"):
                assert (await client.post(path, json=body)).status_code == 422
        assert (await client.post("/generate", content=b"{", headers=JSON)).status_code == 400
        for path in ("/generate", "/generate_stream"):
            assert (await client.post(path, json={"inputs": "hi"})).status_code == 200


STREAMING = ("/generate_stream", "/", *OPENAI, "/v1/messages")


@pytest.mark.parametrize("path", STREAMING)
async def test_a_stream_keeps_its_place_until_it_is_submitted(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    has_returned, may_begin, begin = asyncio.Event(), asyncio.Event(), EventStream.__call__

    async def begin_later(self: EventStream, scope: Scope, receive: Receive, send: Send) -> None:
        has_returned.set()
        await may_begin.wait()
        await begin(self, scope, receive, send)

    monkeypatch.setattr(EventStream, "__call__", begin_later)
    engine = FakeEngine(max_requests=1)
    async with serve(engine) as client:
        stream = asyncio.create_task(
            client.post(path, json=ROUTES[path] | ({} if path == "/generate_stream" else {"stream": True}))
        )
        await asyncio.wait_for(has_returned.wait(), 10)
        assert not engine.requests, "the handler has returned its stream, and nothing is submitted"
        assert (await client.post("/generate", json={"inputs": "hi"})).status_code == 429
        may_begin.set()
        assert (await stream).status_code == 200
        assert (await client.post("/generate", json={"inputs": "hi"})).status_code == 200


@pytest.mark.parametrize("path", STREAMING)
async def test_a_stream_that_never_begins_leaves_its_place(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def never(self: EventStream, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotReady("it does not begin")

    engine = FakeEngine(max_requests=1)
    async with serve(engine) as client:
        with monkeypatch.context() as patched:
            patched.setattr(EventStream, "__call__", never)
            answer = await client.post(
                path, json=ROUTES[path] | ({} if path == "/generate_stream" else {"stream": True})
            )
            assert answer.status_code >= 500
        assert (await client.post("/generate", json={"inputs": "hi"})).status_code == 200


async def test_a1_a_client_whose_long_texts_wait_is_refused_before_another_body_is_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.text.encode_pool.MAX_WAITING_CHARACTERS", 0)
    async with serve(FakeEngine()) as client:
        for path, body in (("/generate", {"inputs": "sea " * 5000}), ("/tokenize", {"inputs": "sea " * 5000})):
            answer = await client.post(path, json=body)
            assert answer.status_code == 429
            assert "overloaded: long texts of this client wait to be tokenized" in answer.text
        assert (await client.post("/generate", json={"inputs": "sea"})).status_code == 200
