"""OpenAI's routes, over a scripted engine."""

import json
import re
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import ShardFailed

CHAT = "/v1/chat/completions"
TEXT = "Hello world!"
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def ask(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}]} | fields


async def chunks(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    response = await client.post(CHAT, json=ask(stream=True, **fields))
    assert response.status_code == 200, response.text
    *frames, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def whole(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(CHAT, json=ask(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_model_by_its_name(client: httpx.AsyncClient, serve: Serve) -> None:
    (listed,) = (await client.get("/v1/models")).json()["data"]
    assert (await client.get(f"/v1/models/{listed['id']}")).json() == listed
    response = await client.get("/v1/models/other/model")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert "'other/model'" in error["message"]
    async with serve(FakeEngine(), served_model_name="org/name") as named:
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            assert (await named.get(path)).json()["id"] == "org/name"


async def test_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await whole(client)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").endswith("-native")
    assert answer.pop("model").startswith("/")
    assert answer == {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
    assert engine.requests[0].inputs == "[user]Hi\n[assistant]"
    assert not engine.requests[0].add_special_tokens


async def test_a_stream(client: httpx.AsyncClient) -> None:
    received = await chunks(client)
    assert len({chunk["id"] for chunk in received}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in received)
    assert all(chunk["usage"] is None for chunk in received)
    deltas = [chunk["choices"][0]["delta"] for chunk in received]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " wor"},
        {"content": "ld"},
        {"content": "!"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in received] == [None] * 5 + ["stop"]


async def test_usage_comes_last_when_asked(client: httpx.AsyncClient) -> None:
    *received, usage = await chunks(client, stream_options={"include_usage": True})
    assert usage["choices"] == []
    assert usage["usage"] == USAGE
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in received)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True}, {"stop": "o w"}])
async def test_b1_usage_in_every_chunk(client: httpx.AsyncClient, fields: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *received, last = await chunks(client, stream_options=options, **fields)
    completions = []
    for index in range(fields.get("n", 1)):
        usages = [chunk["usage"] for chunk in received if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts[0] == 0, "the role comes before any token"
        assert counts == sorted(counts)
        assert all(usage["prompt_tokens"] == 20 for usage in usages)
        assert all(usage["total_tokens"] == 20 + usage["completion_tokens"] for usage in usages)
        completions.append(counts[-1])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(completions)
    assert last["usage"]["total_tokens"] == 20 + sum(completions)


@pytest.mark.parametrize("stop", [None, "o w", ["rld", "!"], ["zzz", "Hello world!?"], "H", " world"])
@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 50])
async def test_streamed_and_whole_answers_are_equal(serve: Serve, stop: Any, stride: int, max_tokens: int) -> None:
    fields = {"stop": stop, "max_tokens": max_tokens, "logprobs": True, "top_logprobs": 1}
    async with serve(FakeEngine(stride=stride)) as client:
        answer = (await whole(client, **fields))["choices"][0]
        choices = [chunk["choices"][0] for chunk in await chunks(client, **fields)]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == answer["message"]["content"]
    assert choices[-1]["finish_reason"] == answer["finish_reason"]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert entries == answer["logprobs"]["content"]


async def test_the_stop_is_cut_and_never_shown_in_part(client: httpx.AsyncClient) -> None:
    received = await chunks(client, stop="world")
    deltas = [chunk["choices"][0]["delta"] for chunk in received]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " "}, {}]
    assert received[-1]["choices"][0]["finish_reason"] == "stop"


async def test_length(client: httpx.AsyncClient) -> None:
    answer = await whole(client, max_tokens=1, max_completion_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == "Hello wor"


async def test_logprobs(client: httpx.AsyncClient) -> None:
    content = (await whole(client, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == TEXT
    assert content[0] == {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")},
            {"token": "x", "logprob": -9999.0, "bytes": list(b"x")},
        ],
    }


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=-1, stop=None)
    sampling = engine.requests[0].sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_p) == (True, 0.5, 0.9)
    assert (sampling.presence_penalty, sampling.count_penalty, sampling.frequency_penalty) == (1.0, -1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.seed) == (1.0, 2**64 - 1)
    assert not sampling.raw_logprobs


