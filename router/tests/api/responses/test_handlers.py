"""OpenAI's Responses API, over a scripted engine."""

import json
import re
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import ShardFailed

RESPONSES = "/v1/responses"
TEXT = "Hello world!"
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
CALL_TEXT = '{"name": "f", "arguments": {"a": 1}}'  # where the template knows no calls
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


async def whole(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(RESPONSES, json={"input": "Hi"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """The events of a stream; each must have its type as its name, and the next number."""
    response = await client.post(RESPONSES, json={"input": "Hi", "stream": True} | fields)
    assert response.status_code == 200, response.text
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    received = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        received.append(event)
    return received


async def test_a_response(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await whole(client, model="gpt", metadata={"a": "b"}, temperature=0.5)
    assert re.fullmatch(r"resp_[0-9a-f]{32}", answer.pop("id"))
    assert answer.pop("created_at") > 1_700_000_000
    assert answer.pop("completed_at") > 1_700_000_000
    (message,) = answer.pop("output")
    assert re.fullmatch(r"msg_[0-9a-f]{32}", message.pop("id"))
    assert message == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
    }
    assert answer == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "gpt",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 25,
        },
        "user": None,
    }
    assert engine.requests[0].inputs == "[user]Hi\n[assistant]"


async def test_a_stream(client: httpx.AsyncClient) -> None:
    received = await events(client)
    assert [event["type"] for event in received] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, _, added, part, *deltas, text_done, part_done, item_done, completed = received
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    item = added["item"]
    assert (item["status"], item["content"], added["output_index"]) == ("in_progress", [], 0)
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert {event["item_id"] for event in (part, *deltas, text_done, part_done)} == {item["id"]}
    assert "".join(event["delta"] for event in deltas) == text_done["text"] == part_done["part"]["text"] == TEXT
    assert completed["response"]["output"] == [item_done["item"]]
    assert item_done["item"]["status"] == "completed"
    assert completed["response"]["usage"]["total_tokens"] == 25
    stored = (await client.get(f"{RESPONSES}/{created['response']['id']}")).json()
    assert stored == completed["response"]


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("max_output_tokens", [1, 3, 50])
async def test_streamed_and_whole_responses_are_equal(serve: Serve, stride: int, max_output_tokens: int) -> None:
    fields = {
        "max_output_tokens": max_output_tokens,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
    }
    async with serve(FakeEngine(stride=stride)) as client:
        answer = await whole(client, **fields)
        streamed = (await events(client, **fields))[-1]["response"]
    for response in (answer, streamed):
        assert response.pop("id") != response["output"][0].pop("id")
        assert response.pop("created_at") <= (response.pop("completed_at") or float("inf"))
    assert streamed == answer
    is_cut = max_output_tokens < 50
    assert answer["status"] == ("incomplete" if is_cut else "completed")
    assert answer["output"][0]["status"] == answer["status"]
    assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)


async def test_a_cut_stream_ends_incomplete(client: httpx.AsyncClient) -> None:
    *_, last = await events(client, max_output_tokens=2)
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"][0]["text"] == "Hello wor"


