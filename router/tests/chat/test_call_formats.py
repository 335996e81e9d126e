"""Every format of calls and thoughts: generated answers give the same wherever they are cut, and what was written."""

import json
from typing import Any

import pytest
from written_answers import FAMILIES, parsed, prompt_of, transcript

from funitel.router.chat.call import Tool
from funitel.router.chat.prompt import ChatPrompt
from funitel.router.chat.reasoning_parser import REASONING_FORMATS, detect_reasoning
from funitel.router.chat.tool_formats import BY_NAME, detect_tool_format

NUM_TRANSCRIPTS, NUM_TRANSCRIPTS_FULL = 3, 200


def check_every_cut(name: str, seed: int) -> None:
    expected = transcript(name, seed)
    prompt = prompt_of(name, expected.tools)
    text = expected.text
    whole = parsed(prompt, [text])
    thoughts, content, calls = whole
    assert [(call, json.loads(arguments)) for call, arguments in calls] == expected.calls, (name, seed, text)
    assert thoughts == expected.reasoning, (name, seed, text)
    assert content == expected.content, (name, seed, text)
    assert parsed(prompt, list(text)) == whole, (name, seed, text)
    for place in range(1, len(text)):
        assert parsed(prompt, [text[:place], text[place:]]) == whole, (name, seed, text, place)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_gives_the_same(name: str) -> None:
    for seed in range(NUM_TRANSCRIPTS):
        check_every_cut(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_cut_of_many_answers_gives_the_same(name: str) -> None:
    for seed in range(NUM_TRANSCRIPTS_FULL):
        check_every_cut(name, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_cut_off_or_damaged_is_text_or_a_call_and_no_error(name: str) -> None:
    """Nothing is lost of an answer with a call that has no end, save what marks its beginning."""
    seed = next(seed for seed in range(99) if transcript(name, seed).calls)
    expected = transcript(name, seed)
    prompt = prompt_of(name, expected.tools)
    for place in range(1, len(expected.text)):
        cut = expected.text[:place]
        thoughts, content, calls = parsed(prompt, [cut])
        assert parsed(prompt, list(cut)) == (thoughts, content, calls)
        damaged = expected.text[:place] + expected.text[place + 1 :]
        assert parsed(prompt, [damaged]) == parsed(prompt, list(damaged)), (name, seed, damaged)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</para"),
        ("qwen3_coder", "<tool_call>\n<function=f>\nnot a parameter</function></tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<oops></invoke></minimax:tool_call>'),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="maybe">',
        ),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>what<｜tool▁calls▁end｜>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁se"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argu"),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>"),
        ("functiongemma", "<start_function_call>call:f{a:<escape>x"),
        ("pythonic", "[f(a=1, b="),
        ("pythonic", "[f(a=g(1))]"),
        ("pythonic", "[unknown(a=1)]"),
        ("olmo3", "<function_calls>\nf(a=b)\n</function_calls>"),
        ("gemma_code", "```tool_code\nprint('x')\n```"),
        ("granite", "<|tool_call|>no list"),
        ("harmony", "<|channel|>commentary to=functions.f <|constr"),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    prompt = prompt_of(name, (Tool(name="f"),))
    assert parsed(prompt, [text]) == parsed(prompt, list(text)) == ("", text, [])


def test_a_call_after_a_damaged_one_is_found() -> None:
    good = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    prompt = prompt_of("qwen3_coder", (Tool(name="f"),))
    for text in (f"<tool_call>oops {good}", f"<tool_call>\n<function=f>\noops\n{good}"):
        assert parsed(prompt, [text])[2] == [("f", "{}")]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "1.50", 1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["integer", "string"]}, "12", 12),
        ({"type": ["integer", "string"]}, "twelve", "twelve"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/Place"}, '{"city": "Oslo"}', {"city": "Oslo"}),
        ({"$ref": "#/$defs/Name"}, "7", "7"),
        ({"$ref": "#/$defs/Missing"}, "7", 7),
        ({"$ref": "#"}, "{}", {}),
        ({"type": "object"}, "not json", "not json"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({}, "7", 7),
        ({}, "seven", "seven"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        (None, "x", "x"),
    ],
)
def test_arguments_have_the_types_of_the_schema(schema: Any, text: str, value: Any) -> None:
    definitions = {"Place": {"type": "object"}, "Name": {"type": "string"}}
    properties = {} if schema is None else {"a": schema}
    tool = Tool(name="f", parameters={"type": "object", "properties": properties, "$defs": definitions})
    answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    _, _, [(name, arguments)] = parsed(prompt_of("qwen3_coder", (tool,)), [answer])
    assert (name, json.loads(arguments)) == ("f", {"a": value})


# What templates of each family contain, as they were published.
TEMPLATES = {
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>",
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + tool_call.name + '>' }} <parameter=",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + '\\n' + '```json'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>'",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "glm45": "{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}",
    "granite": "{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}",
    "hermes": '{{ \'<tool_call>\\n{"name": "\' }}',
    "mistral": "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "llama3_json": "{{ '<|python_tag|>' }}",
    "pythonic": "{{ '<|python_start|>' + message['content'] + '<|python_end|>' }}",
    "lfm2": "<|tool_call_start|>[",
    "olmo3": "{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}",
    "gemma4": "<|tool_call>call:{{ name }}",
    "functiongemma": "<start_function_call>call:{{ name }}",
    "gemma_code": "```tool_code",
    "json": "{{ tools }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_told_from_the_template(name: str) -> None:
    assert detect_tool_format(TEMPLATES[name]).name == name


