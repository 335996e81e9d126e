"""Tool calls and reasoning blocks are found whatever portions the text comes in."""

import json
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funitel.router.chat.output_parser import CallArguments, CallStart, Parser, TextPiece, Thought
from funitel.router.chat.reasoning_parser import REASONING_FORMATS, ReasoningParser, detect_reasoning
from funitel.router.chat.tool_call_reader import CallKeys
from funitel.router.chat.tool_formats import BY_NAME, call_or_answer, detect_tool_format
from funitel_testing.work import work_of

NAMES = {"weather", "add"}
Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(parser: Parser, portions: Sequence[str]) -> Parsed:
    """Thoughts, text and calls; checks that text is where its pieces say."""
    whole = "".join(portions)
    pieces = []
    start = 0
    for portion in portions:
        pieces += parser.feed(portion, start)
        start += len(portion)
    pieces += parser.finish()
    thoughts, text = "", ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case TextPiece():
                assert whole[piece.start :].startswith(piece.text)
                text += piece.text
            case Thought():
                assert whole[piece.start :].startswith(piece.text)
                thoughts += piece.text
            case CallStart():
                calls.append((piece.name, ""))
            case CallArguments():
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.delta)
    return thoughts, text, calls


def feed(parser: Parser, text: str, size: int) -> None:
    """Give a parser the whole text in portions of this size."""
    for start in range(0, len(text), size):
        parser.feed(text[start : start + size], start)
    parser.finish()


