"""Tools, response formats and reasoning on OpenAI's chat route, over a scripted engine."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve
from llguidance import LLTokenizer
from scripted_chat import CALL, CHAT, HERMES, WIDE, ask, whole, writes

from funitel.proto.grammar.compiler import compile_grammar
from funitel.proto.step import GrammarType
from funitel.router.core.request import Limits
from funitel_testing.tiny import byte_tokenizer

VAST = Limits(max_input_tokens=10**6, max_total_tokens=10**6 + 100, pool_tokens=10**7)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "$ref": {"type": "string"}},
            "required": ["city"],
            "$defs": {"City": {"type": "string", "enum": ["#/x", "Paris"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{{ m.reasoning_content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is not false %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture
def hermes(model: Path) -> Path:
    (model / "chat_template.jinja").write_text(HERMES)
    return model


@pytest.fixture
def thinking(model: Path) -> Path:
    (model / "chat_template.jinja").write_text(THINKING)
    return model


async def streamed(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The deltas of a stream put together as OpenAI's clients do."""
    response = await client.post(CHAT, json=ask(stream=True, **fields))
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    reason = None
    for frame in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(frame.removeprefix("data: "))["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"]
    return {"message": message, "finish_reason": reason}


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]


async def refused(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(CHAT, json=ask(**fields))
    assert response.status_code == 422, response.text
    return response.json()


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("length", [1, 3, 1000])
async def test_several_calls_in_one_answer(serve: Serve, length: int) -> None:
    text = f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    async with serve(writes(text, length)) as client:
        answer = await whole(client, tools=[WEATHER])
        stream = await streamed(client, tools=[WEATHER])
    assert calls_of(answer) == calls_of(stream) == [("weather", '{"city": "Paris"}')] * 2
    assert answer["message"]["content"] == stream["message"]["content"] == "Let me look."
    assert answer["finish_reason"] == stream["finish_reason"] == "tool_calls"
    ids = [call["id"] for choice in (answer, stream) for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(id.startswith("call_") for id in ids)


@pytest.mark.usefixtures("hermes")
async def test_arguments_are_streamed_as_they_come(serve: Serve) -> None:
    async with serve(writes(f"<tool_call>{CALL}</tool_call>")) as client:
        response = await client.post(CHAT, json=ask(stream=True, tools=[WEATHER]))
    deltas = [json.loads(f.removeprefix("data: "))["choices"][0]["delta"] for f in response.text.split("\n\n")[:-2]]
    assert deltas[0] == {"role": "assistant"}
    assert len([delta for delta in deltas if delta.get("tool_calls")]) > 4


@pytest.mark.usefixtures("hermes")
async def test_only_one_call_where_parallel_ones_are_off(serve: Serve) -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 2
    async with serve(writes(text)) as client:
        answer = await whole(client, tools=[WEATHER], parallel_tool_calls=False)
        stream = await streamed(client, tools=[WEATHER], parallel_tool_calls=False)
    assert len(calls_of(answer)) == len(calls_of(stream)) == 1


@pytest.mark.usefixtures("hermes")
async def test_an_answer_without_calls(serve: Serve) -> None:
    async with serve(writes("It is sunny.")) as client:
        answer = await whole(client, tools=[WEATHER])
    assert answer["message"] == {"role": "assistant", "content": "It is sunny."}
    assert answer["finish_reason"] == "stop"


@pytest.mark.usefixtures("hermes")
async def test_without_tools_nothing_is_parsed(serve: Serve) -> None:
    async with serve(writes(f"<tool_call>{CALL}</tool_call>")) as client:
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            answer = await whole(client, **fields)
            assert answer["message"]["content"] == f"<tool_call>{CALL}</tool_call>"
            assert answer["finish_reason"] == "stop"


@pytest.mark.usefixtures("hermes")
async def test_a_call_that_is_cut_off(serve: Serve) -> None:
    async with serve(writes(f"<tool_call>{CALL}</tool_call>", 1)) as client:
        answer = await whole(client, tools=[WEATHER], max_tokens=50)
    ((name, arguments),) = calls_of(answer)
    assert name == "weather"
    assert '{"city": "Paris"}'.startswith(arguments)
    assert answer["finish_reason"] == "length"


@pytest.mark.usefixtures("hermes")
async def test_the_template_gets_tools_and_structured_history(serve: Serve) -> None:
    engine = writes("Fine.")
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_past('{"city": "Rome"}'), _past({"city": "Oslo"})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    async with serve(engine) as client:
        await whole(client, messages=messages, tools=[NOW])
    function = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert engine.requests[0].inputs == (
        json.dumps([{"type": "function", "function": function}])
        + "[system]Be brief.\n[user]Weather?\n"
        + "[assistant]<tool_call>weatherRome</tool_call><tool_call>weatherOslo</tool_call>\n"
        + "[tool]Sunny.\n[assistant]"
    )


def _past(arguments: object) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


async def test_mistrals_templates_get_ids_they_take(serve: Serve, model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{{ tools and '[TOOL_CALLS]' }}{% for m in messages %}{{ m.tool_call_id }},{{ (m.tool_calls or [{}])[0].id }};"
        "{% endfor %}"
    )
    engine = writes("Fine.")
    messages = [
        {"role": "assistant", "tool_calls": [_past("{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
        {"role": "tool", "tool_call_id": "abcDEF123", "content": "Sunny."},
    ]
    async with serve(engine) as client:
        await whole(client, messages=messages)
    made, answered, kept = engine.requests[0].inputs.removeprefix("None").rstrip(";").split(";")
    assert made.removeprefix(",") == answered.removesuffix(",")
    assert len(made.removeprefix(",")) == 9
    assert kept == "abcDEF123,"


async def test_a_template_that_knows_no_tools(serve: Serve) -> None:
    engine = writes(f"{CALL}")
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [_past('{"city": "Rome"}')]},
        {"role": "tool", "content": "Sunny."},
    ]
    async with serve(engine) as client:
        answer = await whole(client, messages=messages, tools=[NOW, WEATHER])
        await whole(client, tools=[NOW], tool_prompt="Call one.")
    inputs = engine.requests[0].inputs
    assert inputs.startswith('[user]Weather?\n---\n[{"type": "function", "function": {"name": "now"')
    assert '[assistant]{"name": "weather", "arguments": {"city": "Rome"}}\n[tool]Sunny.\n' in inputs
    assert calls_of(answer) == [("weather", '{"city": "Paris"}')]
    assert engine.requests[1].inputs.endswith("\nCall one.\n[assistant]")


async def test_the_parser_may_be_chosen(serve: Serve) -> None:
    async with serve(writes(f"[TOOL_CALLS][{CALL}]"), tool_call_parser="mistral") as client:
        assert calls_of(await whole(client, tools=[WEATHER])) == [("weather", '{"city": "Paris"}')]


# Forced calls


async def test_forced_calls_follow_the_schemas_of_the_tools(serve: Serve) -> None:
    engine = writes(CALL)
    async with serve(engine) as client:
        answer = await whole(client, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False)
        stream = await streamed(client, tools=[WEATHER, NOW], tool_choice="required")
    assert calls_of(answer) == calls_of(stream) == [("weather", '{"city": "Paris"}')]
    assert answer["message"]["content"] is None
    assert answer["finish_reason"] == "tool_calls"
    sampling = engine.requests[0].sampling
    assert sampling.grammar_type is GrammarType.JSON
    schema = json.loads(sampling.grammar)
    assert [call["properties"]["name"] for call in schema["anyOf"]] == [{"const": "weather"}, {"const": "now"}]
    weather = schema["$defs"]["tool0"]
    assert weather["properties"] == {"city": {"$ref": "#/$defs/tool0/$defs/City"}, "$ref": {"type": "string"}}
    assert weather["$defs"]["City"]["enum"] == ["#/x", "Paris"]
    assert schema["$defs"]["tool1"]["additionalProperties"] is False


async def test_forced_calls_may_be_several(serve: Serve) -> None:
    engine = writes(f"[{CALL}, {CALL}]")
    async with serve(engine) as client:
        answer = await whole(client, tools=[WEATHER], tool_choice="required")
    assert len(calls_of(answer)) == 2
    one, several = json.loads(engine.requests[0].sampling.grammar)["anyOf"]
    assert several["items"] == one == {"$ref": "#/$defs/call"}


@pytest.mark.parametrize(
    "choice",
    [
        "now",
        {"type": "function", "function": {"name": "now"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}},
    ],
)
async def test_a_named_tool(serve: Serve, choice: Any) -> None:
    engine = writes('{"name": "now", "arguments": {}}')
    async with serve(engine) as client:
        answer = await whole(client, tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False)
    assert calls_of(answer) == [("now", "{}")]
    assert json.loads(engine.requests[0].sampling.grammar)["properties"]["name"] == {"const": "now"}
    assert "weather" not in engine.requests[0].inputs


@pytest.mark.parametrize("parallel", [{}, {"parallel_tool_calls": True}])
async def test_a_tool_asked_for_by_name_is_called_exactly_once(serve: Serve, parallel: dict[str, Any]) -> None:
    engine = writes(f"[{CALL}, {CALL}]")
    choice = {"type": "function", "function": {"name": "weather"}}
    async with serve(engine) as client:
        answer = await whole(client, tools=[WEATHER, NOW], tool_choice=choice, **parallel)
        stream = await streamed(client, tools=[WEATHER, NOW], tool_choice=choice, **parallel)
    assert calls_of(answer) == calls_of(stream) == [("weather", '{"city": "Paris"}')]
    grammar = json.loads(engine.requests[0].sampling.grammar)
    assert grammar["properties"]["name"] == {"const": "weather"}, "one call, not an array of several"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [WEATHER], "tool_choice": "nothing"}, "tool_choice", "no tool is named `nothing`"),
        ({"tool_choice": "required"}, "tool_choice", "there are no `tools`"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "`weather` is given to more than one"),
        (
            {"tools": [WEATHER], "response_format": {"type": "regex", "value": "a"}},
            "response_format",
            "no JSON schema exclude each other",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                "tool_choice": "required",
            },
            "tools",
            'Given: "array"',
        ),
    ],
)
async def test_tools_that_make_no_sense(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, says: str
) -> None:
    for stream in (False, True):
        body = await refused(client, stream=stream, **fields)
        assert body["error_type"] == "tool_error"
        assert body["error"]["param"] == param
        assert says in body["error"]["message"]


PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


async def constraint(serve: Serve, **fields: Any) -> str | None:
    """The schema that an answer must follow."""
    async with serve(engine := writes(CALL)) as client:
        await whole(client, tools=[WEATHER, NOW], **fields)
    return engine.requests[0].sampling.grammar or None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return LLTokenizer(str(path), eos_token=256)


def allowed(tokenizer: LLTokenizer, schema: str, *texts: str) -> list[str]:
    grammar = compile_grammar(GrammarType.JSON, schema, tokenizer)
    found = []
    for text in texts:
        trial, ids = grammar.deep_copy(), tokenizer.tokenize_str(text)
        if trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting():
            found.append(text)
    return found


ANSWER = '{"name": "weather", "age": 3}'
BAD_CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
BAD_ANSWER = '{"name": "Ada", "born": 1815}'
TWO = f"[{CALL}, {CALL}]"
NOW_CALL = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize("template", ["plain", "hermes"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [CALL, NOW_CALL, TWO, ANSWER]),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, [CALL, NOW_CALL, ANSWER]),
        ({"tool_choice": "required"}, [CALL, NOW_CALL, TWO]),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, [CALL]),
        ({"tool_choice": "none"}, [ANSWER]),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "now"}}]},
                }
            },
            [NOW_CALL, ANSWER],
        ),
    ],
)
async def test_b5_a_call_by_its_tool_or_an_answer_by_the_format(
    serve: Serve,
    request: pytest.FixtureRequest,
    tokenizer: LLTokenizer,
    template: str,
    fields: dict[str, Any],
    expected: list[str],
) -> None:
    if template == "hermes":
        request.getfixturevalue("hermes")
    schema = await constraint(serve, response_format=PERSON_FORMAT, **fields)
    assert schema is not None
    assert allowed(tokenizer, schema, CALL, NOW_CALL, TWO, ANSWER, BAD_CALL, BAD_ANSWER, "Hi", "[]") == expected