async def test_extensions_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, top_k=5, min_p=0.1, repetition_penalty=1.2, ignore_eos=True, logit_bias={"7": -100, "8": 2.5})
    sampling = engine.requests[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.2)
    assert sampling.logit_bias == ((7, -100.0), (8, 2.5))
    assert engine.requests[0].stopping.ignore_eos


async def test_greedy_stays_greedy(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, temperature=0, top_k=5, min_p=0.1, top_p=0.5)
    assert not engine.requests[0].sampling.is_sampled


async def test_logprobs_are_the_models_own(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, logprobs=True)
    assert engine.requests[0].sampling.raw_logprobs


async def test_several_answers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await whole(client, n=3, seed=2**64 - 2, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in engine.requests] == [2**64 - 2, 2**64 - 1, 0]
    assert answer["usage"]["prompt_tokens"] == 20
    assert answer["usage"]["completion_tokens"] == 6


async def test_several_answers_streamed(client: httpx.AsyncClient) -> None:
    *received, usage = await chunks(client, n=3, stream_options={"include_usage": True})
    texts = ["", "", ""]
    for chunk in received:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [TEXT] * 3
    assert [chunk["choices"][0]["index"] for chunk in received[:3]] != [0, 0, 0], "one after the other"
    assert usage["usage"]["completion_tokens"] == 15


async def test_more_answers_than_ever_fit(serve: Serve) -> None:
    async with serve(FakeEngine(), max_concurrent_requests=2) as client:
        response = await client.post(CHAT, json=ask(n=3))
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("fields", "is_sampled"),
    [
        ({}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0.0, "top_p": 0.5}, False),
        ({"top_p": 0}, False),
        ({"top_p": 1}, True),
    ],
)
async def test_sampling_is_on_unless_temperature_is_0(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], is_sampled: bool
) -> None:
    await whole(client, **fields)
    assert engine.requests[0].sampling.is_sampled is is_sampled


@pytest.mark.parametrize(("asked", "name"), [(None, "served"), ("tgi", "served"), ("gpt-4o", "gpt-4o"), ("", "served")])
async def test_the_model_is_echoed(serve: Serve, asked: str | None, name: str) -> None:
    async with serve(FakeEngine(), served_model_name="served") as client:
        assert (await whole(client, model=asked))["model"] == name


NEUTRAL = {
    "n": [1, None],
    "logit_bias": [{}, None, []],
    "tools": [[], None],
    "tool_choice": ["none", "auto", None],
    "functions": [[], None],
    "function_call": ["none"],
    "response_format": [{"type": "text"}, None],
    "modalities": [["text"]],
    "audio": [None],
    "web_search_options": [None],
    "reasoning_effort": [None, "none"],
    "verbosity": ["medium", "low", "high"],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "store": [True, False],
    "service_tier": ["auto", "default", "flex", "priority"],
    "parallel_tool_calls": [True],
    "safety_identifier": ["x"],
    "prompt_cache_key": ["x"],
    "prompt_cache_retention": ["24h"],
    "prediction": [{"type": "content", "content": "x"}],
    "tool_prompt": [None, "x"],
    "repetition_penalty": [None, 1.1],
    "stream_options": [None],
    "logprobs": [False, None],
    "top_logprobs": [None, 0],
}


async def test_b7_the_tier_is_answered_where_it_is_asked_for(client: httpx.AsyncClient) -> None:
    assert (await whole(client, service_tier="flex"))["service_tier"] == "default"
    assert "service_tier" not in await whole(client)
    received = await chunks(client, service_tier="auto")
    assert {chunk["service_tier"] for chunk in received} == {"default"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NEUTRAL for value in NEUTRAL[name]])
