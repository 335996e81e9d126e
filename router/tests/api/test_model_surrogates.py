"""Arguments that a model writes with the escape of half a character: answered on every API, and taken back."""

import json
from typing import Any

import pytest
from fakes import FakeEngine, Serve

from funitel.router.core.request import Limits

CALL = r'{"name": "f", "arguments": {"city": "\ud800", "\udfff": [1, "\ud83d\ude00"]}}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}


@pytest.fixture
def engine() -> FakeEngine:
    limits = Limits(max_input_tokens=4000, max_total_tokens=4200, pool_tokens=9000)
    return FakeEngine(pieces=[CALL[:20], CALL[20:]], limits=limits)


async def test_a_chat_takes_back_what_the_model_wrote(client: Any, engine: FakeEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": FUNCTION}]}
    message = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "f"
    chat["messages"] += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}]
    again = await client.post("/v1/chat/completions", json=chat)
    assert again.status_code == 200, again.text
    assert "\N{REPLACEMENT CHARACTER}" in engine.requests[-1].inputs
    assert "\U0001f600" in engine.requests[-1].inputs


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_of_anthropic_has_it(client: Any, stream: bool) -> None:
    body = {
        "model": "m",
        "max_tokens": 90,
        "stream": stream,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
    }
    answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert "tool_use" in answer.text
    assert "error" not in answer.text
    if not stream:
        body["messages"] += [
            {"role": "assistant", "content": answer.json()["content"]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": answer.json()["content"][-1]["id"], "content": "r"}],
            },
        ]
        again = await client.post("/v1/messages", json=body)
        assert again.status_code == 200, again.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_it_and_goes_on(serve: Serve, engine: FakeEngine, stream: bool) -> None:
    async with serve(engine) as client:
        body = {"input": "Hi", "tools": [{"type": "function"} | FUNCTION], "stream": stream}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert "function_call" in answer.text
        assert "response.failed" not in answer.text
        if not stream:
            found = answer.json()
            (call,) = [item for item in found["output"] if item["type"] == "function_call"]
            json.loads(call["arguments"])
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "r"}
            again = await client.post(
                "/v1/responses", json=body | {"previous_response_id": found["id"], "input": [result]}
            )
            assert again.status_code == 200, again.text