async def test_b5_no_free_answer_has_the_form_of_a_call(serve: Serve, tokenizer: LLTokenizer) -> None:
    texts = [CALL, BAD_CALL, NOW_CALL, '{"name": "weather"}', '{"a": [{"arguments": 1}]}', '{"function": "now"}']
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}):
        schema = await constraint(serve, response_format=form)
        assert schema is not None
        assert allowed(tokenizer, schema, *texts) == [text for text in texts if text != BAD_CALL]


async def test_b5_an_answer_with_the_keys_of_a_call_gives_calls_other_keys(
    serve: Serve, tokenizer: LLTokenizer
) -> None:
    """So that neither is taken for the other."""
    properties = {"name": {"type": "string"}, "arguments": {"type": "object"}}
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": properties}}}
    call, answer = '{"function": "weather", "arguments": {"city": "Paris"}}', BAD_CALL
    schema = await constraint(serve, response_format=form)
    assert schema is not None
    assert allowed(tokenizer, schema, call, answer) == [call, answer]
    for text, calls in ((call, [("weather", '{"city": "Paris"}')]), (answer, [])):
        async with serve(writes(text)) as client:
            choice = await whole(client, tools=[WEATHER], response_format=form)
        assert (choice["message"].get("tool_calls") is None) is not bool(calls)
        assert choice["message"]["content"] == (None if calls else answer)


