"""Tools, formats and reasoning in Anthropic's words and in those of OpenAI's Responses, over a scripted engine."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve

from funitel.proto.step import GrammarType
from funitel.router.core.request import Limits

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
WIDE = Limits(max_input_tokens=4000, max_total_tokens=5000, pool_tokens=9000)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ANTHROPIC_TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
TWO_CALLS = f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments.city }}</tool_call>"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}/{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is not false %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture
def hermes(model: Path) -> None:
    (model / "chat_template.jinja").write_text(HERMES)


@pytest.fixture
def thinking(model: Path) -> None:
    (model / "chat_template.jinja").write_text(THINKING)


def writes(text: str, length: int = 3) -> FakeEngine:
    """An engine whose model writes a text, so many characters a token."""
    pieces = [text[start : start + length] for start in range(0, len(text), length)]
    return FakeEngine(pieces=pieces, limits=WIDE)


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000}
    response = await client.post(path, json=(body if path == MESSAGES else {"input": "Hi"}) | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, path: str, **fields: Any) -> list[Any]:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000}
    body = (body if path == MESSAGES else {"input": "Hi"}) | {"stream": True} | fields
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return [json.loads(frame.split("\ndata: ")[1]) for frame in response.text.split("\n\n")[:-1]]


# Anthropic


def blocks_of(received: list[Any]) -> list[Any]:
    """The content that events amount to, put together as Anthropic's clients do."""
    blocks: list[Any] = []
    is_open = False
    for event in received:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                assert not is_open
                is_open = True
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                assert is_open
                if delta["type"] == "input_json_delta":
                    block["json"] += delta["partial_json"]
                else:
                    block[delta["type"].removesuffix("_delta")] += delta[delta["type"].removesuffix("_delta")]
            case "content_block_stop":
                is_open = False
                arguments = blocks[-1].pop("json")
                if arguments:
                    blocks[-1]["input"] = json.loads(arguments)
    assert not is_open
    return blocks


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("length", [1, 3, 1000])
async def test_tool_use(serve: Serve, length: int) -> None:
    engine = writes(TWO_CALLS, length)
    async with serve(engine) as client:
        answer = await post(client, MESSAGES, tools=[ANTHROPIC_TOOL])
        received = await events(client, MESSAGES, tools=[ANTHROPIC_TOOL])
    text, first, second = answer["content"]
    assert text["type"] == "text"
    assert text["text"].strip() == "Let me look."
    for block in (first, second):
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == "tool_use"
    for block in (streamed := blocks_of(received)):
        block.pop("id", None)
    assert streamed == [{name: value for name, value in block.items() if name != "id"} for block in answer["content"]]
    assert received[-2]["delta"]["stop_reason"] == "tool_use"
    assert '"description": "The weather."' in engine.requests[0].inputs


@pytest.mark.usefixtures("hermes")
async def test_tool_choices_of_anthropic(serve: Serve) -> None:
    async with serve(engine := writes(TWO_CALLS)) as client:
        choice: dict[str, Any] = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await post(client, MESSAGES, tools=[ANTHROPIC_TOOL], tool_choice=choice)
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
        answer = await post(client, MESSAGES, tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"})
        assert answer["content"] == [{"type": "text", "text": TWO_CALLS}]
        assert "weather" not in engine.requests[-1].inputs
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        async with serve(engine := writes(CALL)) as client:
            answer = await post(client, MESSAGES, tools=[ANTHROPIC_TOOL], tool_choice=choice)
        (block,) = answer["content"]
        assert (block["name"], block["input"]) == ("weather", {"city": "Paris"})
        assert engine.requests[0].sampling.grammar_type is GrammarType.JSON
    async with serve(writes(CALL)) as client:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        wrong = {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "nothing"}}
        response = await client.post(MESSAGES, json=body | wrong)
    assert response.status_code == 400
    assert "no tool is named `nothing`" in response.json()["error"]["message"]


@pytest.mark.usefixtures("hermes")
async def test_a_call_that_is_cut_off_has_the_input_so_far(serve: Serve) -> None:
    async with serve(writes(f"<tool_call>\n{CALL}\n</tool_call>", 1)) as client:
        cut = len("<tool_call>\n") + CALL.index("ris")
        answer = await post(client, MESSAGES, tools=[ANTHROPIC_TOOL], max_tokens=cut)
    assert answer["stop_reason"] == "max_tokens"
    assert [block["input"] for block in answer["content"]] == [{"city": "Pa"}]


