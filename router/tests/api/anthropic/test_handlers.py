"""Anthropic's routes, over a scripted engine."""

import json
import re
from functools import partial
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import ShardFailed, StepFailed
from funitel.router.api.anthropic import handlers
from funitel.router.core.request import Limits
from funitel.router.transport.sse import EventStream

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEXT = "Hello world!"
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]} | fields


async def whole(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(MESSAGES, json=ask(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """The events of a stream; each must have its type as its name."""
    response = await client.post(MESSAGES, json=ask(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    received = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        received.append(event)
    return received


def assembled(received: list[Any]) -> Any:
    """The message that events amount to, put together as Anthropic's clients do."""
    message = received[0]["message"]
    texts: dict[int, str] = {}
    for event in received[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                block = message["content"][event["index"]]
                if delta["type"] == "input_json_delta":
                    texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
                    block["input"] = json.loads(texts[event["index"]] or "{}")
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


async def test_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await whole(client, model="claude")
    assert re.fullmatch(r"msg_[0-9a-f]{32}", answer.pop("id"))
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 20,
            "output_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }
    assert engine.requests[0].inputs == "[user]Hi\n[assistant]"
    assert not engine.requests[0].add_special_tokens


async def test_a_stream(client: httpx.AsyncClient) -> None:
    received = await events(client)
    assert [event["type"] for event in received] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, block_start, *deltas, block_stop, message_delta, _ = received
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == 20
    assert block_start == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert deltas[0] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}}
    assert block_stop == {"type": "content_block_stop", "index": 0}
    assert message_delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert message_delta["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("stops", [None, [], ["o w"], ["rld", "!"], ["zzz", "Hello world!?"], ["H"]])
@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("max_tokens", [1, 50])
async def test_streamed_and_whole_answers_are_equal(serve: Serve, stops: Any, stride: int, max_tokens: int) -> None:
    fields = {"stop_sequences": stops, "max_tokens": max_tokens}
    async with serve(FakeEngine(stride=stride)) as client:
        answer = await whole(client, **fields)
        streamed = assembled(await events(client, **fields))
    assert streamed | {"id": answer["id"]} == answer


@pytest.mark.parametrize(
    ("fields", "reason", "stop", "text"),
    [
        ({}, "end_turn", None, TEXT),
        ({"max_tokens": 2}, "max_tokens", None, "Hello wor"),
        ({"stop_sequences": ["zzz", "o w"]}, "stop_sequence", "o w", "Hell"),
    ],
)
async def test_why_it_ended(client: httpx.AsyncClient, fields: Any, reason: str, stop: str | None, text: str) -> None:
    answer = await whole(client, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
    assert answer["content"] == [{"type": "text", "text": text}]


async def test_a_context_that_is_full(serve: Serve) -> None:
    limits = Limits(max_input_tokens=100, max_total_tokens=1100, pool_tokens=2000)
    async with serve(FakeEngine(pieces=["a"] * 2000, limits=limits, stride=500)) as client:
        answer = await whole(client, max_tokens=5000)
        assert answer["stop_reason"] == "model_context_window_exceeded"
        assert answer["usage"]["output_tokens"] == 1080
        assert (await whole(client, max_tokens=1080))["stop_reason"] == "max_tokens"


async def test_cached_tokens_are_counted_apart(serve: Serve) -> None:
    async with serve(FakeEngine(num_cached_tokens=16)) as client:
        usage = (await whole(client))["usage"]
        streamed = (await events(client))[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (4, 16)
    assert streamed == usage


async def test_an_answer_without_text_has_no_blocks(serve: Serve) -> None:
    async with serve(FakeEngine(pieces=[])) as client:
        assert (await whole(client))["content"] == []
        assert [event["type"] for event in await events(client)] == ["message_start", "message_delta", "message_stop"]


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, temperature=0.5, top_p=0.9, top_k=7, max_tokens=9, stop_sequences=["x"])
    sampling, stopping = engine.requests[0].sampling, engine.requests[0].stopping
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.top_k) == (True, 0.5, 0.9, 7)
    assert (stopping.max_new_tokens, stopping.stop_sequences) == (9, ("x",))
    await whole(client, temperature=0)
    assert not engine.requests[1].sampling.is_sampled


# What a template that knows no tools is given of it.
USED = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"system": "Be brief."}, "[system]Be brief.\n[user]Hi\n[assistant]"),
        (
            {
                "system": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "b"},
                ]
            },
            "[system]a\nb\n[user]Hi\n[assistant]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            "[user]a\nb\n[assistant]",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "[user]a\nb\n[assistant]",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is ("}]},
            "[user]a\n[assistant]The answer is (",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                            {"type": "text", "text": "and?"},
                        ],
                    },
                ]
            },
            f"[user]a\n[assistant]{USED}\n[tool]sunny\n[user]and?\n[assistant]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [USE]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t1",
                                "is_error": True,
                                "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}],
                            }
                        ],
                    },
                ]
            },
            f"[user]a\n[assistant]{USED}\n[tool]Error: no\ncity\n[assistant]",
        ),
    ],
)
async def test_prompts(client: httpx.AsyncClient, engine: FakeEngine, fields: Any, prompt: str) -> None:
    engine.limits = Limits(max_input_tokens=200, max_total_tokens=300, pool_tokens=1000)
    await whole(client, **fields)
    assert engine.requests[0].inputs == prompt
    body = {"model": "m", "messages": ask()["messages"]} | fields
    count = await client.post(COUNT, json=body)
    assert count.json() == {"input_tokens": len(prompt)}


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "me"}},
        {"metadata": {}},
        {"service_tier": "auto"},
        {"speed": "standard"},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive"}},
        {"output_config": {"effort": "high"}},
        {"output_config": {}},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"container": None, "mcp_servers": [], "context_management": None, "inference_geo": None},
        {"tools": []},
        {"top_k": 0, "top_p": 1.0},
        {"stream": False},
    ],
)
async def test_values_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient, fields: Any) -> None:
    await whole(client, **fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": None}, "messages: "),
        ({"max_tokens": 0}, "max_tokens: must be greater than or equal to 1. Given: 0"),
        ({"max_tokens": None}, "max_tokens: "),
        ({"model": None}, "model: "),
        ({"temperature": 1.1}, "temperature: must be less than or equal to 1. Given: 1.1"),
        ({"top_p": -1}, "top_p: "),
        ({"top_k": -1}, "top_k: "),
        ({"stop_sequences": [""]}, "stop_sequences.0: "),
        ({"stop_sequences": ["a"] * 5}, "`stop_sequences` supports up to 4 stop sequences. Given: 5"),
        ({"stop_sequences": "a"}, "stop_sequences: "),
        ({"container": "c"}, "container: is not supported"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: is not supported"),
        ({"output_config": {"effort": "some"}}, "output_config.effort: must be 'low'"),
        ({"speed": "fast"}, "speed: must be 'standard'"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: this field is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "must be less than `max_tokens` 50. Given: 1024"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens: must be greater"),
        ({"thinking": {"type": "deep"}}, "thinking: type `deep` is not supported"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` needs `tools`"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice: type `some` is not supported"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice: must be an object of type `auto`, `any`"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: this field is required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: "),
        ({"tools": [TOOL | {"defer_loading": 5}]}, "tools.0.defer_loading: "),
        ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools.0.input_examples: is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0: type `bash_20250124` is not supported"),
        ({"system": 5}, "system: "),
        ({"system": [{"type": "image"}]}, "system.0: type `image` is not supported"),
        ({"max_tokens": 190}, "`messages` tokens + `max_tokens` must be <= 200"),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, fields: Any, says: str) -> None:
    response = await client.post(MESSAGES, json=ask(**fields))
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert says in body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"]


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"content": "Hi"}], "messages.0.role: this field is required"),
        ([{"role": "tool", "content": "Hi"}], "messages.0.role: "),
        ([{"role": "user", "content": 5}], "messages.0.content: "),
        ([{"role": "user", "content": ""}], "messages.0.content: cannot be empty"),
        ([{"role": "user", "content": []}], "messages.0.content: cannot be empty"),
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "http://x"}}]}],
            "messages.0.content.0: type `document` is not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text: this field is required"),
        ([{"role": "user", "content": [USE]}], "messages.0.content.0: type `tool_use` belongs"),
        ([{"role": "assistant", "content": [RESULT]}], "messages.0.content.0: type `tool_result` belongs"),
        ([{"role": "user", "content": [RESULT]}], "messages.0.content.0.tool_use_id: no tool_use"),
        (
            [{"role": "assistant", "content": [USE]}, {"role": "user", "content": "and?"}],
            "messages.0.content: each tool_use must have its tool_result in the next message: `t1`",
        ),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [USE]}], "messages.1.content: each"),
        (
            [
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [RESULT | {"content": [{"type": "document"}]}]},
            ],
            "messages.1.content.0.content.0: type `document` is not supported",
        ),
    ],
)
async def test_messages_that_are_refused(client: httpx.AsyncClient, messages: Any, says: str) -> None:
    for path, body in ((MESSAGES, ask(messages=messages)), (COUNT, {"model": "m", "messages": messages})):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(ShardFailed("rank 1 died"), 500, "api_error"), (StepFailed("NaN"), 500, "api_error")],
)
async def test_an_error_before_the_first_token(serve: Serve, error: Any, status: int, kind: str) -> None:
    async with serve(FakeEngine(error=error)) as client:
        for stream in (False, True):
            response = await client.post(MESSAGES, json=ask(stream=stream))
            assert response.status_code == status
            assert response.json()["error"]["type"] == kind


async def test_an_error_in_a_stream_is_an_event(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"), fails_at=1)) as client:
        *_, last = await events(client)
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert "rank 1 died" in last["error"]["message"]


async def test_too_many_requests_are_an_overload(serve: Serve) -> None:
    async with serve(FakeEngine(max_requests=0)) as client:
        response = await client.post(MESSAGES, json=ask())
    assert response.status_code == 529
    assert response.json()["error"]["type"] == "overloaded_error"
    assert response.headers["retry-after"] == "1"


async def test_errors_around_the_routes(client: httpx.AsyncClient) -> None:
    def kind(response: httpx.Response) -> tuple[int, str]:
        return response.status_code, response.json()["error"]["type"]

    assert kind(await client.get(MESSAGES)) == (405, "invalid_request_error")
    assert kind(await client.post("/v1/messages/batches", json={})) == (404, "not_found_error")
    assert kind(await client.post(MESSAGES, content=b"{")) == (415, "invalid_request_error")
    headers = {"content-type": "application/json"}
    assert kind(await client.post(MESSAGES, content=b"{", headers=headers)) == (400, "invalid_request_error")
    version = {"anthropic-version": "2023-06-01"}
    assert kind(await client.get("/v1/nowhere", headers=version)) == (404, "not_found_error")
    assert (await client.get("/v1/nowhere")).json()["error_type"] == "not_found"


async def test_a_body_that_is_too_long(serve: Serve) -> None:
    async with serve(FakeEngine(), payload_limit=10) as client:
        response = await client.post(MESSAGES, json=ask())
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_keys(serve: Serve, path: str) -> None:
    body = ask() if path == MESSAGES else {"model": "m", "messages": ask()["messages"]}
    async with serve(FakeEngine(), api_key="secret") as client:
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "secret"}):
            response = await client.post(path, json=body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        for headers in (
            {"x-api-key": "secret"},
            {"authorization": "Bearer secret"},
            {"x-api-key": "secret", "authorization": "Bearer other"},
        ):
            assert (await client.post(path, json=body, headers=headers)).status_code == 200


async def test_versions(client: httpx.AsyncClient) -> None:
    for path, body in ((MESSAGES, ask()), (COUNT, {"model": "m", "messages": ask()["messages"]})):
        for version in ("2023-06-01", "2026-10-21"):
            good = await client.post(path, json=body, headers={"anthropic-version": version, "anthropic-beta": "x"})
            assert good.status_code == 200
            assert re.fullmatch(r"req_[0-9a-f]{32}", good.headers["request-id"])
        refused = await client.post(path, json=body, headers={"anthropic-version": "2023-01-01"})
        assert refused.status_code == 400
        assert (
            "anthropic-version: must be 2023-06-01 or 2026-10-21. Given: '2023-01-01'"
            in refused.json()["error"]["message"]
        )


async def test_count_tokens_ignores_what_makes_no_prompt(client: httpx.AsyncClient) -> None:
    response = await client.post(COUNT, json=ask())
    assert response.status_code == 200, response.text


async def test_a_ping_keeps_an_idle_stream_alive(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "EventStream", partial(EventStream, keep_alive_seconds=0.01))
    async with serve(FakeEngine(pause=0.1)) as client:
        received = await events(client)
    assert {"type": "ping"} in received
    assert [event for event in received if event["type"] != "ping"][-1]["type"] == "message_stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_sequence(
    listening: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.pause = 60.0
    with pytest.raises(httpx.ReadTimeout):
        await listening.post(MESSAGES, json=ask(stream=stream), timeout=0.3)
    await eventually(engine.was_cancelled, "cancel")
