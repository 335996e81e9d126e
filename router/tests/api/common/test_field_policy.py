"""Unknown fields are ignored with a warning or refused, null is unset, and what is not supported is refused by name."""

import time
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve

from funitel.router.api.common import field_policy
from funitel.router.api.common.field_policy import MAX_WARNED_FIELDS, Unsupported
from funitel.router.api.openai.unsupported_fields import CHAT as REFUSED_BY_CHAT
from funitel.router.api.openai.unsupported_fields import SAMPLING as REFUSED_BY_COMPLETIONS

HI = {"role": "user", "content": "Hi"}
CHAT = {"messages": [HI]}
CLAUDE = {"model": "m", "max_tokens": 5, "messages": [HI]}
BODIES: dict[str, dict[str, Any]] = {
    "/": {"inputs": "Hi"},
    "/generate": {"inputs": "Hi", "parameters": {}},
    "/generate_stream": {"inputs": "Hi"},
    "/tokenize": {"inputs": "Hi"},
    "/chat_tokenize": CHAT,
    "/invocations": CHAT,
    "/vertex": {"instances": [{"inputs": "Hi"}, CHAT]},
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": CLAUDE,
    "/v1/messages/count_tokens": {"model": "m", "messages": [HI]},
}
PARTS = [
    ("/generate", {"inputs": "Hi", "parameters": {"made_up": 1}}, "parameters.made_up"),
    ("/v1/chat/completions", {"messages": [HI | {"made_up": 1}]}, "messages.0.made_up"),
    ("/invocations", {"messages": [HI | {"made_up": 1}]}, "messages.0.made_up"),
    ("/vertex", {"instances": [{"inputs": "Hi", "made_up": 1}]}, "instances.0.made_up"),
    ("/v1/messages", CLAUDE | {"messages": [HI | {"made_up": 1}]}, "messages.0.made_up"),
    ("/v1/responses", {"input": [HI | {"made_up": 1}]}, "input.0.made_up"),
    (
        "/v1/messages",
        CLAUDE | {"messages": [HI | {"content": [{"type": "text", "text": "a", "made_up": 1}]}]},
        "messages.0.content.0.made_up",
    ),
    (
        "/v1/chat/completions",
        CHAT | {"tools": [{"type": "function", "function": {"name": "f", "made_up": 1}}], "tool_choice": "none"},
        "tools.0.function.made_up",
    ),
]
EVERYWHERE = [*((path, body | {"made_up": 1}, "made_up") for path, body in BODIES.items()), *PARTS]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_policy, "_warned", set())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]


@pytest.mark.parametrize(("path", "body", "field"), EVERYWHERE)
async def test_b6_an_unknown_field_is_ignored_with_one_warning(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str, body: Any, field: str
) -> None:
    for _ in range(2):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
    (warning,) = warnings(caplog)
    assert "ignoring unknown field 'made_up'" in warning
    assert warning.startswith(path if path != "/invocations" else "/")


@pytest.mark.parametrize(("path", "body", "field"), EVERYWHERE)
async def test_b6_strict_fields_refuses_an_unknown_field_by_name(
    serve: Serve, path: str, body: Any, field: str
) -> None:
    async with serve(FakeEngine(), strict_fields=True) as client:
        response = await client.post(path, json=body)
    assert response.status_code in (400, 422)
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.endswith(f"{field}: unknown field")


@pytest.mark.parametrize("path", BODIES)
async def test_b6_strict_fields_takes_known_ones(serve: Serve, path: str) -> None:
    async with serve(FakeEngine(), strict_fields=True) as client:
        response = await client.post(path, json=BODIES[path] | {"made_up": None})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [path for path in BODIES if path not in ("/", "/invocations", "/vertex")])
async def test_b6_null_is_unset_for_every_field(client: httpx.AsyncClient, path: str) -> None:
    document = (await client.get("/openapi.json")).json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    schema = schemas[reference.rpartition("/")[2]]
    branches = [schemas[each["$ref"].rpartition("/")[2]] for each in schema.get("anyOf", [])] or [schema]
    names = {name for branch in branches for name in branch["properties"]}
    nulls = {name: None for name in names if name not in BODIES[path] or name == "parameters"}
    response = await client.post(path, json=BODIES[path] | nulls)
    assert response.status_code == 200, response.text


async def test_b6_null_is_unset_within_parameters_and_messages(client: httpx.AsyncClient) -> None:
    parameters = {"do_sample": None, "details": None, "watermark": None, "stop": None, "best_of": None}
    assert (await client.post("/generate", json={"inputs": "Hi", "parameters": parameters})).status_code == 200
    message = HI | {"name": None, "tool_calls": None, "reasoning_content": None, "refusal": None, "annotations": None}
    assert (await client.post("/v1/chat/completions", json={"messages": [message]})).status_code == 200


