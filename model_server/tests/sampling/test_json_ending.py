"""Answers in JSON end before they are cut off, whatever a model says, and however its steps are taken."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from funitel.model_server.executor.executor import Executor
from funitel.model_server.sampling import json_ending
from funitel.model_server.sampling.grammar import GrammarCompiler
from funitel.model_server.sampling.json_ending import Haste, JsonAnswers, JsonEnding, JsonPosition
from funitel.proto.step import FinishReason, Generation, GrammarType, SequenceStart
from funitel_testing.executors import ids_of, run_alone, start
from funitel_testing.tiny import byte_tokenizer

PROMPT = list(range(40, 60))
CONTEXT = 4096
BLOCKS = tuple(range(1, 120))
TEXT = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "tags": {"type": "array", "items": TEXT}, "note": TEXT},
    "required": ["name", "tags"],
}
TREE: dict[str, Any] = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"of": TEXT, "under": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["of", "under"],
        }
    },
    "$ref": "#/$defs/tree",
}
OPEN: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "any object": {"type": "object"},
    "anything": {},
    "tree": TREE,
    "list": {"type": "array", "items": PERSON},
    "map": {"type": "object", "additionalProperties": {"type": "number"}},
    "pattern": {"type": "object", "properties": {"a": {"pattern": "^[a-z]+( [a-z]+)*$"}}, "required": ["a"]},
    "call or answer": {"anyOf": [{"properties": {"name": {"const": "f"}, "arguments": PERSON}}, TREE["$defs"]["tree"]]}
    | {"$defs": TREE["$defs"]},
}


def asked(schema: Any, max_new_tokens: int, **fields: Any) -> SequenceStart:
    fields = {
        "do_sample": True,
        "temperature": 1.5,
        "seed": 3,
        "ignore_eos": False,
        "blocks": tuple(range(1, 120)),
    } | fields
    grammar = {"grammar": json.dumps(schema), "grammar_type": GrammarType.JSON}
    return start(1, PROMPT, max_new_tokens, **grammar, **fields)


def ended(generations: list[Generation], schema: Any) -> bool:
    """Whether an answer ended by itself; one that did is valid."""
    finished = generations[-1].finished
    assert finished is not None
    if finished.finish_reason is FinishReason.LENGTH:
        return False
    jsonschema.validate(json.loads(finished.text), schema)
    return True


@pytest.mark.parametrize("max_new_tokens", [90, 150, 300])
@pytest.mark.parametrize("name", OPEN)
def test_b4_what_is_open_ends_before_the_last_token(forcing: Executor, name: str, max_new_tokens: int) -> None:
    forcing.clear()
    wholes = [ended(run_alone(forcing, asked(OPEN[name], max_new_tokens, seed=seed)), OPEN[name]) for seed in range(6)]
    assert wholes.count(True) >= 5, wholes


@pytest.mark.parametrize("name", ["person", "tree", "list"])
def test_b4_spans_and_resuming_change_no_token(forcing: Executor, stepping: Executor, name: str) -> None:
    forcing.clear()
    whole = ids_of(run_alone(forcing, asked(OPEN[name], 150)))
    stepping.clear()
    assert ids_of(run_alone(stepping, asked(OPEN[name], 150))) == whole
    for cut in (1, len(whole) // 2, len(whole) - 30, len(whole) - 5):
        forcing.clear()
        assert ids_of(run_alone(forcing, asked(OPEN[name], 150, output_ids=tuple(whole[:cut])))) == whole[cut:]


def test_b4_an_answer_that_cannot_be_closed_in_time_is_cut_off_as_it_is(forcing: Executor) -> None:
    forcing.clear()
    finished = run_alone(forcing, asked(PERSON, 12))[-1].finished
    assert finished is not None
    assert (finished.finish_reason, finished.num_tokens) == (FinishReason.LENGTH, 12)
    assert not finished.text.startswith('{"name":"",')


def test_b4_an_answer_far_from_its_end_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways to close it are looked for at few places only: the count is of the logarithm of the tokens."""
    grammar = json_grammar(folder, PERSON)
    looked: list[int] = []
    closing = JsonAnswers.closing_length

    def counting(self: JsonAnswers, *given: Any) -> int | None:
        looked.append(1)
        return closing(self, *given)

    monkeypatch.setattr(JsonAnswers, "closing_length", counting)
    ending, matcher = JsonEnding(grammar, 4000), grammar.matcher.deep_copy()
    tokens = byte_tokenizer().encode('{"name":"' + "x" * 3900).ids
    for token_id in tokens[:2000]:
        ending.decide(matcher)
        assert matcher.consume_token(token_id)
        ending.take([token_id])
    assert (len(looked), ending.haste) == (2, Haste.NONE)
    for token_id in tokens[2000:]:
        ending.decide(matcher)
        assert matcher.consume_token(token_id)
        ending.take([token_id])
    assert len(looked) < 16


