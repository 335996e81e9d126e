"""Free answers with strict tools: text is free, calls fit the schemas, and thoughts end with their budget."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer
from written_answers import FAMILIES, harmony, parsed, prompt_of

from funitel.proto.errors import ToolError
from funitel.proto.grammar.compiler import compile_grammar
from funitel.proto.step import GrammarType
from funitel.router.chat.auto_grammar import Calls, Thoughts, auto_grammar
from funitel.router.chat.call import Tool
from funitel.router.chat.reasoning_parser import REASONING_FORMATS
from funitel.router.chat.tool_formats import BY_NAME
from funitel_testing.tiny import byte_tokenizer

NUM_CALLS, NUM_CALLS_FULL = 8, 200
MAX_TOKENS = 3000
END = "<|stop|>"  # ends a text
# What ends a value that has no quotes, or has unusual ones: no chance writes it.
VALUE_ENDS = ("\n</parameter>", "</parameter>", "</arg_value>", "</｜DSML｜parameter>", '<|"|>', "<escape>")
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["°C", "°F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "place": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "exact": {"type": "boolean"},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "unit", "place"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = (Tool(name="weather", parameters=PARAMETERS, strict=True), Tool(name="now", strict=True))
# What opens a call in a family, and what may follow at once.
OPENINGS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "glm45": "<tool_call>",
    "minimax_m2": "<minimax:tool_call>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "granite": "<|tool_call|>",
    "mistral": "[TOOL_CALLS]",
    "mistral:args": "[TOOL_CALLS]",
    "llama3_json": "{",
    "json": "{",
    "pythonic": "[weather(",
    "lfm2": "<|tool_call_start|>",
    "olmo3": "<function_calls>",
    "gemma_code": "```tool_code",
    "gemma4": "<|tool_call>",
    "functiongemma": "<start_function_call>",
    "harmony": "<|channel|>commentary to=",
}
BARE = ("llama3_json", "json", "harmony")


class Vocabulary:
    """A tokenizer of bytes and of special tokens."""

    def __init__(self, folder: Path, special: Sequence[str]) -> None:
        self.tokenizer: Tokenizer = byte_tokenizer()
        self.tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*special, END)])
        self.ids = {text: self.tokenizer.token_to_id(text) for text in special}
        path = folder / "tokenizer.json"
        self.tokenizer.save(str(path))
        self.engine = LLTokenizer(str(path), eos_token=self.tokenizer.token_to_id(END))
        self.eos = self.tokenizer.token_to_id(END)

    def compile(self, text: str) -> LLMatcher:
        return compile_grammar(GrammarType.LARK, text, self.engine)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def accepted(self, matcher: LLMatcher, text: str) -> tuple[int, bool]:
        """How many tokens of a text a grammar allows, and whether it may end then."""
        trial, ids = matcher.deep_copy(), self.encode(text)
        count = 0
        for token_id in ids:
            if not is_allowed(trial, token_id) or not trial.consume_token(token_id):
                break
            count += 1
        return count - len(ids), trial.is_accepting()


def is_allowed(matcher: LLMatcher, token_id: int) -> bool:
    return bool(matcher.compute_bitmask()[token_id // 8] >> token_id % 8 & 1)


def markers(name: str) -> list[str]:
    family = FAMILIES[name]
    known = BY_NAME[name.partition(":")[0]].markers
    thinks = REASONING_FORMATS[family.thinks].markers if family.thinks else ()
    if name == "deepseek_v32":  # whose tags contain a token
        known = known[:1]
    return list(dict.fromkeys((*known, *thinks)))


def calls_of(name: str, tools: tuple[Tool, ...] = TOOLS, *, is_parallel: bool = True) -> Calls:
    template = "[ARGS]" if name.endswith(":args") else ""
    return Calls(BY_NAME[name.partition(":")[0]], tools, is_parallel, template)


def thoughts_of(name: str, *, is_open: bool = False, budget: int | None = None) -> Thoughts | None:
    thinks = FAMILIES[name].thinks
    return None if thinks is None else Thoughts(REASONING_FORMATS[thinks], is_open, budget)


def written(vocabulary: Vocabulary, matcher: LLMatcher, begin: str, rng: random.Random) -> str | None:
    """What a model of no sense writes behind a beginning, until it may end; None if that takes too long."""
    trial, ids = matcher.deep_copy(), vocabulary.encode(begin)
    for token_id in ids:
        assert is_allowed(trial, token_id), (begin, vocabulary.decode(ids))
        assert trial.consume_token(token_id)
    closing = {id for mark in '"<,]}`)' for id in vocabulary.encode(mark)}
    plain = {id for mark in "abc 019\n'\\é{" for id in vocabulary.encode(mark)}
    while len(ids) < MAX_TOKENS:
        if trial.is_stopped():
            return vocabulary.decode(ids)
        mask = trial.compute_bitmask()
        allowed = [token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1]
        if vocabulary.eos in allowed:
            return vocabulary.decode(ids)
        value_end = vocabulary.encode(rng.choice(VALUE_ENDS))
        if rng.random() < 0.1 and trial.deep_copy().try_consume_tokens(value_end) == len(value_end):
            assert trial.consume_tokens(value_end)
            ids += value_end
            continue
        special = [token_id for token_id in allowed if token_id in vocabulary.ids.values()]
        likely = [token_id for token_id in allowed if token_id in closing]
        common = [token_id for token_id in allowed if token_id in plain]
        choice = rng.random()
        pool = next(
            (found for found, bound in ((special, 0.4), (likely, 0.7), (common, 0.95)) if found and choice < bound),
            allowed,
        )
        token_id = rng.choice(pool)
        assert trial.consume_token(token_id)
        ids.append(token_id)
    return None


def check_calls(name: str, folder: Path, count: int, *, is_special: bool) -> None:
    vocabulary = Vocabulary(folder, markers(name) if is_special else [])
    text = auto_grammar(calls_of(name), thoughts_of(name), vocabulary.ids).text
    matcher = vocabulary.compile(text)
    found, rng = 0, random.Random(name)
    names = set()
    begin = OPENINGS[name] if name in BARE else f"Hm. {OPENINGS[name]}"
    for _ in range(4 * count):
        answer = written(vocabulary, matcher, begin, rng)
        if answer is None:
            continue
        _, content, calls = parsed(prompt_of(name, TOOLS), [answer])
        assert calls, (name, answer)
        for called, arguments in calls:
            names.add(called)
            parameters = {tool.name: tool.parameters for tool in TOOLS}[called]
            jsonschema.validate(json.loads(arguments), parameters or {"maxProperties": 0})
        assert content.strip() in ("", "Hm."), (name, answer)
        found += 1
        if found >= count and "weather" in names:
            return
    raise AssertionError(f"{found} of {4 * count} answers ended, with calls of {names}")


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", OPENINGS)
def test_strict_calls_of_free_answers_validate(name: str, is_special: bool, tmp_path: Path) -> None:
    if name == "harmony" and not is_special:
        pytest.skip("its markers are tokens")
    check_calls(name, tmp_path, NUM_CALLS, is_special=is_special)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPENINGS)
def test_many_strict_calls_of_free_answers_validate(name: str, tmp_path: Path) -> None:
    check_calls(name, tmp_path, NUM_CALLS_FULL, is_special=True)


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", OPENINGS)
def test_text_is_free_and_calls_are_not(name: str, is_special: bool, tmp_path: Path) -> None:
    if name == "harmony":
        pytest.skip("its text has a header")
    vocabulary = Vocabulary(tmp_path, markers(name) if is_special else [])
    matcher = vocabulary.compile(auto_grammar(calls_of(name), thoughts_of(name), vocabulary.ids).text)
    for text in ("", "Sure — it's a < b, 1.5 [and] {more}: ☃\n\n```x```", "\nHm."):
        assert vocabulary.accepted(matcher, text) == (0, True), text
    good: dict[str, Any] = {"city": 'Oslo "x"\n', "unit": "°C", "place": {"x": 1.5}}
    if name in ("pythonic", "lfm2", "olmo3", "gemma_code", "gemma4", "functiongemma"):
        return  # written with other quotes
    answer = FAMILIES[name].write([("weather", good)])
    assert vocabulary.accepted(matcher, answer) == (0, True), answer
    for bad in ({**good, "unit": "K"}, {"city": "Oslo"}, {**good, "days": 15}, {**good, "more": 1}):
        left, _ = vocabulary.accepted(matcher, FAMILIES[name].write([("weather", bad)]))
        assert left < 0, bad
    left, _ = vocabulary.accepted(matcher, FAMILIES[name].write([("unknown", {})]))
    assert left < 0


def test_a_tool_that_is_not_strict_takes_any_object(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, [])
    tools = (TOOLS[0], replace(TOOLS[0], name="free", strict=False))
    matcher = vocabulary.compile(auto_grammar(calls_of("hermes", tools), None, {}).text)
    assert vocabulary.accepted(matcher, FAMILIES["hermes"].write([("free", {"any": [1]})])) == (0, True)
    assert vocabulary.accepted(matcher, FAMILIES["hermes"].write([("weather", {"any": [1]})]))[0] < 0


@pytest.mark.parametrize(
    ("name", "schema", "says"),
    [
        ("hermes", {"type": "array"}, 'Given: "array"'),
        ("hermes", {"properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}}}, "overlap"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "^x"}}}, '"pattern"'),
        ("glm45", {"properties": {}, "minProperties": 1}, '"minProperties"'),
        (
            "qwen3_coder",
            {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}},
            "maxL",
        ),
        (
            "glm45",
            {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string", "format": "date"}}},
            "form",
        ),
        ("kimi_k2", {"type": "array"}, 'Given: "array"'),
    ],
)
def test_schemas_that_cannot_be_kept_are_refused(name: str, schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolError, match=says):
        auto_grammar(calls_of(name, (Tool(name="f", parameters=schema, strict=True),)), None, {})


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_end_with_their_budget(is_special: bool, is_open: bool, tmp_path: Path) -> None:
    special = ["<think>", "</think>"] if is_special else []
    vocabulary = Vocabulary(tmp_path, special)
    known = REASONING_FORMATS["think"]
    matcher = vocabulary.compile(auto_grammar(None, Thoughts(known, is_open, 5), vocabulary.ids).text)
    opening = "" if is_open else "<think>"
    assert vocabulary.accepted(matcher, f"{opening}12345</think>Yes, and <more>") == (0, True)
    assert vocabulary.accepted(matcher, f"{opening}123456")[0] == -1
    if is_special:
        assert vocabulary.accepted(matcher, f"{opening}123</think>Yes.") == (0, True)
    assert vocabulary.accepted(matcher, "Yes, and so on.") == ((0, True) if not is_open else (-10, False))


def test_thoughts_on_a_channel_end_with_their_budget(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, markers("harmony"))
    thoughts = Thoughts(REASONING_FORMATS["harmony"], False, 5)
    matcher = vocabulary.compile(auto_grammar(None, thoughts, vocabulary.ids).text)
    answer = "<|end|><|start|>assistant<|channel|>final<|message|>Yes, and more"
    begin = "<|channel|>analysis<|message|>"
    for thought in ("123", "12345"):
        assert vocabulary.accepted(matcher, begin + thought + answer) == (0, True)
    assert vocabulary.accepted(matcher, f"{begin}123456")[0] == -1


def test_nothing_in_thoughts_opens_a_call(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, [])
    for is_open in (True, False):
        thoughts = Thoughts(REASONING_FORMATS["think"], is_open)
        matcher = vocabulary.compile(auto_grammar(calls_of("hermes"), thoughts, {}).text)
        begin = "" if is_open else "<think>"
        text = f"{begin}I may write <tool_call> here.</think>Yes."
        assert vocabulary.accepted(matcher, text) == (0, True)
        assert vocabulary.accepted(matcher, f"{begin}Hm</think>Yes <tool_call>no")[0] < 0


def test_an_argument_keeps_the_name_of_a_key_of_calls(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, [])
    parameters = {"type": "object", "properties": {"arguments": {"type": "integer"}}, "required": ["arguments"]}
    tools = (Tool(name="f", parameters=parameters, strict=True),)
    matcher = vocabulary.compile(auto_grammar(calls_of("llama3_json", tools), None, {}).text)
    assert vocabulary.accepted(matcher, '{"name": "f", "parameters": {"arguments": 1}}') == (0, True)


@pytest.mark.parametrize("is_special", [True, False])
def test_strict_calls_follow_thoughts_with_a_budget(is_special: bool, tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, markers("hermes") if is_special else [])
    thoughts = Thoughts(REASONING_FORMATS["think"], True, 5)
    matcher = vocabulary.compile(auto_grammar(calls_of("hermes"), thoughts, vocabulary.ids).text)
    call = FAMILIES["hermes"].write([("now", {})])
    assert vocabulary.accepted(matcher, f"12345</think>Yes.\n{call}") == (0, True)
    assert vocabulary.accepted(matcher, "12345</think>Yes.<tool_call>no")[0] == -2
    assert vocabulary.accepted(matcher, f"123456</think>{call}")[0] < 0


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"])
def test_a_value_ends_where_it_is_read_to_end(name: str, tmp_path: Path) -> None:
    """Else what follows in the value would be read as something else."""
    vocabulary = Vocabulary(tmp_path, [])
    schema = {"properties": {"a": {"type": "string", "minLength": 30, "maxLength": 60}}, "required": ["a"]}
    tools = (Tool(name="f", parameters=schema, strict=True),)
    matcher = vocabulary.compile(auto_grammar(calls_of(name, tools), None, {}).text)
    end = next(text.strip() for text in VALUE_ENDS if text.strip() in FAMILIES[name].write([("f", {"a": ""})]))
    for value, is_allowed_here in (("x" * 30, True), (f"{'x' * 9}\n{end}{'x' * 30}", False), ("x" * 61, False)):
        left, _ = vocabulary.accepted(matcher, FAMILIES[name].write([("f", {"a": value})]))
        assert (left == 0) is is_allowed_here, value


def test_messages_are_free_and_calls_are_not(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, markers("harmony"))
    matcher = vocabulary.compile(auto_grammar(calls_of("harmony"), thoughts_of("harmony"), vocabulary.ids).text)
    good: dict[str, Any] = {"city": "Oslo", "unit": "°C", "place": {"x": 1.5}}
    for text in (harmony("Hm.", "Look:", [("weather", good)], ""), harmony("", "", [("now", {})], "")):
        assert vocabulary.accepted(matcher, text) == (0, True), text
    for text in (harmony("Hm.", "", [], "Yes."), harmony("", "", [], "<Yes>")):
        assert vocabulary.accepted(matcher, text.removesuffix("<|return|>")) == (0, True), text
    for name, arguments in (("weather", good | {"unit": "K"}), ("unknown", {}), ("now", {"a": 1})):
        assert vocabulary.accepted(matcher, harmony("Hm.", "", [(name, arguments)], ""))[0] < 0
