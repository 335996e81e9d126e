"""Every bad body is refused with its status and the canonical error shape, on every route that reads one."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from funitel.proto.errors import UnsupportedMediaType
from funitel.router.api.common import body as body_module
from funitel.router.middleware.route_gate import RouteGate

NATIVE = ("/", "/generate", "/generate_stream", "/tokenize")
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def canonical(path: str, response: httpx.Response) -> tuple[str, str]:
    """The message and type of an error, after checking its shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error", "error_type"}
    if not path.startswith("/v1/"):
        assert isinstance(body["error"], str)
        return body["error"], body["error_type"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"], body["error_type"]


MALFORMED = [
    (b"", "line 1 column 1"),
    (b"{", "line 1 column 2"),
    (b'{"inputs": "a",}', "line 1 column"),
    (b'{"inputs": "a"} x', "Extra data"),
    (b'{"inputs": "\xff"}', "not UTF-8: invalid start byte at byte 12"),
    (b"\xef\xbb\xbf{}", "BOM"),
    (b'{"inputs": NaN}', "NaN is no JSON value"),
    (b'{"inputs": -Infinity}', "-Infinity is no JSON value"),
    (b'{"inputs": "a\x01"}', "control character"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b'{"inputs": ' + b"9" * 10_000 + b"}", "the body has an integer of more than 4300 digits"),
]


@pytest.mark.parametrize("path", [*NATIVE, CHAT])
@pytest.mark.parametrize(("content", "says"), MALFORMED, ids=range(len(MALFORMED)))
async def test_what_is_not_json(client: httpx.AsyncClient, path: str, content: bytes, says: str) -> None:
    response = await client.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    message, error_type = canonical(path, response)
    assert error_type == "validation"
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("ignored", ["unknown"])
async def test_an_unknown_field_beside_deep_ones(client: httpx.AsyncClient, ignored: str) -> None:
    """What a lenient route ignores may be nested as deeply as JSON is read."""
    deep = "[" * 900 + "]" * 900
    content = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "strange": 1, "{ignored}": {deep}}}'
    response = await client.post("/chat_tokenize", content=content, headers=JSON)
    assert response.status_code == 200, response.text
    assert response.json()["templated_text"] == "[user]Hi\n[assistant]"


