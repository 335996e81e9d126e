"""`functions` and `function_call`, the form of tools before tools: asked and answered in that form."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve
from scripted_chat import CALL, CHAT, HERMES, WIDE, ask, whole, writes

FUNCTION = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": FUNCTION}
NOW = {"name": "now"}


@pytest.fixture(autouse=True)
def hermes(model: Path) -> Path:
    (model / "chat_template.jinja").write_text(HERMES)
    return model


async def deltas(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    response = await client.post(CHAT, json=ask(stream=True, **fields))
    frames = response.text.split("\n\n")[:-2]
    return [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames]


async def test_b7_a_call_of_a_function(serve: Serve) -> None:
    engine = writes(f"<tool_call>{CALL}</tool_call>")
    async with serve(engine) as client:
        choice = await whole(client, functions=[FUNCTION, NOW])
        streamed = await deltas(client, functions=[FUNCTION, NOW])
    assert "weather" in engine.requests[0].inputs
    assert choice["finish_reason"] == "function_call"
    message = choice["message"]
    assert message["content"] is None
    assert "tool_calls" not in message
    assert message["function_call"]["name"] == "weather"
    assert json.loads(message["function_call"]["arguments"]) == {"city": "Paris"}
    calls = [part["delta"]["function_call"] for part in streamed if "function_call" in part["delta"]]
    assert calls[0] == {"name": "weather", "arguments": ""}
    assert all("name" not in call for call in calls[1:])
    assert "".join(call["arguments"] for call in calls) == message["function_call"]["arguments"]
    assert streamed[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in part["delta"] for part in streamed)


async def test_b7_a_function_by_its_name_is_forced(serve: Serve) -> None:
    engine = writes(CALL)
    async with serve(engine) as client:
        choice = await whole(client, functions=[FUNCTION, NOW], function_call={"name": "weather"})
    assert choice["message"]["function_call"]["name"] == "weather"
    assert "weather" in engine.requests[0].sampling.grammar
    assert "now" not in engine.requests[0].sampling.grammar


async def test_b7_one_call_at_most(serve: Serve) -> None:
    async with serve(writes(f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>")) as client:
        streamed = await deltas(client, functions=[FUNCTION])
    calls = [part["delta"]["function_call"] for part in streamed if "function_call" in part["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]


@pytest.mark.parametrize("choice", ["none", "auto", None])
async def test_b7_functions_may_be_left_alone(serve: Serve, choice: Any) -> None:
    engine = writes("Hello")
    async with serve(engine) as client:
        answer = await whole(client, functions=[FUNCTION], function_call=choice)
    assert answer["message"] == {"role": "assistant", "content": "Hello"}
    assert answer["finish_reason"] == "stop"
    assert ("weather" in engine.requests[0].inputs) is (choice != "none")


async def test_b7_a_conversation_with_functions(serve: Serve) -> None:
    engine = FakeEngine(limits=WIDE)
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "weather", "arguments": '{"city": "Paris"}'},
        },
        {"role": "function", "name": "weather", "content": "Sunny"},
    ]
    async with serve(engine) as client:
        await whole(client, functions=[FUNCTION], messages=messages)
    assert "<tool_call>weatherParis</tool_call>\n[tool]Sunny\n[assistant]" in engine.requests[0].inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [NOW], "tools": [TOOL]}, "functions"),
        ({"functions": [NOW], "function_call": {"name": "other"}}, "function_call"),
        ({"function_call": {"name": "now"}}, "function_call"),
        ({"functions": [{}]}, "functions.0.name"),
    ],
)
async def test_b7_what_is_refused(client: httpx.AsyncClient, fields: Any, param: str) -> None:
    response = await client.post(CHAT, json=ask(**fields))
    assert response.status_code == 422
    assert response.json()["error"]["param"] == param