async def test_b5_an_answer_that_may_be_an_array_is_no_array_of_calls(serve: Serve, tokenizer: LLTokenizer) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"type": "integer"}}}}
    schema = await constraint(serve, response_format=form)
    assert schema is not None
    assert allowed(tokenizer, schema, CALL, TWO, "[1]", BAD_CALL) == [CALL, "[1]"]


@pytest.mark.parametrize("length", [1, 3, 1000])
@pytest.mark.parametrize("template", ["plain", "hermes"])
async def test_b5_calls_and_answers_stream_as_what_they_are(
    serve: Serve, request: pytest.FixtureRequest, template: str, length: int
) -> None:
    if template == "hermes":
        request.getfixturevalue("hermes")
    fields: dict[str, Any] = {"tools": [WEATHER], "response_format": PERSON_FORMAT}
    async with serve(writes(ANSWER, length)) as client:
        for choice in (await whole(client, **fields), await streamed(client, **fields)):
            assert choice["message"]["content"] == ANSWER
            assert not choice["message"].get("tool_calls")
            assert choice["finish_reason"] == "stop"
    async with serve(writes(TWO, length)) as client:
        for choice in (await whole(client, **fields), await streamed(client, **fields)):
            assert calls_of(choice) == [("weather", '{"city": "Paris"}')] * 2
            assert choice["message"]["content"] is None
            assert choice["finish_reason"] == "tool_calls"
        once = await whole(client, parallel_tool_calls=False, **fields)
    assert len(calls_of(once)) == 1


@pytest.mark.parametrize("schema", ["{", "[]", "true", "[" * 30_000])
async def test_b5_a_format_that_is_no_object_is_refused(client: httpx.AsyncClient, schema: str) -> None:
    response = await client.post(CHAT, json=ask(tools=[WEATHER], guided_json=schema))
    assert response.status_code in (400, 422), response.text
    assert "\n" not in response.json()["error"]["message"]


async def test_b5_errors_name_the_schema_at_fault(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.limits = WIDE
    missing = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}}
    form = {"type": "json_schema", "json_schema": {"schema": missing}}
    body = await refused(client, tools=[WEATHER], response_format=form, max_tokens=5)
    assert body["error"]["param"] == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": missing}}
    body = await refused(client, tools=[tool], response_format=PERSON_FORMAT, max_tokens=5)
    assert body["error"]["param"] == "tools"


