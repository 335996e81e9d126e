"""Whatever the tokens, the stops and the tokens a step: every API's stream is sound on the wire, and adds up.

`make fuzz` tries thousands of them.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fakes import EOS, FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NAMES = ("event: ", "data: ")

# What could be taken for a frame, a line or an end of the protocol, beside any text at all.
pieces = st.text(max_size=8) | st.sampled_from(
    ["\n\n", "data: ", "\r", "[DONE]", "event: x\n", "\u2028", "\x00", "\ufeff", ":", "\\", '"', "</", "\U0001f600"]
)
scripts = st.lists(pieces.filter(lambda piece: piece != EOS), max_size=12)
stops = st.lists(st.text(min_size=1, max_size=3), max_size=4)
each = settings(  # an example is two requests
    max_examples=settings.default.max_examples // 4,  # type: ignore[union-attr]
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def frames(body: bytes) -> Iterator[dict[str, Any]]:
    """The records of a stream, which must be nothing but frames of one line of JSON each."""
    *whole, rest = body.decode("utf-8").split("\n\n")
    assert rest == ""
    for frame in whole:
        name, _, data = frame.rpartition("\n")
        assert data.startswith("data: "), frame
        assert name == "" or (name.startswith("event: ") and "\n" not in name), frame
        if data != "data: [DONE]":
            record = json.loads(data.removeprefix("data: "))
            assert name in ("", f"event: {record.get('type')}")
            yield record


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50} | fields


def native(records: list[dict[str, Any]]) -> str:
    """The text of `/generate_stream`: its last event says it, the tokens add up to no less."""
    text: str = records[-1]["generated_text"]
    assert "".join(record["token"]["text"] for record in records if not record["token"]["special"]).startswith(text)
    return text


def messages_text(records: list[dict[str, Any]]) -> str:
    deltas = [record["delta"] for record in records if record["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")


def responses_text(records: list[dict[str, Any]]) -> str:
    text = "".join(record["delta"] for record in records if record["type"] == "response.output_text.delta")
    assert [record["text"] for record in records if record["type"] == "response.output_text.done"] in ([], [text])
    return text


# Path, what is asked, the name of the stops, the text of a whole answer, the text of a stream.
APIS: list[tuple[str, dict[str, Any], str, Callable[[Any], str], Callable[[list[dict[str, Any]]], str]]] = [
    (
        "/v1/chat/completions",
        chat(),
        "stop",
        lambda answer: answer["choices"][0]["message"]["content"] or "",
        lambda records: "".join(r["choices"][0]["delta"].get("content") or "" for r in records if r["choices"]),
    ),
    (
        "/v1/completions",
        {"prompt": "Hi", "max_tokens": 50},
        "stop",
        lambda answer: answer["choices"][0]["text"],
        lambda records: "".join(r["choices"][0]["text"] for r in records if r["choices"]),
    ),
    (
        "/v1/messages",
        chat(model="m"),
        "stop_sequences",
        lambda answer: "".join(block["text"] for block in answer["content"]),
        messages_text,
    ),
    (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 50, "store": False},
        "",
        lambda answer: "".join(part["text"] for item in answer["output"] for part in item["content"]),
        responses_text,
    ),
]


async def posted(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("api", APIS, ids=[path for path, *_ in APIS])
@each
@given(script=scripts, stops=stops, stride=st.integers(1, 4))
async def test_deltas_add_up_to_the_whole_answer(
    client: httpx.AsyncClient, engine: FakeEngine, api: Any, script: list[str], stops: list[str], stride: int
) -> None:
    path, body, name, whole_text, streamed_text = api
    engine.pieces, engine.stride = script, stride
    asked = body | ({name: stops} if name else {})
    whole = whole_text((await posted(client, path, asked)).json())
    response = await posted(client, path, asked | {"stream": True})
    assert streamed_text(list(frames(response.content))) == whole


@each
@given(script=scripts, stops=stops)
async def test_a_native_stream_adds_up_to_the_whole_answer(
    client: httpx.AsyncClient, engine: FakeEngine, script: list[str], stops: list[str]
) -> None:
    engine.pieces = script
    asked = {"inputs": "Hi", "parameters": {"stop": stops, "max_new_tokens": 50}}
    whole = (await posted(client, "/generate", asked)).json()["generated_text"]
    response = await posted(client, "/generate_stream", asked)
    assert native(list(frames(response.content))) == whole
