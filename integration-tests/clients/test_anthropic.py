"""Anthropic's Python client, as it is."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from funitel_testing.servers import Server

anthropic = pytest.importorskip("anthropic", reason="install the extra `clients`")

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY = {"extra_body": {"temperature": 0}}  # the client itself names it no longer
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def _prompt_tokens(message: Any) -> int:
    """Tokens of the prompt, computed now or before."""
    tokens: int = message.usage.input_tokens + message.usage.cache_read_input_tokens
    return tokens


def test_messages(client: Any) -> None:
    message = client.messages.create(model="any", max_tokens=30, messages=MESSAGES, **GREEDY)
    (block,) = message.content
    assert "Paris" in block.text
    assert (message.model, message.role, message.type) == ("any", "assistant", "message")
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 30
    assert message._request_id.startswith("req_")


def test_a_stop_sequence_is_reported(client: Any) -> None:
    message = client.messages.create(
        model="any", max_tokens=30, messages=MESSAGES, stop_sequences=["zzz", "Paris"], **GREEDY
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in message.content[0].text


def test_a_system_prompt_and_an_answer_that_was_begun(client: Any) -> None:
    message = client.messages.create(
        model="any",
        max_tokens=8,
        system=[{"type": "text", "text": "You know geography.", "cache_control": {"type": "ephemeral"}}],
        messages=[*MESSAGES, {"role": "assistant", "content": "The capital of France is"}],
        **GREEDY,
    )
    assert message.content[0].text.startswith(" Paris")


def test_streamed(client: Any) -> None:
    whole = client.messages.create(model="any", max_tokens=30, messages=MESSAGES, **GREEDY)
    with client.messages.stream(model="any", max_tokens=30, messages=MESSAGES, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 3, "it came in one piece"
    assert "".join(pieces) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert (_prompt_tokens(final), final.usage.output_tokens) == (_prompt_tokens(whole), whole.usage.output_tokens)


def test_events(client: Any) -> None:
    events = list(client.messages.create(model="any", max_tokens=5, messages=MESSAGES, stream=True, **GREEDY))
    types = [event.type for event in events]
    assert types[:2] == ["message_start", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2].usage.output_tokens == 5


def test_a_stream_left_early(client: Any) -> None:
    with client.messages.stream(model="any", max_tokens=400, messages=MESSAGES, **GREEDY) as stream:
        next(iter(stream))
    assert client.messages.create(model="any", max_tokens=2, messages=MESSAGES, **GREEDY).usage.output_tokens == 2


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_tools(client: Any, kind: str) -> None:
    fields: dict[str, Any] = {"model": "any", "max_tokens": 100, "messages": MESSAGES, "tools": [TOOL], **GREEDY}
    fields["tool_choice"] = {"type": kind, "name": "get_weather"} if kind == "tool" else {"type": kind}
    fields["tool_choice"]["disable_parallel_tool_use"] = True
    message = client.messages.create(**fields)
    (use,) = message.content
    assert message.stop_reason == "tool_use"
    assert (use.type, use.name) == ("tool_use", "get_weather")
    assert use.input["city"] in ("Paris", "Rome")
    with client.messages.stream(**fields) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert "".join(parts)
    assert streamed.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 21 degrees."}
    answered = client.messages.create(
        model="any",
        max_tokens=20,
        messages=[*MESSAGES, message.to_param(), {"role": "user", "content": [result]}],
        tools=[TOOL],
        tool_choice={"type": "none"},
        **GREEDY,
    )
    assert answered.content[0].type == "text"


def test_a_json_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]}
    message = client.messages.create(
        model="any",
        max_tokens=60,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}},
        **GREEDY,
    )
    assert message.content[0].text.replace(" ", "").replace("\n", "") in ('{"capital":"Paris"}', '{"capital":"Rome"}')


def test_count_tokens(client: Any) -> None:
    count = client.messages.count_tokens(model="any", messages=MESSAGES)
    message = client.messages.create(model="any", max_tokens=1, messages=MESSAGES)
    assert count.input_tokens == _prompt_tokens(message)
    longer = client.messages.count_tokens(model="any", messages=MESSAGES, system="Be brief.", tools=[TOOL])
    assert longer.input_tokens > count.input_tokens


def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="any", max_tokens=0, messages=MESSAGES)
    assert caught.value.type == "invalid_request_error"
    assert "max_tokens" in caught.value.api_message
    assert caught.value.request_id
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model="any", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()


async def test_async(async_client: Any) -> None:
    message = await async_client.messages.create(model="any", max_tokens=30, messages=MESSAGES, **GREEDY)
    assert "Paris" in message.content[0].text
    async with async_client.messages.stream(model="any", max_tokens=30, messages=MESSAGES, **GREEDY) as stream:
        pieces = [piece async for piece in stream.text_stream]
    assert "".join(pieces) == message.content[0].text
