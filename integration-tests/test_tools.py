"""Tool calls of a real model through OpenAI's client: forced ones always parse and validate, streamed or not."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.servers import Server, serving

jsonschema = pytest.importorskip("jsonschema", reason="install the extra `dev`")
openai = pytest.importorskip("openai", reason="install the extra `clients`")

MODEL = "smollm2-135m-instruct"
NUM_CALLS, NUM_CALLS_FULL = 6, 100
PARAMETERS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "unit": {"enum": ["°C", "°F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["place", "unit"],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "within": {"$ref": "#/$defs/Region"}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "Region": {"enum": ["north", "south"]},
        },
    },
    "add": {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        },
        "required": ["numbers"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
QUESTIONS = ("What is the weather in Paris?", "Add 3 and 4.", "Will it rain in the north of Oslo?")


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, one shard."""
    flags = ("--model-id", MODEL, "--max-batch-total-tokens", "8192")
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, place: int, **fields: Any) -> Any:
    messages = [{"role": "user", "content": QUESTIONS[place % len(QUESTIONS)]}]
    wishes = {"temperature": 0.8, "seed": place, "max_tokens": 300}
    return client.chat.completions.create(model="tgi", messages=messages, tools=TOOLS, **wishes, **fields)


def streamed_calls(stream: Any) -> tuple[list[tuple[str, str]], str]:
    """Calls put together from the deltas of a stream, and why it ended."""
    calls: list[tuple[str, str]] = []
    reason = ""
    for chunk in stream:
        (choice,) = chunk.choices
        for delta in choice.delta.tool_calls or ():
            if delta.id is not None:
                calls.append((delta.function.name, ""))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.function.arguments)
        reason = choice.finish_reason or reason
    return calls, reason


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", set(PARAMETERS)),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
def test_forced_calls_parse_and_validate(
    client: Any, choice: Any, names: set[str], is_full: bool, figures: dict[str, object]
) -> None:
    num_calls = NUM_CALLS_FULL if is_full else NUM_CALLS
    valid = 0
    ask_forced = partial(ask, client, tool_choice=choice, parallel_tool_calls=False)
    with ThreadPoolExecutor(4) as pool:
        answers = [completion.choices[0] for completion in pool.map(ask_forced, range(num_calls))]
    for answer in answers:
        assert answer.finish_reason == "tool_calls", answer
        assert answer.message.content is None
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        valid += 1
    figures[f"tool calls, {'required' if len(names) > 1 else 'named'}: valid of {num_calls}"] = valid


@pytest.mark.parametrize("parallel", [True, False])
def test_streamed_and_whole_calls_are_the_same(client: Any, parallel: bool) -> None:
    for place in range(2):
        fields = {"tool_choice": "required", "parallel_tool_calls": parallel}
        whole = ask(client, place, **fields).choices[0]
        calls, reason = streamed_calls(ask(client, place, stream=True, **fields))
        assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert reason == whole.finish_reason


STRICT_TOOLS: list[Any] = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]
PAST_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": {"city": "Rome"}, "unit": "°C"}'},
}
EARLIER: list[Any] = [  # shows the model what a call looks like
    {"role": "user", "content": "What is the weather in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [PAST_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    {"role": "assistant", "content": "It is sunny in Rome."},
]


def test_strict_calls_of_free_answers_validate(client: Any, is_full: bool, figures: dict[str, object]) -> None:
    """The model is free to answer with text; what it writes as a call fits the schema, unless it is cut off."""
    num_answers = 2 * NUM_CALLS_FULL if is_full else 2 * NUM_CALLS
    calls = valid = num_cut = 0

    def ask_freely(place: int) -> Any:
        messages = [*EARLIER, {"role": "user", "content": QUESTIONS[place % len(QUESTIONS)]}]
        wishes: dict[str, Any] = {"temperature": 0.8, "seed": place, "max_tokens": 300, "tool_choice": "auto"}
        return client.chat.completions.create(model="tgi", messages=messages, tools=STRICT_TOOLS, **wishes)

    with ThreadPoolExecutor(4) as pool:
        answers = [completion.choices[0] for completion in pool.map(ask_freely, range(num_answers))]
    for answer in answers:
        if answer.finish_reason == "length":
            num_cut += bool(answer.message.tool_calls)
            continue
        for call in answer.message.tool_calls or ():
            calls += 1
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
            valid += 1
    assert calls, "no answer has a call"
    figures["tool calls, strict in free answers: valid"] = f"{valid} of {calls}, {num_cut} answers cut off in one"


REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "rain": {"type": "boolean"}, "days": {"type": "integer"}},
    "required": ["place", "rain"],
}
REPORT_FORMAT = {"type": "json_schema", "json_schema": {"name": "report", "strict": True, "schema": REPORT}}