async def test_schemas_of_tools_that_no_grammar_keeps(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.limits = WIDE
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Missing"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = await refused(client, tools=[tool], tool_choice="required", max_tokens=5)
    assert body["error_type"] == "tool_error"
    assert body["error"]["param"] == "tools"
    assert "'/$defs/Missing'" in body["error"]["message"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("depth", [100, 150, 250, 400])
async def test_schemas_nested_deeply_are_refused_if_not_taken(serve: Serve, depth: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(depth)}}
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested(depth)}}
    fields: tuple[dict[str, Any], ...] = (
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": format},
    )
    async with serve(FakeEngine(limits=VAST)) as client:
        for wishes in fields:
            response = await client.post(CHAT, json=ask(max_tokens=5, **wishes))
            assert response.status_code in (200, 400, 422), response.text


# Response formats

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


@pytest.mark.parametrize(
    ("format", "kind", "grammar"),
    [
        ({"type": "json_object"}, GrammarType.JSON, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            GrammarType.JSON,
            SCHEMA,
        ),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, GrammarType.JSON, SCHEMA),
        ({"type": "json", "value": SCHEMA}, GrammarType.JSON, SCHEMA),
        ({"type": "json_object", "value": SCHEMA}, GrammarType.JSON, SCHEMA),
        ({"type": "json", "value": json.dumps(SCHEMA)}, GrammarType.JSON, SCHEMA),
        ({"type": "regex", "value": "[0-9]+"}, GrammarType.REGEX, "[0-9]+"),
    ],
)
async def test_response_formats(
    client: httpx.AsyncClient, engine: FakeEngine, format: Any, kind: GrammarType, grammar: Any
) -> None:
    await whole(client, response_format=format)
    sampling = engine.requests[0].sampling
    assert sampling.grammar_type is kind
    assert (json.loads(sampling.grammar) if kind is GrammarType.JSON else sampling.grammar) == grammar


async def test_grammars_may_be_switched_off(serve: Serve) -> None:
    async with serve(FakeEngine(), disable_grammar_support=True) as client:
        body = await refused(client, response_format={"type": "json_object"})
    assert "--disable-grammar-support" in body["error"]["message"]
    assert body["error"]["param"] == "response_format"


# Reasoning


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("text", ["Hm, well.\n</think>\n\nYes.", "<think>\nHm, well.\n</think>\n\nYes."])
async def test_reasoning_is_split_out(serve: Serve, text: str) -> None:
    engine = writes(text)
    async with serve(engine) as client:
        answer = await whole(client, logprobs=True)
        stream = await streamed(client)
        usage = (await client.post(CHAT, json=ask())).json()["usage"]
    assert engine.requests[0].inputs.endswith("[assistant]<think>\n")
    assert answer["message"]["reasoning_content"] == answer["message"]["reasoning"] == "Hm, well."
    assert stream["message"]["reasoning_content"] == "Hm, well."
    assert answer["message"]["content"] == stream["message"]["content"] == "Yes."
    assert "".join(entry["token"] for entry in answer["logprobs"]["content"]) in "Yes."
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


@pytest.mark.usefixtures("thinking")
async def test_b1_usage_in_every_chunk_of_thoughts(serve: Serve) -> None:
    engine = writes("Hm, well.\n</think>\n\nYes.")
    async with serve(engine) as client:
        body = ask(stream=True, stream_options={"continuous_usage_stats": True})
        frames = (await client.post(CHAT, json=body)).text.split("\n\n")[:-2]
    received = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert {"reasoning", "content"} <= {name for chunk in received[:-1] for name in chunk["choices"][0]["delta"]}
    counts = [chunk["usage"]["completion_tokens"] for chunk in received]
    assert counts == sorted(counts)
    thought = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in received]
    assert thought[-2:] == [thought[-1]] * 2
    assert thought[-1] > 0
    assert received[-2]["usage"] == received[-1]["usage"]