def json_grammar(folder: Path, schema: Any) -> JsonAnswers:
    compiled = GrammarCompiler(folder / "tokenizer.json", 288, frozenset([256])).compile(
        GrammarType.JSON, json.dumps(schema)
    )
    assert compiled.json is not None
    return compiled.json


def following(grammar: JsonAnswers, text: str) -> set[str]:
    """What may follow a text, with many tokens left."""
    ending, matcher, tokenizer = JsonEnding(grammar, 10**6), grammar.matcher.deep_copy(), byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert matcher.consume_tokens(ids)
    ending.take(ids)
    mask = np.zeros(9, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    ending.narrow(mask)
    found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return {tokenizer.decode([token_id]) for token_id in found.tolist()}


def test_b4_strings_entries_numbers_and_depth_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_ending, "MAX_NUMBER", 5)
    monkeypatch.setattr(json_ending, "MAX_DEPTH", 3)
    monkeypatch.setattr("funitel.proto.grammar.json_schema.MAX_STRING", 10)
    monkeypatch.setattr("funitel.proto.grammar.json_schema.MAX_ENTRIES", 3)
    free = json_grammar(folder, {"type": "object"})
    assert following(free, '{"a":"' + "é" * 10) == {'"'}
    assert len(following(free, '{"a":"' + "é" * 9)) > 50
    assert following(free, '{"a":[1,[],"x"') == {"]"}
    assert following(free, '{"a":1,"b":2,"c":"x"') == {"}"}
    assert following(free, '{"a":1,"b":2,"') > {"c"}
    assert following(free, '{"a":1.234') == {",", "}", " "}
    assert not following(free, '{"a":[[') & {"[", "{"}
    stated = {"type": "object", "properties": {"a": TEXT | {"maxLength": 12}}, "additionalProperties": TEXT}
    assert len(following(json_grammar(folder, stated), '{"a":"' + "é" * 11)) > 50
    assert following(json_grammar(folder, {"items": TEXT}), '["","",""') == {"]"}
    assert following(json_grammar(folder, {"items": TEXT, "maxItems": 4}), '["","",""') == {"]", ",", " "}


@pytest.mark.parametrize(
    ("text", "in_string", "entries"),
    [
        ('{"a": "x', True, [1]),
        ('{"a": "x\\"', True, [1]),
        ('{"a": "x\\\\"', False, [1]),
        ('{"a": [1, 2, {"b": {}}', False, [1, 3]),
        ('{"a": "},{[", "b', True, [2]),
        ("[]", False, []),
    ],
)
def test_b4_where_a_text_stands(text: str, in_string: bool, entries: list[int]) -> None:
    for size in (1, 2, 100):
        position = JsonPosition()
        for begin in range(0, len(text), size):
            position.feed(text[begin : begin + size].encode())
        assert position.in_string is in_string
        assert [count for _, count in position.containers] == entries