def check_either(calls: list[tuple[str, str]], content: str | None, reason: str) -> None:
    """Calls by their tools, or an answer by the format, and never both; one that is cut off need not be whole."""
    assert bool(calls) is not bool(content)
    if reason == "length":
        return
    assert reason == ("tool_calls" if calls else "stop")
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])
    if content:
        answer = json.loads(content)
        jsonschema.validate(answer, REPORT)
        assert answer.keys() <= REPORT["properties"].keys()


def test_b5_calls_or_answers_by_a_format_are_what_they_say(client: Any) -> None:
    for place, choice in enumerate(("auto", "none", "required", "auto", "auto")):
        fields = {"tool_choice": choice, "response_format": REPORT_FORMAT}
        whole = ask(client, place, **fields).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
        check_either(calls, whole.message.content, whole.finish_reason)
        assert calls or choice != "required"
        assert not calls or choice != "none"
        deltas: list[Any] = list(ask(client, place, stream=True, **fields))
        assert streamed_calls(deltas) == (calls, whole.finish_reason)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == (whole.message.content or "")


OPEN: dict[str, dict[str, Any]] = {
    "city": {"properties": {"city": {"type": "string"}, "facts": {"type": "array", "items": {"type": "string"}}}},
    "people": {
        "type": "object",
        "properties": {"people": {"type": "array", "items": {"$ref": "#/$defs/person"}}},
        "required": ["people"],
        "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
    },
    "any": {"type": "object"},
}


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"repeated: {pairs}"
    return dict(pairs)


@pytest.mark.parametrize("name", OPEN)
def test_b4_open_schemas_end_before_the_limit_with_declared_keys(client: Any, name: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": OPEN[name]}}
    form = {"type": "json_object"} if name == "any" else form
    messages = [{"role": "user", "content": "Paris and its people, in JSON."}]
    for seed, max_tokens in enumerate((60, 120)):
        wishes = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens}
        answer = client.chat.completions.create(model="tgi", messages=messages, response_format=form, **wishes)
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content, object_pairs_hook=None if name == "any" else unique)
        jsonschema.validate(found, OPEN[name])
        assert name == "any" or found.keys() <= OPEN[name]["properties"].keys()


def test_a_conversation_with_results_goes_on(client: Any) -> None:
    first = ask(client, 0, tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages = [
        {"role": "user", "content": QUESTIONS[0]},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "21 °C and sunny."},
    ]
    answer = client.chat.completions.create(
        model="tgi", messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=30
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


def test_n_and_completions_sample_what_the_seeds_sample_singly(client: Any) -> None:
    wishes = {"model": "tgi", "max_tokens": 12, "temperature": 0.9}
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    several = client.chat.completions.create(messages=messages, n=3, seed=5, **wishes)
    single = [client.chat.completions.create(messages=messages, seed=5 + place, **wishes) for place in range(3)]
    assert [c.message.content for c in several.choices] == [answer.choices[0].message.content for answer in single]
    texts = client.completions.create(prompt=["One, two", "Once upon"], n=2, seed=8, **wishes).choices
    alone = [
        client.completions.create(prompt=prompt, seed=8 + place, **wishes).choices[0].text
        for place, prompt in enumerate(["One, two", "One, two", "Once upon", "Once upon"])
    ]
    assert [choice.text for choice in texts] == alone
