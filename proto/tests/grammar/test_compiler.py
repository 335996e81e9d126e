"""Grammars compile as clients mean them; what cannot be kept, or costs too much, is refused in one line."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from funitel.proto.errors import InvalidRequest
from funitel.proto.grammar.compiler import MAX_GRAMMAR_BYTES, compile_grammar
from funitel.proto.step import GrammarType
from funitel_testing.schemas import SCHEMAS
from funitel_testing.tiny import byte_tokenizer

# Four alternatives twelve times over: the engine would have to multiply them out.
EXPLODING = json.dumps(
    {"allOf": [{"anyOf": [{"properties": {f"x{i}": {"const": j}}} for j in range(4)]} for i in range(12)]}
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return LLTokenizer(str(path), eos_token=256)


def is_allowed(matcher: LLMatcher, tokenizer: LLTokenizer, text: str) -> bool:
    trial = matcher.deep_copy()
    ids = tokenizer.tokenize_str(text)
    return trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "matches", "differs"),
    [
        (r"\d{2}", ["12"], ["1", "123", "\u0661\u0662"]),
        (r"^a+$", ["a", "aaa"], ["", "b"]),
        (r"a/b\/c", ["a/b/c"], ["a/b"]),
        (r"[^\s]\sx", ["a x", "é\tx"], ["  x"]),
        ("(ja|nein)", ["ja", "nein"], ["jaja"]),
        ("日本.?", ["日本", "日本語"], ["日"]),
        ("(?:)", [""], ["a"]),
    ],
)
def test_regular_expressions(tokenizer: LLTokenizer, pattern: str, matches: list[str], differs: list[str]) -> None:
    matcher = compile_grammar(GrammarType.REGEX, pattern, tokenizer)
    assert [is_allowed(matcher, tokenizer, text) for text in matches] == [True] * len(matches)
    assert [is_allowed(matcher, tokenizer, text) for text in differs] == [False] * len(differs)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_of_the_collection_compiles(tokenizer: LLTokenizer, name: str) -> None:
    compile_grammar(GrammarType.JSON, json.dumps(SCHEMAS[name]), tokenizer)


def test_json_is_on_one_line_with_at_most_one_space(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    matcher = compile_grammar(GrammarType.JSON, json.dumps(schema), tokenizer)
    for text in ('{"a":1}', '{"a": 1}', '{ "a" : 1 }'):
        assert is_allowed(matcher, tokenizer, text)
    for text in ('{"a":  1}', '{\n"a": 1}', '{"a": 1} ', "{}", '{"a": "1"}'):
        assert not is_allowed(matcher, tokenizer, text)


def test_names_of_properties_are_no_keywords(tokenizer: LLTokenizer) -> None:
    """A property may be called as a keyword is that would be left out."""
    names = ["format", "x-guidance", "uniqueItems"]
    schema = {"properties": {name: {"const": 1} for name in names}, "required": names, "additionalProperties": False}
    matcher = compile_grammar(GrammarType.JSON, json.dumps({"type": "object", **schema}), tokenizer)
    assert is_allowed(matcher, tokenizer, '{"format":1,"x-guidance":1,"uniqueItems":1}')
    assert not is_allowed(matcher, tokenizer, "{}")


@pytest.mark.parametrize(
    ("schema", "matches"),
    [
        (True, "[null]"),
        ({"type": "string", "format": "whatever"}, '"x"'),
        ({"type": "array", "items": {"type": "integer", "uniqueItems": False}}, "[1,1]"),
        ({"const": 1, "x-guidance": {"whitespace_flexible": "no boolean"}}, "1"),
        ({"anyOf": [{"type": "string", "format": "mine"}, {"type": "null"}]}, '"x"'),
    ],
)
def test_annotations_do_not_restrict(tokenizer: LLTokenizer, schema: Any, matches: str) -> None:
    assert is_allowed(compile_grammar(GrammarType.JSON, json.dumps(schema), tokenizer), tokenizer, matches)


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        (GrammarType.REGEX, "(", "unclosed group"),
        (GrammarType.REGEX, "a(?=b)", "look-around"),
        (GrammarType.REGEX, r"(a)\1", "backreferences are not supported"),
        (GrammarType.JSON, "{", "the schema is no JSON"),
        (GrammarType.JSON, "[" * 5000, "nested too deeply"),
        (GrammarType.JSON, "[]", "the schema must be an object"),
        (GrammarType.JSON, '{"const": "\\ud800"}', "grammar is not valid"),
        (GrammarType.REGEX, "a\ud800", "grammar is not valid"),
        (GrammarType.JSON, "false", "the schema must be an object"),
        (GrammarType.JSON, '{"type": "text"}', "Invalid type: text"),
        (GrammarType.JSON, '{"type": "array", "uniqueItems": true}', 'keywords that cannot be kept: "uniqueItems"'),
        (GrammarType.JSON, '{"not": {"type": "null"}}', 'keywords that cannot be kept: "not"'),
        (GrammarType.JSON, '{"oneOf": [{"type": "integer"}, {"minimum": 3}]}', "`oneOf` with cases that overlap"),
        (GrammarType.JSON, '{"type": "integer", "minimum": 5, "maximum": 4}', "Unsatisfiable schema"),
        (GrammarType.JSON, '{"$ref": "https://example.com/schema"}', "is not present"),
        (GrammarType.JSON, EXPLODING, "schema too large"),
        (GrammarType.NONE, "a", "grammar needs a type"),
        (GrammarType.LARK, "root ::= (", "Expected ')'"),
        (GrammarType.LARK, "root ::= word", "Rule 'word' not found"),
        (GrammarType.LARK, "(" * 5000, "grammar is not valid"),
        (GrammarType.LARK, "root ::= " + "(" * 5000, "grammar is not valid"),
        (GrammarType.LARK, "start: word", "unknown name"),
        (GrammarType.LARK, "", "grammar is not valid"),
        (GrammarType.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), f"at most {MAX_GRAMMAR_BYTES} bytes, given"),
    ],
)
def test_what_cannot_be_kept_is_refused(tokenizer: LLTokenizer, kind: GrammarType, text: str, word: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_grammar(kind, text, tokenizer)
    assert word in caught.value.message
    assert caught.value.param == "grammar"
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("text", ['start: "yes " num\nnum: /[0-9]+/', 'root ::= "yes " [0-9]+'])
def test_b6_context_free_grammars_are_lark_or_gbnf(tokenizer: LLTokenizer, text: str) -> None:
    matcher = compile_grammar(GrammarType.LARK, text, tokenizer)
    assert matcher.try_consume_tokens(tokenizer.tokenize_str("yes 42")) == len(tokenizer.tokenize_str("yes 42"))
    assert matcher.is_accepting()
    assert matcher.try_consume_tokens(tokenizer.tokenize_str("no")) == 0