async def test_b6_a_required_field_that_is_null_is_missing(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": None})
    assert response.status_code == 422
    assert response.json()["error"]["message"].endswith("messages: this field is required")
    assert response.json()["error"]["param"] == "messages"


PROVIDERS = {"id": "msg_1", "cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": [1]}, "x": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [HI | PROVIDERS]}),
        ("/v1/chat/completions", {"messages": [HI | {"content": [{"type": "text", "text": "Hi"} | PROVIDERS]}]}),
        (
            "/v1/chat/completions",
            {"messages": [HI, HI | {"role": "assistant", "reasoning_details": [], "reasoning_content": "a"}, HI]},
        ),
        ("/v1/messages", CLAUDE | {"messages": [HI | PROVIDERS], "context_management": {"edits": []}}),
        ("/v1/messages", CLAUDE | {"system": [{"type": "text", "text": "a", "citations": []} | PROVIDERS]}),
        ("/v1/responses", {"input": [HI | PROVIDERS], "client_metadata": {"a": "b"}}),
    ],
)
async def test_b6_provider_fields_of_messages_are_ignored(client: httpx.AsyncClient, path: str, body: Any) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/generate", '{"inputs": "a", %s}'),
        ("/generate", '{"inputs": "a", "parameters": {%s}}'),
        ("/chat_tokenize", '{"messages": [{"role": "user", "content": "a", %s}]}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], %s}'),
        ("/v1/messages", '{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a", %s}]}'),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
async def test_b6_many_names_fill_neither_log_nor_memory(
    serve: Serve, path: str, template: str, is_strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fields = ",".join(f'"u{number}":1' for number in range(16_000))
    async with serve(FakeEngine(), strict_fields=is_strict) as client:
        begin = time.process_time()  # the machine may have others to serve
        response = await client.post(path, content=template % fields, headers={"content-type": "application/json"})
        seconds = time.process_time() - begin
    assert response.status_code in ((400, 422) if is_strict else (200,)), response.text
    assert len(warnings(caplog)) == (0 if is_strict else MAX_WARNED_FIELDS + 1)
    assert seconds < 0.4


async def test_b6_long_names_are_shortened_and_many_bodies_are_bounded(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2 * MAX_WARNED_FIELDS):
        body = CHAT | {f"{number}" + "x" * 10_000: 1}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    lines = warnings(caplog)
    assert len(lines) == MAX_WARNED_FIELDS + 1
    assert max(map(len, lines)) < 120
    assert lines[-1] == "ignoring further unknown fields without a warning"
    assert max(map(len, field_policy._warned)) < 40


async def test_b6_names_of_unknown_fields_forge_no_line(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await client.post("/generate", json={"inputs": "Hi", "a\nERROR b\x1b[0m": 1})).status_code == 200
    assert "\n" not in warnings(caplog)[0]
    assert "\x1b" not in warnings(caplog)[0]


NEEDS = {"modalities": ["text", "audio"], "web_search_options": {}, "thinking_token_budget": 5}


def value_of(refusal: Unsupported, name: str) -> Any:
    return NEEDS.get(name, {"a": 1})


@pytest.mark.parametrize("name", REFUSED_BY_CHAT)
async def test_b6_what_would_change_a_chat_is_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    refusal = REFUSED_BY_CHAT[name]
    response = await client.post("/v1/chat/completions", json=CHAT | {name: value_of(refusal, name)})
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["message"] == f"Input validation error: {name}: is not supported: {refusal.why}"
    assert error["param"] == name
    for neutral in (None, *refusal.neutral):
        response = await client.post("/v1/chat/completions", json=CHAT | {name: neutral})
        assert response.status_code == 200, (neutral, response.text)


@pytest.mark.parametrize("name", REFUSED_BY_COMPLETIONS)
async def test_b6_what_would_change_a_completion_is_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    refusal = REFUSED_BY_COMPLETIONS[name]
    body = {"prompt": "Hi", name: value_of(refusal, name)}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == name
    for neutral in (None, *refusal.neutral):
        assert (await client.post("/v1/completions", json=body | {name: neutral})).status_code == 200


def test_b6_zero_is_not_false() -> None:
    assert not Unsupported("x").is_neutral(0)
    assert Unsupported("x").is_neutral(False)
    assert Unsupported("x", (1.0,)).is_neutral(1)
    assert not Unsupported("x", (1.0,)).is_neutral(True)