async def test_logprobs(client: httpx.AsyncClient) -> None:
    answer = await whole(client, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == TEXT
    assert logprobs[0]["top_logprobs"][1] == {"token": "x", "logprob": -9999.0, "bytes": list(b"x")}


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await whole(client, temperature=0.5, top_p=0.9, max_output_tokens=9)
    sampling, stopping = engine.requests[0].sampling, engine.requests[0].stopping
    assert (sampling.do_sample, sampling.temperature, sampling.top_p) == (True, 0.5, 0.9)
    assert stopping.max_new_tokens == 9


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"instructions": "Be brief."}, "[system]Be brief.\n[user]Hi\n[assistant]"),
        (
            {"instructions": "a", "input": [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]},
            "[system]a\nb\n[user]c\n[assistant]",
        ),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            "[user]a\n[assistant]",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
                    },
                    {"role": "user", "content": "c"},
                ]
            },
            "[user]a\n[assistant]b\n[user]c\n[assistant]",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
                    CALL,
                    RESULT,
                    {"role": "user", "content": "and?"},
                ]
            },
            f"[user]a\n[assistant]{CALL_TEXT}\n[tool]sunny\n[user]and?\n[assistant]",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "a"},
                    CALL,
                    RESULT | {"output": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
                ]
            },
            f"[user]a\n[assistant]{CALL_TEXT}\n[tool]b\nc\n[assistant]",
        ),
    ],
)
async def test_prompts(client: httpx.AsyncClient, engine: FakeEngine, fields: Any, prompt: str) -> None:
    await whole(client, **fields)
    inputs = engine.requests[0].inputs
    assert inputs == prompt
    count = await client.post(f"{RESPONSES}/input_tokens", json={"input": "Hi"} | fields)
    assert count.json() == {"object": "response.input_tokens", "input_tokens": len(inputs)}


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False},
        {"truncation": "disabled"},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"text": {"verbosity": "low"}},
        {"truncation": "auto"},
        {"reasoning": {"effort": None, "summary": "auto"}},
        {"include": ["reasoning.encrypted_content"], "store": False},
        {"service_tier": "auto", "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"conversation": None, "prompt": None, "moderation": None, "context_management": []},
        {"stream": None, "top_logprobs": 0},
    ],
)
async def test_values_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient, fields: Any) -> None:
    await whole(client, **fields)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "this field is required"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"content": "a"}]}, "input.0.role", "required"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "must be 'user'"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0", "type `web_search_call` is not supported"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}]},
            "input.0.content.0",
            "type `input_file` is not supported",
        ),
        ({"input": [RESULT]}, "input.0.call_id", "no function_call has this id. Given: 'c1'"),
        ({"input": [CALL]}, "input", "each function_call must have its function_call_output: `c1`"),
        ({"input": [CALL | {"arguments": "["}, RESULT]}, "input.0.arguments", "JSON text of an object"),
        ({"input": [{"type": "item_reference", "id": "no"}]}, "input.0.id", "no such item is stored"),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]},
            "input.0.encrypted_content",
            "is not supported",
        ),
        ({"previous_response_id": "resp_no"}, "previous_response_id", "no such response is stored"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0", "type `code_interpreter` is not supported"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "type `web_search` is not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "required"),
        ({"tool_choice": "any"}, "tool_choice", "type `any` is not supported"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "type `mcp` is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "type `xml` is not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "must be"),
        ({"service_tier": "first"}, "service_tier", "must be"),
        ({"background": True, "store": False}, "background", "needs `store`"),
        ({"background": "yes"}, "background", "must be"),
        ({"truncation": "middle"}, "truncation", "must be"),
        ({"conversation": "conv_1"}, "conversation", "is not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1. Given: 0"),
        ({"max_output_tokens": 190}, "max_output_tokens", "`input` tokens + `max_output_tokens` must be <= 200"),
        ({"temperature": 3}, "temperature", "less than or equal to 2. Given: 3"),
        ({"top_logprobs": 2}, "top_logprobs", "needs `message.output_text.logprobs`"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "20"),
        ({"include": ["everything"]}, "include.0", "must be 'file_search_call.results'"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512"),
        ({"metadata": {str(place): "v" for place in range(17)}}, "metadata", "at most 16"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs `stream`"),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, fields: Any, param: str, says: str) -> None:
    response = await client.post(RESPONSES, json={"input": "Hi"} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


# What is kept


async def test_a_conversation_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    first = await whole(client, instructions="Be brief.")
    second = await whole(client, input="And?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] is None
    assert engine.requests[1].inputs == f"[user]Hi\n[assistant]{TEXT}\n[user]And?\n[assistant]"
    await client.delete(f"{RESPONSES}/{first['id']}")
    await whole(client, input="So?", previous_response_id=second["id"])
    assert engine.requests[2].inputs == engine.requests[1].inputs + f"{TEXT}\n[user]So?\n[assistant]"


async def test_items_by_reference(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    message = (await whole(client))["output"][0]
    await whole(client, input=[{"type": "item_reference", "id": message["id"]}, {"role": "user", "content": "So?"}])
    assert engine.requests[1].inputs == f"[assistant]{TEXT}\n[user]So?\n[assistant]"


async def test_output_items_are_input_items(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    output = (await whole(client, include=["message.output_text.logprobs"]))["output"]
    await whole(client, input=[{"role": "user", "content": "Hi"}, *output, {"role": "user", "content": "So?"}])
    assert engine.requests[1].inputs == f"[user]Hi\n[assistant]{TEXT}\n[user]So?\n[assistant]"


async def test_retrieve_and_delete(client: httpx.AsyncClient) -> None:
    answer = await whole(client)
    path = f"{RESPONSES}/{answer['id']}"
    assert (await client.get(path, params={"stream": "false"})).json() == answer
    deleted = await client.delete(path)
    assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
    for response in (
        await client.get(path),
        await client.delete(path),
        await client.get(f"{path}/input_items"),
        await client.post(f"{path}/cancel"),
    ):
        assert response.status_code == 404
        assert answer["id"] in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "not_found"


async def test_what_has_ended_cannot_be_cancelled(client: httpx.AsyncClient) -> None:
    answer = await whole(client)
    response = await client.post(f"{RESPONSES}/{answer['id']}/cancel")
    assert response.status_code == 400
    assert "background" in response.json()["error"]["message"]


async def test_nothing_is_kept_unasked(client: httpx.AsyncClient) -> None:
    answer = await whole(client, store=False)
    assert answer["store"] is False
    assert (await client.get(f"{RESPONSES}/{answer['id']}")).status_code == 404


async def test_the_store_can_be_off_or_full(serve: Serve) -> None:
    async with serve(FakeEngine(), max_stored_responses=0) as client:
        answer = await whole(client)
        assert answer["store"] is False
        assert (await client.get(f"{RESPONSES}/{answer['id']}")).status_code == 404
    async with serve(FakeEngine(), max_stored_responses=2) as client:
        ids = [(await whole(client))["id"] for _ in range(3)]
        assert [(await client.get(f"{RESPONSES}/{id}")).status_code for id in ids] == [404, 200, 200]


async def test_input_items(client: httpx.AsyncClient) -> None:
    first = await whole(client, input=[{"role": "user", "content": text} for text in "ab"])
    answer = await whole(client, input="c", previous_response_id=first["id"])
    path = f"{RESPONSES}/{answer['id']}/input_items"

    async def listed(**params: Any) -> Any:
        response = await client.get(path, params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def texts(page: Any) -> list[str]:
        return [item["content"][0]["text"] for item in page["data"]]

    everything = await listed()
    assert texts(everything) == ["c", TEXT, "b", "a"]
    assert (everything["object"], everything["has_more"]) == ("list", False)
    assert all(re.fullmatch(r"msg_[0-9a-f]{32}", item["id"]) for item in everything["data"])
    page = await listed(order="asc", limit=3)
    assert (texts(page), page["has_more"]) == (["a", "b", TEXT], True)
    assert page["last_id"] == page["data"][-1]["id"]
    assert texts(await listed(order="asc", limit=3, after=page["last_id"])) == ["c"]
    for params, param in (
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "x"}, "after"),
    ):
        refused = await client.get(path, params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


# Failures


async def test_an_error_before_the_first_token(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"))) as client:
        for stream in (False, True):
            response = await client.post(RESPONSES, json={"input": "Hi", "stream": stream})
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"


async def test_a_stream_that_fails_says_so_and_is_kept(serve: Serve) -> None:
    async with serve(FakeEngine(error=ShardFailed("rank 1 died"), fails_at=1)) as client:
        *_, last = await events(client)
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert "rank 1 died" in last["response"]["error"]["message"]
        stored = await client.get(f"{RESPONSES}/{last['response']['id']}")
        assert stored.json() == last["response"]


async def test_keys(serve: Serve) -> None:
    async with serve(FakeEngine(), api_key="secret") as client:
        headers = {"authorization": "Bearer secret"}
        answer = (await client.post(RESPONSES, json={"input": "Hi"}, headers=headers)).json()
        path = f"{RESPONSES}/{answer['id']}"
        for method, address in (
            ("POST", RESPONSES),
            ("POST", f"{RESPONSES}/input_tokens"),
            ("GET", path),
            ("POST", f"{path}/cancel"),
            ("GET", f"{path}/input_items"),
            ("DELETE", path),
        ):
            response = await client.request(method, address, json={"input": "Hi"})
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        assert (await client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_sequence(
    listening: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.pause = 60.0
    with pytest.raises(httpx.ReadTimeout):
        await listening.post(RESPONSES, json={"input": "Hi", "stream": stream}, timeout=0.3)
    await eventually(engine.was_cancelled, "cancel")


@pytest.mark.parametrize("kind", ["web_search", "image_generation", "tool_search"])
async def test_b6_tools_that_openai_runs_are_not_shown_to_the_model(kind: str, serve: Serve) -> None:
    engine = FakeEngine()
    offered = {"type": kind, "external_web_access": False}
    async with serve(engine) as client:
        answer = await client.post(RESPONSES, json={"input": "Hi", "tools": [offered]})
    assert answer.status_code == 200
    assert answer.json()["tools"] == [offered]
    assert kind not in engine.requests[0].inputs
    async with serve(FakeEngine(), strict_fields=True) as client:
        refused = await client.post(RESPONSES, json={"input": "Hi", "tools": [offered]})
    assert refused.status_code == 400
    assert f"tools.0: type `{kind}` is not supported" in refused.json()["error"]["message"]


async def test_references_are_bounded_by_what_they_refer_to(serve: Serve, engine: FakeEngine) -> None:
    """A body of 160 kB that named an item of 300 kB 3,000 times took 1.9 GB of memory."""
    long = {"role": "user", "content": "x" * 40, "id": "msg_long"}
    async with serve(engine, payload_limit=2000) as client:
        made = await client.post("/v1/responses", json={"input": [long]})
        assert made.status_code == 200
        reference = {"type": "item_reference", "id": "msg_long"}
        few = {"input": [reference]}
        many = {"input": [reference] * 30}
        chained = {"input": [reference] * 8, "previous_response_id": made.json()["id"]}
        for route in ("/v1/responses", "/v1/responses/input_tokens"):
            assert (await client.post(route, json=few)).status_code == 200
            for body in (many, chained):
                refused = await client.post(route, json=body)
                assert refused.status_code == 413
                assert "the stored items that it names must have at most 2000 bytes together" in refused.text