@pytest.mark.parametrize("path", [*NATIVE, CHAT])
@pytest.mark.parametrize("content", [b"[]", b'"a"', b"5", b"null", b"{}"])
async def test_json_of_another_shape(client: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await client.post(path, content=content, headers=JSON)
    assert response.status_code == 422
    canonical(path, response)


WRONG = [
    ("inputs", 5, "inputs: must be a valid string. Given: 5"),
    ("inputs", None, "inputs: this field is required"),
    ("inputs", ["a"], "inputs: must be a valid string"),
    ("inputs", "\ud800", "inputs: must be valid Unicode"),
    ("inputs", "a\udfff", "inputs: must be valid Unicode"),
    ("\ud800", 1, "'\\ud800': must be valid Unicode"),
    ("inputs", {"a": ["\ud800"]}, "inputs.a.0: must be valid Unicode"),
    ("parameters", 5, "parameters: must be an object"),
    ("parameters.temperature", "hot", "parameters.temperature: must be a valid number. Given: 'hot'"),
    ("parameters.temperature", True, "parameters.temperature: must be a valid number"),
    ("parameters.temperature", 1e400, "parameters.temperature: must be a finite number"),
    ("parameters.temperature", 1e39, "parameters.temperature: must be less than"),
    ("parameters.temperature", 10**400, "parameters.temperature: must be"),
    ("parameters.temperature", 10**4000, "parameters.temperature: must be"),
    ("parameters.max_new_tokens", "5", "parameters.max_new_tokens: must be a valid integer. Given: '5'"),
    ("parameters.max_new_tokens", 5.0, "parameters.max_new_tokens: must be a valid integer"),
    ("parameters.max_new_tokens", True, "parameters.max_new_tokens: must be a valid integer"),
    ("parameters.max_new_tokens", -1, "parameters.max_new_tokens: must be greater than or equal to 0"),
    ("parameters.max_new_tokens", 2**32, "parameters.max_new_tokens: must be less than"),
    ("parameters.seed", -1, "parameters.seed: must be greater than"),
    ("parameters.seed", 2**64, "parameters.seed: must be less than"),
    ("parameters.seed", 10**4000, "parameters.seed: must be less than"),
    ("parameters.top_k", 2**31, "parameters.top_k: must be less than"),
    ("parameters.top_k", -(2**40), "parameters.top_k: must be greater than"),
    ("parameters.best_of", -1, "parameters.best_of: must be"),
    ("parameters.truncate", -1, "parameters.truncate: must be"),
    ("parameters.top_n_tokens", 2**40, "parameters.top_n_tokens: must be"),
    ("parameters.stop", 5, "parameters.stop: must be a valid list"),
    ("parameters.stop", ["a", 5], "parameters.stop.1: must be a valid string"),
    ("parameters.stop", ["\ud800"], "parameters.stop.0: must be valid Unicode"),
    ("parameters.details", 1, "parameters.details: must be a valid boolean"),
]


def body_with(name: str, value: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"inputs": "Hi"}
    *outer, last = name.split(".")
    place = body.setdefault(outer[0], {}) if outer else body
    place[last] = value
    return body


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize(("name", "value", "says"), WRONG, ids=range(len(WRONG)))
async def test_a_wrong_value_names_its_field(
    client: httpx.AsyncClient, path: str, name: str, value: Any, says: str
) -> None:
    text = json.dumps(body_with(name, value)).replace("Infinity", "1e400")
    response = await client.post(path, content=text, headers=JSON)
    assert response.status_code == 422
    message, error_type = canonical(path, response)
    assert error_type == "validation"
    assert message.startswith(f"Input validation error: {says}")
    assert len(message) < 300


@pytest.mark.parametrize("path", NATIVE[:3])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": "x" * 101}, "`inputs` must have less than 100 tokens. Given: 102"),
        ({"inputs": "x" * 500}, "`inputs` tokens + `max_new_tokens` must be <= 200"),
        ({"inputs": "x", "parameters": {"max_new_tokens": 199}}, "Given: 2 `inputs` tokens and 199"),
        ({"inputs": "x", "parameters": {"temperature": 0}}, "`temperature` must be strictly positive"),
    ],
    ids=range(5),
)
async def test_a_broken_rule(client: httpx.AsyncClient, path: str, body: Any, says: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 422
    message, error_type = canonical(path, response)
    assert error_type == "validation"
    assert says in message


@pytest.mark.parametrize("path", NATIVE[:3])
@pytest.mark.parametrize("inputs", ["\0", "a\0b", "\ufffe", "\U0010ffff", "‮abc", " "])
async def test_strange_text_is_text(client: httpx.AsyncClient, path: str, inputs: str) -> None:
    assert (await client.post(path, json={"inputs": inputs})).status_code == 200


@pytest.mark.parametrize("path", [*NATIVE, CHAT])
@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded", "json"])
async def test_other_media_types(client: httpx.AsyncClient, path: str, content_type: str) -> None:
    response = await client.post(path, content=b'{"inputs": "Hi"}', headers={"content-type": content_type})
    assert response.status_code == 415
    canonical(path, response)


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
async def test_media_types_that_are_json(client: httpx.AsyncClient, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert (await client.post("/generate", content=b'{"inputs": "Hi"}', headers=headers)).status_code == 200


@pytest.mark.parametrize("path", [*NATIVE, CHAT])
async def test_a_body_of_ten_megabytes(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"inputs": "x" * 10_000_000})
    assert response.status_code == 413
    message, _ = canonical(path, response)
    assert "at most 2000000 bytes" in message


async def test_a_streamed_body_is_counted(client: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 10_000

    response = await client.post("/generate", content=endless(), headers=JSON)
    assert response.status_code == 413


async def test_the_limit_is_inclusive(serve: Serve) -> None:
    body = json.dumps({"inputs": "Hi"}).encode()
    async with serve(FakeEngine(), payload_limit=len(body)) as client:
        assert (await client.post("/generate", content=body, headers=JSON)).status_code == 200
        assert (await client.post("/generate", content=body + b" ", headers=JSON)).status_code == 413


async def test_a_body_of_ten_megabytes_over_a_socket(listening: httpx.AsyncClient) -> None:
    response = await listening.post("/generate", json={"inputs": "x" * 10_000_000})
    assert response.status_code == 413
    assert (await listening.post("/generate", json={"inputs": "Hi"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/v1/completions", '{"prompt": [%s]}'),
        ("/v1/chat/completions", '{"messages": [%s]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [%s]}]}'),
        ("/v1/responses", '{"input": [%s]}'),
        ("/v1/messages", '{"model": "m", "max_tokens": 1, "messages": [%s]}'),
        ("/vertex", '{"instances": [%s]}'),
        ("/generate", '{"inputs": "a", "parameters": {"stop": [%s]}}'),
    ],
)
async def test_a_body_of_nothing_but_errors_holds_up_nobody(
    client: httpx.AsyncClient, path: str, template: str
) -> None:
    """Errors are found one at a time: 100,000 of them take no longer to describe than one."""
    longest, done = 0.0, asyncio.Event()

    async def watch() -> None:
        nonlocal longest
        while not done.is_set():
            begin = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - begin)

    watching = asyncio.create_task(watch())
    body = template % ",".join(["-1"] * 100_000)
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    done.set()
    await watching
    assert response.status_code in (400, 422)
    assert len(response.text) < 1000
    assert longest < 0.4


@pytest.mark.parametrize("path", [*NATIVE, "/chat_tokenize", "/invocations", CHAT, "/v1/completions"])
@pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "identity, gzip", "deflate, identity", "x" * 500])
async def test_a10_a_compressed_body_is_refused(client: httpx.AsyncClient, path: str, coding: str) -> None:
    content = gzip.compress(b'{"inputs": "a"}')
    response = await client.post(path, content=content, headers={**JSON, "content-encoding": coding})
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "identity"
    message, _ = canonical(path, response)
    assert f"content-encoding must be identity. Given: {coding[:80]}" in message
    assert len(message) < 200