@pytest.mark.usefixtures("hermes")
async def test_results_go_back_to_the_model(serve: Serve) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, use]},
        {"role": "user", "content": [result]},
    ]
    async with serve(engine := writes("It is sunny.")) as client:
        await post(client, MESSAGES, tools=[ANTHROPIC_TOOL], messages=messages)
    expected = "[user]Hi\n[assistant]Hm.<tool_call>weatherParis</tool_call>\n[tool]sunny\n[assistant]"
    assert engine.requests[0].inputs.endswith(expected)


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("length", [1, 3, 1000])
async def test_thinking(serve: Serve, length: int) -> None:
    async with serve(engine := writes("Hm, well.\n</think>\n\nYes.", length)) as client:
        enabled = {"type": "enabled", "budget_tokens": 1024}
        answer = await post(client, MESSAGES, thinking=enabled)
        received = await events(client, MESSAGES, thinking=enabled)
        omitted = await post(client, MESSAGES, thinking=enabled | {"display": "omitted"})
        streamed = await events(client, MESSAGES, thinking={"type": "adaptive", "display": "omitted"})
    assert engine.requests[0].inputs.endswith("[assistant]<think>\n")
    thought, text = answer["content"]
    assert (thought["type"], thought["thinking"].strip()) == ("thinking", "Hm, well.")
    assert text == {"type": "text", "text": "Yes."}
    assert blocks_of(received) == answer["content"]
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    assert omitted["content"] == blocks_of(streamed) == [thought | {"thinking": ""}, text]


@pytest.mark.usefixtures("thinking")
async def test_without_thinking_there_is_none(serve: Serve) -> None:
    async with serve(engine := writes("Yes.")) as client:
        assert (await post(client, MESSAGES))["content"] == [{"type": "text", "text": "Yes."}]
    assert engine.requests[0].inputs.endswith("[assistant]")
    async with serve(writes("<think>Hm.</think>Yes.")) as client:  # a model that thinks all the same
        assert (await post(client, MESSAGES))["content"] == [{"type": "text", "text": "Yes."}]
        received = await events(client, MESSAGES, thinking={"type": "disabled"})
        assert [block["text"] for block in blocks_of(received)] == ["Yes."]


@pytest.mark.usefixtures("thinking")
async def test_thoughts_go_back_to_the_model(serve: Serve) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    async with serve(engine := writes("Yes.")) as client:
        await post(client, MESSAGES, messages=messages)
    assert "[assistant]hm/b\n" in engine.requests[0].inputs