def tools(format: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of an answer that comes at once."""
    return parse(BY_NAME[format].parser(NAMES), [text])[1:]


WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = ("weather", '{"city": "Paris"}')

CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text.\n", "Just text.\n", []),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [CALL]),
    ("hermes", f"Let me look.\n\n<tool_call>{WEATHER}</tool_call>", "Let me look.", [CALL]),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n", "", [CALL, CALL]),
    ("hermes", f"<tool_call>{WEATHER}<tool_call>{WEATHER}</tool_call> Done.", "Done.", [CALL, CALL]),
    ("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "add"}</tool_call>', "", [("add", '{"a": [1, {}]}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}',
        "",
        [("add", '{"a": "</tool_call>"}')],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> Done.', "Done.", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
    ("hermes", "<tool_call>no json</tool_call> !", "<tool_call>no json</tool_call> !", []),
    ("hermes", f"<tool_call><tool_call>{WEATHER}</tool_call>", "<tool_call>", [CALL]),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {WEATHER}]", "", [CALL, CALL]),
    ("mistral", f"[TOOL_CALLS]{WEATHER}", "", [CALL]),
    ("mistral", 'Look:[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "Look:", [CALL]),
    (
        "mistral",
        '[TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": "}"}',
        "",
        [CALL, ("add", '{"a": "}"}')],
    ),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("mistral", "[TOOL_CALLS] [] ", "[TOOL_CALLS] [] ", []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [CALL]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    ("llama3_json", f"{WEATHER}; {WEATHER}\n", "", [CALL, CALL]),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama3_json", "It is {nice}.", "It is {nice}.", []),
    ("json", f"[{WEATHER}, {WEATHER}]", "", [CALL, CALL]),
    ("json", f"```json\n{WEATHER}\n```", "", [CALL]),
    ("json", "```python\nx = 1\n```", "```python\nx = 1\n```", []),
    ("json", '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}', "", [("add", '{"a": 1}')]),
    ("json", f"{WEATHER} Done.", "Done.", [CALL]),
    ("json", '  {"a": [1, 2]} ', '  {"a": [1, 2]} ', []),
    ("json", '{"name": "a\\u0064d", "arguments": {"a": "\\\\\\""}}', "", [("add", '{"a": "\\\\\\""}')]),
]


@pytest.mark.parametrize(("format", "text", "shown", "calls"), CASES)
def test_formats(format: str, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert tools(format, text) == (shown, calls)


@pytest.mark.parametrize(("format", "text", "shown", "calls"), CASES)
def test_one_character_at_a_time(format: str, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert parse(BY_NAME[format].parser(NAMES), list(text))[1:] == (shown, calls)


# Texts that are nearly calls: what is meant to break parsers.
FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json\n", "```", "<think>"),
        *(
            "</think>",
            WEATHER,
            '{"name": "add"',
            ', "arguments": ',
            '{"a": 1}',
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ":",
        ),
        *sorted({marker for format in BY_NAME.values() for marker in format.markers}),
        *("<function=add>", "<parameter=a>", "</parameter>", "</function>", '<invoke name="add">', "</invoke>"),
        *('<parameter name="a">', "call:add{", "a:1", "[add(", "a=1", ")", "functions.add:0", "to=functions.add"),
        *("analysis", "commentary", "```tool_code\n", "'"),
        *(" ", "\n", ";", "weather", "hello", "<", "é", "add", "null", "1.5"),
    ]
)


def makers() -> dict[str, Callable[[], Parser]]:
    found: dict[str, Callable[[], Parser]] = {
        name: lambda format=format: format.parser(NAMES) for name, format in BY_NAME.items()
    }
    for is_open in (False, True):
        found[f"think-{is_open}"] = lambda is_open=is_open: ReasoningParser(REASONING_FORMATS["think"], is_open=is_open)
    return found


@pytest.mark.parametrize("name", makers())
@settings(max_examples=50, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=20), data=st.data())
def test_the_result_does_not_depend_on_the_portions(name: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    portions = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    make = makers()[name]
    whole = parse(make(), [text])
    assert parse(make(), portions) == whole
    assert parse(make(), list(text)) == whole


TEXTS = st.text(max_size=6)


@settings(max_examples=50, deadline=None)
@given(
    arguments=st.dictionaries(TEXTS, TEXTS | st.integers() | st.lists(TEXTS, max_size=2), max_size=3),
    name=st.sampled_from(sorted(NAMES)),
    format=st.sampled_from(["hermes", "json", "llama3_json", "mistral"]),
    indent=st.sampled_from([None, 1]),
)
def test_any_arguments_come_through(arguments: object, name: str, format: str, indent: int | None) -> None:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, indent=indent)
    opening, closing = {"hermes": ("<tool_call>\n", "\n</tool_call>"), "mistral": ("[TOOL_CALLS]", "")}.get(
        format, ("", "")
    )
    text, [(found, given_arguments)] = tools(format, opening + call + closing)
    assert (text, found, json.loads(given_arguments)) == ("", name, arguments)


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "rest"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", False, "Hm.", "Yes.\n"),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("\n<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>\nStill at i", False, "Still at i", ""),
        ("Still at it <", True, "Still at it <", ""),
        (" Yes. <think>no</think>", False, "", " Yes. <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_reasoning(text: str, is_open: bool, thoughts: str, rest: str) -> None:
    parser = ReasoningParser(REASONING_FORMATS["think"], is_open=is_open)
    assert parse(parser, [text]) == (thoughts, rest, [])


def test_formats_are_told_from_the_template() -> None:
    assert detect_tool_format("{{ '<tool_call>' }}").name == "hermes"
    assert detect_tool_format("{{ '[TOOL_CALLS]' }}").name == "mistral"
    assert detect_tool_format("{{ '<|python_tag|>' }}").name == "llama3_json"
    assert detect_tool_format("{{ messages }}").name == "json"
    assert detect_reasoning("{{ content.split('</think>') }}") is REASONING_FORMATS["think"]
    assert detect_reasoning("{{ messages }}") is None


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("user\n<think>\n", True), ("<think>", True), ("<think>\n\n</think>\n\n", False), ("", False)],
)
def test_a_prompt_may_open_the_block(prompt: str, is_open: bool) -> None:
    assert REASONING_FORMATS["think"].is_opened_by(prompt) is is_open


UNITS = (
    *(
        "<tool_call><function=add><parameter=a>",
        '<minimax:tool_call><invoke name="add">',
        "<|channel|>analysis<|message|>",
    ),
    *("[add(a=[", "<|start|>", "<|tool_call>call:add{", "<tool_call>add<arg_key>"),
)


@pytest.mark.parametrize("name", [name for name in BY_NAME])
@pytest.mark.parametrize(
    "unit", ["<tool_call>{", "[TOOL_CALLS][{", *UNITS, '{"name": "', "<|python_tag|>", "{" * 8, '"\\', "[[[ "]
)
def test_parsers_take_time_in_proportion(name: str, unit: str) -> None:
    """What a model writes may be the worst there is for a parser, such as CVE-2025-48887's for a regular expression."""
    work = []
    for count in (2_000, 16_000):
        text = unit * (count // len(unit))
        parser = BY_NAME[name].parser(NAMES)
        work.append(work_of(partial(feed, parser, text, 4)))
    assert work[1] < 8.2 * work[0], work


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        (WEATHER, "", [CALL]),
        (f"[{WEATHER},{WEATHER}]", "", [CALL, CALL]),
        ('{"name":"add","arguments":{}}', "", [("add", "{}")]),
        ('{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', []),
        ('{"name": "weather"}', '{"name": "weather"}', []),
        ('{"name": "Ada", "arguments": {}}', '{"name": "Ada", "arguments": {}}', []),
        ('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": [1]}', []),
        ('{"arguments": {}, "name": "add"}', '{"arguments": {}, "name": "add"}', []),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        ('[{"name": "weather", "age": 3}]', '[{"name": "weather", "age": 3}]', []),
        ("[]", "[]", []),
        ("{}", "{}", []),
        ("12", "12", []),
        ('{"name": "weather", "argu', '{"name": "weather", "argu', []),
        ('{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_b5_what_is_not_exactly_a_call_is_the_answer(
    text: str, answer: str, calls: list[tuple[str, str]], size: int
) -> None:
    portions = [text[start : start + size] for start in range(0, len(text), size)]
    assert parse(call_or_answer(CallKeys()).parser(NAMES), portions)[1:] == (answer, calls)


def test_b5_an_answer_streams_as_soon_as_it_is_none_of_a_call() -> None:
    parser = call_or_answer(CallKeys()).parser(NAMES)
    pieces = [parser.feed(character, place) for place, character in enumerate('{"name": "Ada", "born": 1815}')]
    first = next(place for place, found in enumerate(pieces) if found)
    assert pieces[first] == [TextPiece('{"name": "Ada"', 0)]
    assert all(pieces[first:])
