"""Every answer bears an id, and every request has one line of the log that can be found by it."""

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve
from starlette.types import Message, Receive, Scope, Send

from funitel.proto.errors import ShardFailed
from funitel.proto.process import logs
from funitel.router.api.routes import OPERATIONS
from funitel.router.core.drain import Drain
from funitel.router.middleware.access_log import AccessLog
from funitel.router.middleware.operation import ROUTE
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.spans import recording

GENERATED = re.compile(r"[0-9a-f]{32}")
PATHS = [(each.method, re.sub(r"{[^}]*}", "x", each.path)) for each in OPERATIONS]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The facts of the lines about requests, as they come."""
    caplog.set_level(logging.DEBUG, "funitel.router.middleware.access_log")
    found: list[dict[str, Any]] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(logs.fields_of(record) | {"level": record.levelname})

    logger, handler = logging.getLogger("funitel.router.middleware.access_log"), Catch()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize(("method", "path"), [*PATHS, ("GET", "/nowhere"), ("DELETE", "/generate"), ("OPTIONS", "/")])
async def test_every_answer_bears_the_id_of_its_request(
    client: httpx.AsyncClient, lines: list[dict[str, Any]], method: str, path: str
) -> None:
    lines.clear()
    response = await client.request(method, path, headers={"x-request-id": "mine-1"}, json={"inputs": "Hi"})
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    assert [line["request_id"] for line in lines] == ["mine-1"]
    assert lines[0]["status"] == response.status_code


@pytest.mark.parametrize("given", ["mine-1", "a" * 128, "Root=1-67891233-abcdef012345678912345678", "a/b:c@d.e_f+g"])
async def test_a_sane_id_is_kept(client: httpx.AsyncClient, given: str) -> None:
    response = await client.get("/info", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [b"", b"a" * 129, b"two words", b"a\x1b[31mred", b"\xc3\xa9", b'"', b"a,b"])
async def test_any_other_is_replaced(client: httpx.AsyncClient, given: bytes) -> None:
    response = await client.get("/info", headers=[(b"x-request-id", given)])
    assert GENERATED.fullmatch(response.headers["x-request-id"])


async def test_two_ids_are_none(client: httpx.AsyncClient) -> None:
    response = await client.get("/info", headers=[("x-request-id", "a"), ("x-request-id", "b")])
    assert GENERATED.fullmatch(response.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_generation_is_told_with_what_it_took(
    client: httpx.AsyncClient, lines: list[dict[str, Any]], path: str
) -> None:
    lines.clear()
    await client.post(path, json={"inputs": "xyzzy", "parameters": {"max_new_tokens": 3}})
    (line,) = lines
    assert line["level"] == "INFO"
    assert (line["method"], line["route"], line["status"]) == ("POST", path, 200)
    assert (line["prompt_tokens"], line["tokens"], line["finish"], line["cancelled"]) == (6, 3, "length", False)
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["total_seconds"]
    assert "error" not in line
    assert "xyzzy" not in repr(line)


async def test_a_failure_is_told_by_its_kind(serve: Serve, lines: list[dict[str, Any]]) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"), fails_at=2)) as client:
        lines.clear()
        await client.post("/generate", json={"inputs": "Hi"})
        await client.post("/generate_stream", json={"inputs": "Hi"})
        await client.post("/generate", json={"inputs": "Hi", "parameters": {"top_p": 7}})
    assert [line["status"] for line in lines] == [424, 200, 422]
    assert [line["error"] for line in lines] == ["ShardFailed", "ShardFailed", "InvalidRequest"]
    assert [line.get("tokens") for line in lines] == [2, 2, None]


async def test_the_key_is_told_by_its_name(serve: Serve, lines: list[dict[str, Any]], tmp_path: Path) -> None:
    digest = hashlib.sha256(b"the-secret").hexdigest()
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"name": "team-a", "sha256": digest}) + "\n")
    async with serve(FakeEngine(), api_key_file=str(keys)) as client:
        lines.clear()
        await client.post("/generate", json={"inputs": "Hi"}, headers={"authorization": "Bearer the-secret"})
        await client.post("/generate", json={"inputs": "Hi"}, headers={"authorization": "Bearer another"})
    assert [(line["status"], line.get("key"), line.get("error")) for line in lines] == [
        (200, "team-a", None),
        (401, None, "Unauthorized"),
    ]
    assert "secret" not in repr(lines)


async def test_a_probe_that_succeeds_is_quiet(serve: Serve, lines: list[dict[str, Any]]) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        lines.clear()
        await client.get("/health")
        await client.get("/metrics")
        engine.sick = ShardFailed("rank 1 does not answer")
        await client.get("/health")
    assert [(line["route"], line["status"], line["level"]) for line in lines] == [
        ("/health", 200, "DEBUG"),
        ("/metrics", 200, "DEBUG"),
        ("/health", 503, "INFO"),
    ]


async def test_the_questions_of_a_progress_bar_are_quiet(lines: list[dict[str, Any]]) -> None:
    operation = next(each for each in OPERATIONS if each.path.endswith("/progress"))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = operation
        await send({"type": "http.response.start", "status": 200})

    await AccessLog(answer, Metrics(), Drain())({"type": "http", "method": "GET", "headers": []}, _nothing, _unheard)
    assert [(line["status"], line["level"]) for line in lines] == [(200, "DEBUG")]


async def test_a_traced_request_is_told_with_its_trace(serve: Serve, lines: list[dict[str, Any]]) -> None:
    with recording() as spans:
        async with serve(FakeEngine(), otlp_endpoint="http://localhost:1") as client:
            lines.clear()
            await client.post("/generate", json={"inputs": "Hi"})
    trace_id = f"{spans.one('POST /generate').context.trace_id:032x}"
    assert [line["trace_id"] for line in lines] == [trace_id]


async def test_a_client_that_left_before_its_answer_is_told_so(lines: list[dict[str, Any]]) -> None:
    async def leave(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)

    await AccessLog(leave, Metrics(), Drain())({"type": "http", "method": "POST", "headers": []}, _nothing, _unheard)
    assert [(line["status"], line["route"]) for line in lines] == [(499, "other")]


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _unheard(message: Message) -> None:
    """Send to nobody."""


async def test_what_is_logged_on_the_way_bears_the_id_too(client: httpx.AsyncClient) -> None:
    found: list[dict[str, Any]] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(logs.fields_of(record))

    logger, handler = logging.getLogger("funitel.router.api.common.field_policy"), Catch()
    logger.addHandler(handler)
    try:
        body = json.dumps({"inputs": "Hi", "nonsense": 1})
        await client.post("/generate", content=body, headers={"content-type": "application/json", "x-request-id": "me"})
    finally:
        logger.removeHandler(handler)
    assert found == [{"request_id": "me"}]