def test_reasoning_formats_are_told_from_the_template() -> None:
    assert detect_reasoning(TEMPLATES["harmony"]) is REASONING_FORMATS["harmony"]
    assert detect_reasoning("<|channel>thought\n<channel|>") is REASONING_FORMATS["gemma4"]
    assert detect_reasoning("{{ '</think>' }}") is REASONING_FORMATS["think"]


def test_harmony_without_tools_has_thoughts_and_an_answer() -> None:
    prompt = ChatPrompt("", reasoning=REASONING_FORMATS["harmony"])
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert parsed(prompt, [text]) == parsed(prompt, list(text)) == ("Hm.", "Yes.", [])
    assert parsed(prompt, ["Yes."]) == ("", "Yes.", [])


def test_harmony_in_a_forced_call_is_json() -> None:
    prompt = ChatPrompt(
        "", tools=(Tool(name="f"),), tool_format=BY_NAME["json"], reasoning=REASONING_FORMATS["harmony"]
    )
    assert parsed(prompt, list('{"name": "f", "arguments": {}}')) == ("", "", [("f", "{}")])


def test_a_call_without_the_tags_around_it_is_read_if_a_tool_has_its_name() -> None:
    prompt = prompt_of("qwen3_coder", (Tool(name="f"),))
    for text, content, calls in (
        ("Hm.\n<function=f>\n</function>\n</tool_call>", "Hm.", [("f", "{}")]),
        ("<function=other>\n</function>", "<function=other>\n</function>", []),
    ):
        assert parsed(prompt, [text]) == parsed(prompt, list(text)) == ("", content, calls)


def test_granite_writes_either_marker() -> None:
    prompt = prompt_of("granite", (Tool(name="f"),))
    call = '{"name": "f", "arguments": {"a": 1}}'
    for text in (f"<tool_call>[{call}, {call}]", f"<|tool_call|>[{call}, {call}]"):
        assert parsed(prompt, [text]) == parsed(prompt, list(text)) == ("", "", [("f", '{"a": 1}')] * 2)


@pytest.mark.parametrize(("name", "text"), [("qwen3_coder", "<function=f>\n</function>"), ("granite", "<tool_call>[")])
def test_no_marker_is_lost_between_words(name: str, text: str) -> None:
    prompt = prompt_of(name, (Tool(name="f"),))
    text = f"See {text[:10]} and more."
    assert parsed(prompt, [text]) == parsed(prompt, list(text)) == ("", text, [])