@pytest.mark.usefixtures("thinking")
async def test_reasoning_may_be_switched_off(serve: Serve) -> None:
    engine = writes("Yes.")
    async with serve(engine) as client:
        answer = await whole(client, reasoning_effort="none")
        await whole(client, chat_template_kwargs={"enable_thinking": False})
    assert [request.inputs[-11:] for request in engine.requests] == ["[assistant]"] * 2
    assert answer["message"] == {"role": "assistant", "content": "Yes."}
    async with serve(writes("<think>Hm.</think>Yes."), reasoning_parser="none") as client:
        assert (await whole(client))["message"]["content"] == "<think>Hm.</think>Yes."


@pytest.mark.usefixtures("thinking")
async def test_a_grammar_leaves_no_room_for_thoughts(serve: Serve) -> None:
    engine = writes('{"a": 1}')
    async with serve(engine) as client:
        answer = await whole(client, response_format={"type": "json_object"})
    assert engine.requests[0].inputs.endswith("[assistant]<think>\n\n</think>\n\n")
    assert answer["message"] == {"role": "assistant", "content": '{"a": 1}'}


@pytest.mark.usefixtures("thinking")
async def test_thoughts_sent_back_reach_the_template(serve: Serve) -> None:
    engine = writes("Yes.")
    messages = [
        {"role": "assistant", "content": "One", "reasoning_content": "Hm"},
        {"role": "user", "content": "Go"},
    ]
    async with serve(engine) as client:
        await whole(client, messages=messages)
    assert engine.requests[0].inputs.startswith("[assistant]OneHm\n[user]Go")


# How the prompt ends


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "[user]Hi\n[assistant]Well"),
        ({"continue_final_message": True}, "[user]Hi\n[assistant]Well"),
        ({"continue_final_message": False}, "[user]Hi\n[assistant]Well\n[assistant]"),
        ({"add_generation_prompt": True}, "[user]Hi\n[assistant]Well\n[assistant]"),
        ({"add_generation_prompt": False}, "[user]Hi\n[assistant]Well\n"),
    ],
)
async def test_how_the_prompt_ends(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], end: str
) -> None:
    await whole(
        client, messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}], **fields
    )
    assert engine.requests[0].inputs == end


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_written_as_text_with_half_a_character(serve: Serve, stream: bool) -> None:
    """JSON can spell lone surrogates, answers cannot."""
    text = r'{"name": "weather", "arguments": "{\"city\": \"\ud83dParis\ud83d\ude00\"}"}'
    tool = {"type": "function"} | WEATHER["function"]
    async with serve(writes(text)) as client:
        chat = await client.post(CHAT, json=ask(tools=[WEATHER], stream=stream))
        response = await client.post("/v1/responses", json={"input": "Hi", "tools": [tool], "stream": stream})
    for answer in (chat, response):
        assert answer.status_code == 200, answer.text
        assert r"{\"city\": \"" + "\N{REPLACEMENT CHARACTER}Paris\N{GRINNING FACE}" in answer.text
        assert "internal error" not in answer.text


# Strict tools in free answers, and budgets of thoughts

STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
HARMONY = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis #}"
)


async def test_a_strict_tool_constrains_calls_in_a_free_answer(
    serve: Serve, hermes: Path, tokenizer: LLTokenizer
) -> None:
    engine = writes(f"Sure.\n<tool_call>\n{CALL}\n</tool_call>")
    async with serve(engine) as client:
        answer = await whole(client, tools=[STRICT, NOW])
        await whole(client, tools=[WEATHER, NOW])
        await whole(client, tools=[STRICT], tool_choice="none")
    assert (answer["message"]["content"], calls_of(answer)) == ("Sure.", [("weather", '{"city": "Paris"}')])
    strict, free, none = (request.sampling for request in engine.requests)
    assert strict.grammar_type is GrammarType.LARK
    assert not free.grammar
    assert not none.grammar
    matcher = compile_grammar(GrammarType.LARK, strict.grammar, tokenizer)
    for text, is_allowed in (
        ("It is {nice}.", True),
        (f"Hm.\n<tool_call>\n{CALL}\n</tool_call>", True),
        (f"<tool_call>{BAD_CALL}</tool_call>", False),
        (f"<tool_call>{NOW_CALL}</tool_call>", True),
    ):
        trial, ids = matcher.deep_copy(), tokenizer.tokenize_str(text)
        assert (trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting()) is is_allowed, text