async def test_a_model_that_cannot_think(client: httpx.AsyncClient) -> None:
    body = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "Hi"}]}
    response = await client.post(MESSAGES, json=body | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert response.status_code == 400


async def test_formats(serve: Serve) -> None:
    for path, fields in (
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
    ):
        async with serve(engine := writes('{"city": "Paris"}')) as client:
            answer = await post(client, path, **fields)
        sampling = engine.requests[0].sampling
        assert sampling.grammar_type is GrammarType.JSON
        assert json.loads(sampling.grammar) == ({"type": "object"} if "json_object" in str(fields) else SCHEMA)
    assert answer["text"]["format"] == {"type": "json_object"}


# Responses


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("length", [1, 3, 1000])
async def test_function_calls(serve: Serve, length: int) -> None:
    engine = writes(TWO_CALLS, length)
    async with serve(engine) as client:
        answer = await post(client, RESPONSES, tools=[RESPONSES_TOOL])
        received = await events(client, RESPONSES, tools=[RESPONSES_TOOL])
    message, first, second = answer["output"]
    assert message["content"][0]["text"].strip() == "Let me look."
    for call in (first, second):
        assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
        assert json.loads(call["arguments"]) == {"city": "Paris"}
    assert first["call_id"] != second["call_id"]
    assert answer["status"] == "completed"
    assert answer["tools"] == [
        RESPONSES_TOOL | {"strict": None, "defer_loading": None, "allowed_callers": None, "output_schema": None}
    ]
    types = [event["type"] for event in received]
    place = [place for place, event in enumerate(received) if event.get("item", {}).get("type") == "function_call"]
    first_call = types[place[0] : place[1] + 1]
    assert first_call[0] == "response.output_item.added"
    assert set(first_call[1:-2]) == {"response.function_call_arguments.delta"}
    assert first_call[-2:] == ["response.function_call_arguments.done", "response.output_item.done"]
    done = [event for event in received if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2]
    assert received[-1]["response"]["output"] == [event["item"] for event in done]
    deltas = [event["delta"] for event in received if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == first["arguments"] + second["arguments"]


@pytest.mark.usefixtures("hermes")
async def test_tool_choices_of_responses(serve: Serve) -> None:
    other = RESPONSES_TOOL | {"name": "other"}
    async with serve(engine := writes(TWO_CALLS)) as client:
        answer = await post(client, RESPONSES, tools=[RESPONSES_TOOL], parallel_tool_calls=False)
        assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
        assert answer["parallel_tool_calls"] is False
        answer = await post(client, RESPONSES, tools=[RESPONSES_TOOL], tool_choice="none")
        assert [item["type"] for item in answer["output"]] == ["message"]
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
        answer = await post(client, RESPONSES, tools=[RESPONSES_TOOL, other], tool_choice=allowed)
        assert answer["tool_choice"] == allowed
        assert "other" not in engine.requests[-1].inputs
        allowed["tools"] = [{"type": "function", "name": "nothing"}]
        body = {"input": "Hi", "tools": [RESPONSES_TOOL], "tool_choice": allowed}
        response = await client.post(RESPONSES, json=body)
        assert response.json()["error"]["param"] == "tool_choice.tools.0.name"
    for choice in ("required", {"type": "function", "name": "weather"}):
        async with serve(engine := writes(CALL)) as client:
            answer = await post(client, RESPONSES, tools=[RESPONSES_TOOL, other], tool_choice=choice)
        assert [item["type"] for item in answer["output"]] == ["function_call"]
        assert answer["tool_choice"] == choice
        assert engine.requests[0].sampling.grammar_type is GrammarType.JSON


@pytest.mark.usefixtures("hermes")
async def test_a_conversation_with_calls_goes_on(serve: Serve) -> None:
    async with serve(engine := writes(f"<tool_call>\n{CALL}\n</tool_call>")) as client:
        first = await post(client, RESPONSES, tools=[RESPONSES_TOOL])
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        await post(client, RESPONSES, input=[result], previous_response_id=first["id"], tools=[RESPONSES_TOOL])
        expected = "[user]Hi\n[assistant]<tool_call>weatherParis</tool_call>\n[tool]sunny\n[assistant]"
        assert engine.requests[1].inputs.endswith(expected)
        body = {"input": "Well?", "previous_response_id": first["id"]}
        refused = await client.post(RESPONSES, json=body)
        assert refused.status_code == 400
        assert call["call_id"] in refused.json()["error"]["message"]


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("length", [1, 3, 1000])
async def test_reasoning(serve: Serve, length: int) -> None:
    async with serve(engine := writes("Hm, well.\n</think>\n\nYes.", length)) as client:
        answer = await post(client, RESPONSES, reasoning={"effort": "high", "summary": "auto"})
        received = await events(client, RESPONSES)
        thought, message = answer["output"]
        follow = [{"role": "user", "content": "a"}, thought, message, {"role": "user", "content": "b"}]
        await post(client, RESPONSES, input=follow)
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert thought["content"][0]["type"] == "reasoning_text"
    assert thought["content"][0]["text"].strip() == "Hm, well."
    assert message["content"][0]["text"] == "Yes."
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert answer["reasoning"] == {"effort": "high", "summary": "auto"}
    deltas = [event["delta"] for event in received if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought["content"][0]["text"]
    kinds = [event["item"]["type"] for event in received if event["type"] == "response.output_item.done"]
    assert kinds == ["reasoning", "message"]
    assert "[assistant]Hm, well." in engine.requests[-1].inputs


async def test_reasoning_where_there_is_none(client: httpx.AsyncClient) -> None:
    response = await client.post(RESPONSES, json={"input": "Hi", "reasoning": {"effort": "high"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning.effort"


# Strict tools in free answers


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize(("path", "tool"), [(MESSAGES, ANTHROPIC_TOOL), (RESPONSES, RESPONSES_TOOL)])
async def test_strict_tools_constrain_free_answers(serve: Serve, path: str, tool: dict[str, Any]) -> None:
    async with serve(engine := writes(TWO_CALLS)) as client:
        await post(client, path, tools=[tool | {"strict": True}])
        await post(client, path, tools=[tool])
    kinds = [request.sampling.grammar_type for request in engine.requests]
    assert kinds == [GrammarType.LARK, GrammarType.NONE]


@pytest.mark.usefixtures("thinking")
async def test_a_budget_of_tokens_ends_the_thoughts(serve: Serve) -> None:
    async with serve(engine := writes("Hm.\n</think>\n\nYes.")) as client:
        await post(client, MESSAGES, thinking={"type": "enabled", "budget_tokens": 1500})
        await post(client, MESSAGES, thinking={"type": "adaptive"})
    limited, free = (request.sampling.grammar for request in engine.requests)
    assert "max_tokens=1500" in limited
    assert not free


# A call or an answer by a format

WEATHER_REPORT = {
    "type": "object",
    "properties": {"name": {"title": "Name", "type": "string"}, "rain": {"title": "Rain", "type": "boolean"}},
    "required": ["name", "rain"],
    "title": "Report",
    "additionalProperties": False,
}
REPORT = '{"name": "weather", "rain": false}'
# What openai-agents 0.24 sends of an agent with `output_type` and a function tool.
AGENT: dict[str, Any] = {
    "input": [{"content": "Hi", "role": "user"}],
    "include": [],
    "tools": [{**RESPONSES_TOOL, "parameters": {**SCHEMA, "additionalProperties": False}, "strict": True}],
    "text": {"format": {"type": "json_schema", "name": "final_output", "schema": WEATHER_REPORT, "strict": True}},
}
# What instructor 1.17 sends in its mode RESPONSES_TOOLS.
INSTRUCTOR: dict[str, Any] = {
    "input": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "name": "Report", "parameters": WEATHER_REPORT, "description": "Correctly"}],
    "tool_choice": {"type": "function", "name": "Report"},
    "text": {"format": {"type": "json_schema", "name": "Report", "strict": True, "schema": WEATHER_REPORT}},
}
# What instructor 1.17 sends in its mode TOOLS_STRICT.
INSTRUCTOR_STRICT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": "Report", "strict": True, "parameters": WEATHER_REPORT}}],
    "tool_choice": {"type": "function", "function": {"name": "Report"}},
}


def cases_of(engine: FakeEngine) -> list[str]:
    """What an answer may be: the definitions that its schema refers to first."""
    schema = json.loads(engine.requests[0].sampling.grammar)
    return [case["$ref"].rpartition("/")[2] for case in schema.get("anyOf", ()) if "$ref" in case]


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("length", [1, 1000])
async def test_b5_an_agent_with_an_output_type_calls_or_answers(serve: Serve, length: int) -> None:
    async with serve(engine := writes(CALL, length)) as client:
        answer = await post(client, RESPONSES, **AGENT)
        received = await events(client, RESPONSES, **AGENT)
    for output in (answer["output"], received[-1]["response"]["output"]):
        (item,) = output
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", '{"city": "Paris"}')
    assert cases_of(engine) == ["call", "answer"]
    assert "response.output_text.delta" not in {event["type"] for event in received}
    async with serve(writes(REPORT, length)) as client:
        answer = await post(client, RESPONSES, **AGENT)
        received = await events(client, RESPONSES, **AGENT)
    for output in (answer["output"], received[-1]["response"]["output"]):
        (item,) = output
        assert (item["type"], item["content"][0]["text"]) == ("message", REPORT)
    deltas = [event["delta"] for event in received if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == REPORT
    assert not [event for event in received if "function_call" in event["type"]]


async def test_b5_requests_of_instructor_are_calls_of_its_tool(serve: Serve) -> None:
    call = f'{{"name": "Report", "arguments": {REPORT}}}'
    async with serve(engine := writes(call)) as client:
        (item,) = (await post(client, RESPONSES, **INSTRUCTOR))["output"]
        response = await client.post("/v1/chat/completions", json=INSTRUCTOR_STRICT)
    assert (item["type"], item["arguments"]) == ("function_call", REPORT)
    (made,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "Report", "arguments": REPORT}
    for request in engine.requests:
        assert json.loads(request.sampling.grammar)["required"] == ["name", "arguments"]


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("length", [1, 1000])
async def test_b5_a_message_with_tools_and_a_format_is_either(serve: Serve, length: int) -> None:
    form = {"format": {"type": "json_schema", "schema": WEATHER_REPORT}}
    fields: dict[str, Any] = {"tools": [ANTHROPIC_TOOL], "output_config": form}
    async with serve(engine := writes(CALL, length)) as client:
        answer = await post(client, MESSAGES, **fields)
        received = blocks_of(await events(client, MESSAGES, **fields))
    for (block,) in (answer["content"], received):
        assert (block["type"], block["input"]) == ("tool_use", {"city": "Paris"})
    assert answer["stop_reason"] == "tool_use"
    assert cases_of(engine) == ["call", "answer"]
    async with serve(writes(REPORT, length)) as client:
        answer = await post(client, MESSAGES, **fields)
        received = blocks_of(await events(client, MESSAGES, **fields))
    assert answer["content"] == received == [{"type": "text", "text": REPORT}]
    assert answer["stop_reason"] == "end_turn"


# What coding agents send

GROUP = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [RESPONSES_TOOL]}


@pytest.mark.usefixtures("hermes")
async def test_b6_functions_of_a_namespace_are_called_by_it(serve: Serve) -> None:
    call = CALL.replace("weather", "crm__weather")
    async with serve(engine := writes(f"<tool_call>\n{call}\n</tool_call>")) as client:
        answer = await post(client, RESPONSES, tools=[GROUP, RESPONSES_TOOL])
        received = await events(client, RESPONSES, tools=[GROUP])
        (item,) = answer["output"]
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
        await post(client, RESPONSES, input=[item, result], tools=[GROUP])
        await post(client, RESPONSES, input=[result], previous_response_id=answer["id"], tools=[GROUP])
    assert (item["namespace"], item["name"]) == ("crm", "weather")
    assert answer["tools"][0]["tools"][0]["name"] == "weather"
    added = next(event for event in received if event["type"] == "response.output_item.added")
    assert (added["item"]["namespace"], added["item"]["name"]) == ("crm", "weather")
    assert '"name": "crm__weather"' in engine.requests[0].inputs
    assert "Customers.\\nThe weather." in engine.requests[0].inputs
    for request in engine.requests[2:]:
        assert "<tool_call>crm__weatherParis</tool_call>" in request.inputs


@pytest.mark.usefixtures("hermes")
async def test_b6_deferred_tools_are_shown_once_they_are_referred_to(serve: Serve) -> None:
    search = {"name": "search", "input_schema": {"type": "object"}}
    tools = [search, ANTHROPIC_TOOL | {"defer_loading": True}]
    call = {"type": "tool_use", "id": "t1", "name": "search", "input": {"city": "weather"}}
    found = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked = {"role": "user", "content": "Hi"}
    async with serve(engine := writes("Well.")) as client:
        await post(client, MESSAGES, tools=tools)
        await post(client, MESSAGES, tools=tools, tool_choice={"type": "auto"}, messages=[asked, *messages])
        await post(client, MESSAGES, tools=tools[1:], tool_choice={"type": "auto"})
    shown = ['"name": "weather"' in request.inputs for request in engine.requests]
    assert shown == [False, True, False]
    assert "[tool]Found the tool weather." in engine.requests[1].inputs
    async with serve(engine := writes(CALL)) as client:
        await post(client, MESSAGES, tools=tools, tool_choice={"type": "tool", "name": "weather"})
    assert engine.requests[0].sampling.grammar_type is GrammarType.JSON


async def test_tokens_are_counted_whatever_the_budget_of_thoughts(client: httpx.AsyncClient) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    counts = [await client.post(f"{MESSAGES}/count_tokens", json=body | more) for more in ({}, {"thinking": thinking})]
    assert [count.status_code for count in counts] == [200, 200]
    assert counts[0].json() == counts[1].json()