@pytest.mark.parametrize("coding", ["identity", "", "Identity, identity"])
async def test_a10_a_body_that_says_it_is_not_compressed(client: httpx.AsyncClient, coding: str) -> None:
    headers = {**JSON, "content-encoding": coding}
    response = await client.post("/tokenize", content=b'{"inputs": "a"}', headers=headers)
    assert response.status_code == 200, response.text


MANY = 20_000
FULL: list[tuple[str, Any]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a"}] * MANY}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]}),
    (CHAT, {"messages": [], "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MANY)]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * MANY}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * MANY, "max_tokens": 1, "model": "m"}),
    ("/generate", {"inputs": "a", "parameters": {"stop": ["a"] * MANY}}),
    ("/generate", {"inputs": [[]] * MANY}),
    ("/v1/completions", {"prompt": [1, {}] * MANY}),
]


@pytest.mark.parametrize(("path", "body"), FULL)
async def test_a1_a_body_of_too_many_values_is_refused(client: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code in (400, 422)
    assert "the body must have at most 16384 values" in answer.text


async def test_a1_many_token_ids_are_few_values(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"prompt": [1] * 100_000, "max_tokens": 1})
    assert "Given: 100000 `prompt` tokens" in answer.text


async def test_a1_the_loop_goes_on_while_many_values_are_checked(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_checking, goes_on = threading.Event(), threading.Event()
    validated = body_module._validated

    def held(*given: Any) -> Any:
        is_checking.set()
        assert goes_on.wait(20), "the loop stands still"
        return validated(*given)

    monkeypatch.setattr(body_module, "_validated", held)
    body = {"messages": [{"role": "user", "content": "a"}] * 5000, "max_tokens": 1}
    work = asyncio.create_task(client.post(CHAT, json=body))
    assert await asyncio.to_thread(is_checking.wait, 20)
    goes_on.set()
    assert (await work).status_code == 422


async def test_a1_a_body_is_released_with_its_answer(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scope lives until cycles are collected; bodies of refused requests filled gigabytes by then."""
    scopes = []
    call = RouteGate.__call__

    async def noting(gate: RouteGate, scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await call(gate, scope, receive, send)

    monkeypatch.setattr(RouteGate, "__call__", noting)
    text = "sea " * 100
    for path, status in (("/generate", 422), ("/tokenize", 200)):
        assert (await client.post(path, json={"inputs": text})).status_code == status
    assert [any(text in repr(value) for value in scope.values()) for scope in scopes] == [False, False]


def upload_request(content_type: str, content: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(b"content-type", content_type.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "path_params": {}, "headers": headers}
    return Request(scope, receive)


async def test_a_form_is_a_form_whatever_its_boundary() -> None:
    part = b'--xJsOnx\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--xJsOnx--\r\n'
    request = upload_request("multipart/form-data; boundary=xJsOnx", part)
    await body_module.receive_upload(request, 100, "--max-audio-bytes")
    assert body_module.upload_of(request.scope).content == b"RIFF"


async def test_json_is_no_file() -> None:
    request = upload_request("application/json", b'{"file": "a.wav"}')
    await body_module.receive_upload(request, 100, "--max-audio-bytes")
    with pytest.raises(UnsupportedMediaType, match="must be multipart/form-data, with the field `file`"):
        body_module.upload_of(request.scope)