@pytest.mark.usefixtures("hermes")
async def test_without_grammars_strict_tools_and_budgets_have_no_effect(serve: Serve) -> None:
    engine = writes("Sure.")
    async with serve(engine, disable_grammar_support=True) as client:
        await whole(client, tools=[STRICT])
    assert not engine.requests[0].sampling.grammar


@pytest.mark.usefixtures("hermes")
async def test_a_strict_schema_that_cannot_be_kept_is_refused(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.limits = WIDE
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    body = await refused(client, tools=[tool], max_tokens=5)
    assert body["error"]["param"] == "tools"
    assert "uniqueItems" in body["error"]["message"]


@pytest.mark.usefixtures("thinking")
async def test_a_budget_ends_the_thoughts(serve: Serve, tokenizer: LLTokenizer) -> None:
    engine = writes("Hm\n</think>\n\nYes.")
    async with serve(engine) as client:
        answer = await whole(client, thinking_budget=5)
        await whole(client, thinking_budget=0)
        await whole(client, thinking_budget=5, response_format={"type": "json_object"})
    assert (answer["message"]["reasoning_content"], answer["message"]["content"]) == ("Hm", "Yes.")
    limited, closed, constrained = engine.requests
    matcher = compile_grammar(GrammarType.LARK, limited.sampling.grammar, tokenizer)
    assert matcher.deep_copy().try_consume_tokens(tokenizer.tokenize_str("12345</think>Yes, and so on")) == 27
    assert matcher.deep_copy().try_consume_tokens(tokenizer.tokenize_str("123456")) == 5
    assert closed.inputs.endswith("<think>\n\n</think>\n\n")
    assert not closed.sampling.grammar
    assert constrained.sampling.grammar_type is GrammarType.JSON


async def test_a_budget_needs_thoughts(client: httpx.AsyncClient) -> None:
    body = await refused(client, thinking_budget=5)
    assert body["error"]["param"] == "thinking_budget"
    assert "marks no reasoning" in body["error"]["message"]


@pytest.mark.usefixtures("thinking")
async def test_an_unknown_effort_is_refused(client: httpx.AsyncClient) -> None:
    body = await refused(client, reasoning_effort="hard")
    assert body["error"]["param"] == "reasoning_effort"
    assert "`minimal`" in body["error"]["message"]


async def test_effort_reaches_a_template_with_either_variable(serve: Serve, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ reasoning_effort }}{{ enable_thinking }}{{ messages[0].content }}")
    async with serve(engine := writes("Yes.")) as client:
        await whole(client, reasoning_effort="high")
        await whole(client, reasoning_effort="none")
    assert [request.inputs for request in engine.requests] == ["highTrueHi", "noneFalseHi"]


@pytest.mark.parametrize("length", [1, 4, 1000])
async def test_channels_are_thoughts_calls_and_content(serve: Serve, model: Path, length: int) -> None:
    (model / "chat_template.jinja").write_text(HARMONY)
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
        "<|call|>"
    )
    async with serve(writes(text, length)) as client:
        for answer in (await whole(client, tools=[WEATHER]), await streamed(client, tools=[WEATHER])):
            assert answer["message"]["reasoning_content"] == "Hm."
            assert answer["message"]["content"] == "Let me look."
            assert calls_of(answer) == [("weather", '{"city": "Paris"}')]
            assert answer["finish_reason"] == "tool_calls"
    async with serve(engine := writes(CALL, length)) as client:
        answer = await whole(client, tools=[WEATHER], tool_choice="required")
    assert calls_of(answer) == [("weather", '{"city": "Paris"}')]
    assert engine.requests[0].inputs.endswith("<|start|>assistant<|channel|>final<|message|>")