async def test_values_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient, name: str, value: Any) -> None:
    await whole(client, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("logit_bias", {"50256": -100}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"hello": 1}),
        ("logit_bias", [1.0]),
        ("tools", [{"type": "retrieval"}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tool_choice", {"type": "function"}),
        ("tool_choice", {"type": "allowed_tools"}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"type": "regex", "value": {}}),
        ("response_format", {"type": "json"}),
        ("response_format", {"type": "json", "value": "[]"}),
        ("min_p", 1.5),
        ("top_k", -2),
        ("chat_template_kwargs", {"messages": []}),
        ("continue_final_message", True),  # the last message is the user's
        ("functions", [{"name": ""}]),
        ("functions", "f"),
        ("function_call", {"name": "f"}),  # without functions
        ("function_call", "required"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("reasoning_effort", "high"),
        ("verbosity", "loud"),
        ("metadata", {"a": 1}),
        ("metadata", {"a" * 65: "b"}),
        ("user", 5),
        ("service_tier", "first"),
        ("safety_identifier", {}),
        ("prompt_cache_key", 5),
        ("store", "yes"),
        ("top_logprobs", 2),  # without logprobs
        ("stream_options", {"include_usage": True}),  # without stream
        ("frequency_penalty", 3),
        ("temperature", -1),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("seed", 2**64),
        ("messages", []),
        ("messages", None),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(client: httpx.AsyncClient, name: str, value: Any) -> None:
    response = await client.post(CHAT, json=ask(**{name: value}))
    assert response.status_code == 422
    body = response.json()
    assert body["error_type"] == "validation"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"].split(".")[0] == name
    assert name in body["error"]["message"]


async def test_a_chat_that_does_not_fit(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        response = await client.post(CHAT, json=ask(max_tokens=500, stream=stream))
        assert response.status_code == 422
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert "`messages` tokens + `max_tokens` must be <= 200" in error["message"]


async def test_more_logprobs_than_allowed(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=ask(logprobs=True, top_logprobs=21))
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "top_logprobs"
    assert "`top_logprobs` must be >= 0 and <= 20. Given: 21" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "user", "content": "Hi", "name": "me"},
        {"role": "tool", "content": "Hi", "tool_call_id": "call_1"},
        {
            "role": "assistant",
            "content": "Hi",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
        {"role": "user", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]},
    ],
)
async def test_messages_that_are_understood(client: httpx.AsyncClient, message: dict[str, Any]) -> None:
    await whole(client, messages=[message])


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"content": "Hi"}, "messages.0.role", "required"),
        ({"role": 1, "content": "Hi"}, "messages.0.role", "valid string"),
        ({"role": "user", "content": 5}, "messages.0.content", "valid list"),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]},
            "messages.0.content.0.type",
            "`file` is not supported",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function", "required"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]},
            "messages.0.tool_calls.0.function.arguments",
            "JSON text of an object",
        ),
        ({"role": "assistant", "function_call": {"name": 5}}, "messages.0.function_call.name", "string"),
    ],
)
async def test_messages_that_are_not(client: httpx.AsyncClient, message: dict[str, Any], param: str, says: str) -> None:
    response = await client.post(CHAT, json=ask(messages=[message]))
    assert response.status_code == 422
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]


async def test_an_answer_that_was_begun_is_continued(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}])
    assert engine.requests[0].inputs == "[user]Hi\n[assistant]Well,"


async def test_a_template_that_refuses(serve: Serve, model: Any) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    async with serve(FakeEngine()) as client:
        for stream in (False, True):
            response = await client.post(CHAT, json=ask(stream=stream))
            assert response.status_code == 422
            assert response.json()["error_type"] == "template_error"
            assert response.json()["error"]["message"] == "Template error: no system role"


async def test_an_error_in_a_stream_is_an_event_before_done(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"), fails_at=1)) as client:
        *_, last = await chunks(client)
    assert last["error_type"] == "generation"
    assert last["error"]["type"] == "server_error"


async def test_models(serve: Serve) -> None:
    async with serve(FakeEngine(), served_model_name="served") as client:
        assert (await client.get("/v1/models")).json() == {
            "object": "list",
            "data": [{"id": "served", "object": "model", "created": 0, "owned_by": "served", "max_model_len": 200}],
        }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_sequence(
    listening: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.pause = 60.0
    with pytest.raises(httpx.ReadTimeout):
        await listening.post(CHAT, json=ask(stream=stream), timeout=0.3)
    await eventually(engine.was_cancelled, "cancel")
