"""Fields that carry more than they seem to: JSON within a text, and what an answer repeats in each event."""

from typing import Any

import httpx
import pytest

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def chat(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]}


def items(arguments: str) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return {"input": ["Hi", call, {"type": "function_call_output", "call_id": "1", "output": "r"}][1:]}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "is nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "must be the JSON text of an object"),
        ("[1]", "must be the JSON text of an object"),
    ],
)
async def test_json_within_a_text_is_checked_as_the_body_is(
    client: httpx.AsyncClient, arguments: str, says: str
) -> None:
    for path, body, param in (
        (CHAT, chat(arguments), "messages.1.tool_calls.0.function.arguments"),
        (RESPONSES, items(arguments), "input.0.arguments"),
    ):
        response = await client.post(path, json=body)
        assert response.status_code in (400, 422), response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert says in error["message"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (r'{"a": "\ud800"}', '{"a": "\ufffd"}'),
        (r'{"\udfff": 1}', '{"\ufffd": 1}'),
        (r'{"a": [{"b": "x\uDBFF y"}]}', '{"a": [{"b": "x\ufffd y"}]}'),
        (r'{"a": "\ud83d\ude00"}', '{"a": "\U0001f600"}'),
        (r'{"a": "\\ud800"}', r'{"a": "\\ud800"}'),
        ("", "{}"),
    ],
)
async def test_halves_of_characters_within_arguments_are_replaced(
    client: httpx.AsyncClient, arguments: str, shown: str
) -> None:
    """The text itself has no surrogate, only the escape of one: what it means would fail in the tokenizer."""
    response = await client.post("/chat_tokenize", json=chat(arguments))
    assert response.status_code == 200, response.text
    assert f'"arguments": {shown}' in response.json()["templated_text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        (RESPONSES, {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}),
    ],
)
async def test_a_model_name_that_every_event_would_repeat_has_a_bound(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """A name of two megabytes made a stream of two megabytes a token."""
    for length, expected in ((1024, (200,)), (1025, (400, 422))):
        response = await client.post(path, json=body | {"model": "m" * length, "stream": True})
        assert response.status_code in expected, response.text[:200]
    assert "model" in response.text
    assert len(response.content) < 1000
