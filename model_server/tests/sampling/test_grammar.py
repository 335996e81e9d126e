"""Grammars on a shard: a model that says anything keeps to them, and forced spans change only the steps taken."""

import ctypes
import json
import logging
import random
import time
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from funitel.model_server.executor.executor import Executor
from funitel.model_server.sampling.grammar import CAPACITY, GrammarState, TokenMasks
from funitel.proto.errors import InvalidRequest
from funitel.proto.process import logs
from funitel.proto.step import FinishReason, GeneratedText, Generation, GrammarType, SamplingParams, SequenceStart
from funitel_testing.executors import (
    chunk,
    collect,
    decode,
    ids_of,
    keep_rows,
    load_executor,
    num_sequences,
    prefill,
    run_alone,
    run_out,
    start,
)
from funitel_testing.schemas import SCHEMAS
from funitel_testing.tiny import EOS, VOCAB_SIZE, save_tiny

PROMPT = list(range(40, 60))
EOS_ID = 256
CONTEXT = 512
BLOCKS = tuple(range(1, 120))
MOST_MASK_SECONDS = 0.25  # of CPU time; some ten milliseconds is usual for the worst


@pytest.fixture
def executor(forcing: Executor) -> Executor:
    forcing.clear()
    return forcing


def schema_start(schema: Any, request_id: int = 1, max_new_tokens: int = 300, **fields: Any) -> SequenceStart:
    """A sequence with a completion in JSON."""
    fields = {"do_sample": True, "seed": 3, "ignore_eos": False, "blocks": BLOCKS} | fields
    grammar = {"grammar": json.dumps(schema), "grammar_type": GrammarType.JSON}
    return start(request_id, PROMPT, max_new_tokens, **grammar, **fields)


def regex_start(pattern: str, request_id: int = 1, max_new_tokens: int = 60, **fields: Any) -> SequenceStart:
    fields = {"do_sample": True, "seed": 3, "ignore_eos": False} | fields
    return start(request_id, PROMPT, max_new_tokens, grammar=pattern, grammar_type=GrammarType.REGEX, **fields)


def ending(generations: list[Generation]) -> GeneratedText:
    assert generations[-1].finished is not None
    return generations[-1].finished


def assert_same(found: list[Generation], expected: list[Generation]) -> None:
    """Token for token the same, in whatever steps; log-probabilities up to rounding."""
    mine, theirs = [_tokens(each) for each in (found, expected)]
    assert [token[:3] for token in mine] == [token[:3] for token in theirs]
    assert [token[3] for token in mine] == [token[3] for token in theirs]
    logprobs = [[logprob for token in tokens for logprob in token[4]] for tokens in (mine, theirs)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert ending(found) == ending(expected)


def _tokens(generations: list[Generation]) -> list[tuple[int, str, bool, tuple[int, ...], tuple[float, ...]]]:
    """Id, text, whether it is special, top ids and all log-probabilities of each token."""
    rows = []
    for generation in generations:
        tokens = generation.tokens
        for i in range(len(tokens.ids)):
            ids, logprobs = (), ()
            if generation.top_tokens:
                ids, logprobs = generation.top_tokens[i].ids, generation.top_tokens[i].logprobs
            rows.append((tokens.ids[i], tokens.texts[i], tokens.is_special[i], ids, (tokens.logprobs[i], *logprobs)))
    return rows


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_model_that_says_anything_keeps_to_the_schema_with_and_without_spans(
    forcing: Executor, stepping: Executor, name: str
) -> None:
    for how in ({"seed": 1}, {"seed": 2, "temperature": 3.0, "top_n_tokens": 2}, {"do_sample": False}):
        spans = run_alone(forcing, schema_start(SCHEMAS[name], **how))
        single = run_alone(stepping, schema_start(SCHEMAS[name], **how))
        finished = ending(spans)
        assert finished.finish_reason is FinishReason.EOS_TOKEN
        jsonschema.validate(
            json.loads(finished.text),
            SCHEMAS[name],
            cls=jsonschema.Draft202012Validator,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
        assert ids_of(spans)[-1] == EOS_ID
        assert EOS not in finished.text
        assert_same(spans, single)
        assert len(spans) < len(single)


def test_every_step_that_computes_a_span_shares_it_with_others(executor: Executor) -> None:
    """Rows with a grammar and rows without give the tokens they give alone."""
    asked = [
        schema_start(SCHEMAS[name], i, 60, seed=i, blocks=start(i, PROMPT).blocks)
        for i, name in enumerate(("nested", "refs", "unicode"))
    ]
    asked += [start(3, PROMPT, 40, do_sample=True, seed=9), regex_start("([ab]c){4,9}", 4)]
    alone = {each.request_id: run_alone(executor, each) for each in asked}
    found: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, asked), found)
    assert found.keys() == alone.keys()
    for request_id, generations in found.items():
        assert_same(generations, alone[request_id])


def test_a_span_may_be_computed_in_pieces(executor: Executor) -> None:
    whole = run_alone(executor, schema_start(SCHEMAS["deeply nested"]))
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [schema_start(SCHEMAS["deeply nested"])])
    while result.batch is not None:
        collect(result, found)
        assert result.num_forward_tokens <= 20
        result = decode(executor, [result.batch], [chunk(1, 2)])
    collect(result, found)
    assert_same(found[1], whole)


@pytest.mark.parametrize("cut", [1, 2, 5, 9, 14])
def test_resuming_goes_on_in_the_grammar(forcing: Executor, cut: int) -> None:
    how = {"repetition_penalty": 1.1, "count_penalty": 0.1}
    whole = run_alone(forcing, schema_start(SCHEMAS["flat"], **how))
    ids = ids_of(whole)
    rest = run_alone(forcing, schema_start(SCHEMAS["flat"], output_ids=tuple(ids[:cut]), **how))
    assert ids_of(rest) == ids[cut:]
    assert ending(rest) == ending(whole)


def test_the_tokens_of_a_span_count_for_length(forcing: Executor, stepping: Executor) -> None:
    pattern = r'\{ ?"kind": ?"circle", ?"version": ?3, ?"filled": ?(true|false)\}'
    ids = ids_of(run_alone(forcing, regex_start(pattern)))
    for most in range(1, len(ids) + 1):
        found = run_alone(forcing, regex_start(pattern, max_new_tokens=most))
        assert ids_of(found) == ids[:most]
        assert ending(found) == ending(run_alone(stepping, regex_start(pattern, max_new_tokens=most)))
        assert ending(found).finish_reason is FinishReason.LENGTH
        assert ending(found).num_tokens == most


@pytest.mark.parametrize("stop", ["kind", "rc", '", ', "le"])
def test_a_stop_ends_a_span(forcing: Executor, stepping: Executor, stop: str) -> None:
    asked = schema_start(SCHEMAS["const"], stop_sequences=(stop,))
    found, expected = run_alone(forcing, asked), run_alone(stepping, asked)
    assert_same(found, expected)
    if stop in ("kind", "rc", "le"):
        assert ending(found).finish_reason is FinishReason.STOP_SEQUENCE
        assert ending(found).text.endswith(stop)


def test_the_end_token_comes_only_where_the_text_is_whole(executor: Executor) -> None:
    """A model that wants to end at once is not let."""
    eager = {"logit_bias": ((EOS_ID, 100.0),)}
    assert ending(run_alone(executor, regex_start("a{3,8}", **eager))).text == "aaa"
    never = {"logit_bias": ((EOS_ID, -100.0),)}
    finished = ending(run_alone(executor, regex_start("a{3,8}", **never)))
    assert (finished.text, finished.finish_reason) == ("a" * 8, FinishReason.EOS_TOKEN)


def test_ignoring_the_end_goes_on_as_long_as_the_grammar_does(executor: Executor) -> None:
    eager = {"logit_bias": ((EOS_ID, 100.0),), "ignore_eos": True}
    finished = ending(run_alone(executor, regex_start("a{3,8}", **eager)))
    assert (finished.text, finished.finish_reason) == ("a" * 8, FinishReason.EOS_TOKEN)


def test_special_tokens_are_no_text(executor: Executor) -> None:
    """Not even where the grammar allows their letters, and the model wants nothing else."""
    wants = {"logit_bias": ((EOS_ID, 100.0),)}
    found = run_alone(executor, regex_start(r"[<|a-z>]{7}", **wants))
    assert [special for g in found for special in g.tokens.is_special] == [False] * 7 + [True]
    assert len(ending(found).text) == 7


def test_tokens_beyond_the_tokenizer_are_never_chosen(tmp_path: Path) -> None:
    """A vocabulary padded for alignment has scores for tokens that do not exist."""
    padded = load_executor(save_tiny("llama", tmp_path, vocab_size=330))
    wants = {"logit_bias": tuple((i, 100.0) for i in range(288, 330))}
    assert len(ending(run_alone(padded, regex_start("[a-z]{9}", **wants))).text) == 9


def test_raw_logprobs_are_the_models_own_and_so_every_token_takes_a_forward(
    forcing: Executor, stepping: Executor
) -> None:
    asked = schema_start(SCHEMAS["const"], raw_logprobs=True, top_n_tokens=3)
    found = run_alone(forcing, asked)
    assert_same(found, run_alone(stepping, asked))
    assert ids_of(found) == ids_of(run_alone(forcing, schema_start(SCHEMAS["const"])))
    assert all(g.tokens.logprobs[0] < -0.01 for g in found)
    assert all(len(g.top_tokens[0].ids) == 3 for g in found)


def test_prompt_logprobs_come_with_the_first_span(executor: Executor) -> None:
    found = run_alone(executor, regex_start("abcdef[xy]", prefill_logprobs=True))
    assert len(found[0].tokens.ids) > 1
    assert found[0].prefill_tokens is not None
    assert found[0].prefill_tokens.ids == tuple(PROMPT)
    assert all(g.prefill_tokens is None for g in found[1:])


def test_where_nothing_can_follow_the_sequence_is_cut(executor: Executor, caplog: pytest.LogCaptureFixture) -> None:
    """The engine gives up on a row; the others go on."""
    result = prefill(executor, 1, [regex_start("[a-z]{30}", 1), regex_start("[a-z]{30}", 2)])
    assert result.batch is not None
    row = executor.batches.rows_of(1)[0]
    assert row.grammar is not None
    row.grammar._matcher.consume_token(EOS_ID - 1)
    with caplog.at_level(logging.WARNING):
        result = decode(executor, [result.batch])
    (told,) = [record for record in caplog.records if "ends early" in record.message]
    assert logs.fields_of(told) == {"request_id": "1"}
    by_id = {g.request_id: g for g in result.generations}
    finished = by_id[1].finished
    assert finished is not None
    assert (finished.finish_reason, len(finished.text), finished.num_tokens) == (FinishReason.LENGTH, 1, 2)
    assert by_id[2].finished is None
    assert result.batch is not None
    found: dict[int, list[Generation]] = {}
    run_out(executor, decode(executor, [keep_rows(executor, 1, [2])]), found)
    assert len(ending(found[2]).text) == 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": "(", "grammar_type": GrammarType.REGEX}, "unclosed group"),
        ({"grammar": "{}}", "grammar_type": GrammarType.JSON}, "the schema is no JSON"),
        ({"grammar": "a"}, "grammar needs a type"),
        ({"grammar": "b+", "grammar_type": GrammarType.REGEX, "output_ids": (3, 4)}, "output_ids are not a text"),
    ],
)
def test_a_bad_grammar_is_refused_and_changes_nothing(executor: Executor, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        prefill(executor, 1, [start(1, PROMPT), start(2, PROMPT, **fields)])
    assert num_sequences(executor) == 0


def test_compiled_grammars_are_kept_until_others_take_their_place(executor: Executor) -> None:
    compiler = executor.admission.grammars
    first = compiler.compile(GrammarType.REGEX, "first")
    assert compiler.compile(GrammarType.REGEX, "first") is first
    assert compiler.compile(GrammarType.JSON, '{"const":"first"}') is not first
    for i in range(CAPACITY - 2):
        compiler.compile(GrammarType.REGEX, f"other {i}")
    assert compiler.compile(GrammarType.REGEX, "first") is first
    for i in range(CAPACITY):
        compiler.compile(GrammarType.REGEX, f"more {i}")
    assert compiler.compile(GrammarType.REGEX, "first") is not first
    assert len(compiler._compiled) == CAPACITY


def test_masks_are_of_the_rows_that_have_a_grammar(executor: Executor) -> None:
    state = executor.admission.grammars.start(regex_start("[ab]").sampling, (), num_left=60, ignores_eos=False)
    masks = TokenMasks.of([None, state, None], 288)
    assert masks is not None
    assert masks.rows == [1]
    assert executor.codec.decode(_ids_in(masks.bits[0])) == "ab"
    assert TokenMasks.of([None, None], 288) is None


def test_masks_of_named_tokens_have_a_bit_for_each_of_them() -> None:
    named = {3: np.array([0, 31, 32, 96]), 0: np.array([64])}
    masks = TokenMasks.naming(named, 97)
    assert masks is not None
    assert masks.rows == [3, 0]
    assert (masks.bits.shape, masks.bits.dtype) == ((2, 4), np.dtype(np.int32))
    assert [_ids_in(row) for row in masks.bits] == [[0, 31, 32, 96], [64]]
    assert TokenMasks.naming({}, 97) is None


def _ids_in(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


class FakeMatcher:
    """Forces `spans` one after the other, then is stopped; `allowed` may follow each token."""

    def __init__(self, *spans: list[int], allowed: tuple[int, ...] = (), is_stopped: bool = True) -> None:
        self.taken: list[int] = []
        self.failed = False
        self._spans = spans
        self._bits = np.zeros(4, dtype=np.int32)
        self._bits.view(np.uint8)[:] = np.packbits(np.isin(np.arange(128), allowed), bitorder="little")
        self._stops = is_stopped

    def is_stopped(self) -> bool:
        return self._stops and len(self.taken) == sum(map(len, self._spans))

    def is_error(self) -> bool:
        return self.failed

    def compute_ff_tokens(self) -> list[int]:
        left = len(self.taken)
        for span in self._spans:
            if left < len(span):
                return span[left:]
            left -= len(span)
        return []

    def consume_tokens(self, ids: list[int]) -> bool:
        self.taken += ids
        return not self.failed

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, self._bits.ctypes.data, num_bytes)


END_ID = 37  # within its word of 32 bits neither the first nor the last


def state_of(matcher: FakeMatcher, *, ignores_eos: bool = False) -> GrammarState:
    return GrammarState(cast(LLMatcher, matcher), [END_ID], ignores_eos=ignores_eos)


@pytest.mark.parametrize(
    ("most", "found"),
    [(0, []), (1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4, 5]), (6, [1, 2, 3, 4, 5, END_ID])],
)
def test_forced_tokens_are_at_most_so_many_the_end_token_included(most: int, found: list[int]) -> None:
    matcher = FakeMatcher([1, 2], [3, 4, 5])
    assert state_of(matcher).forced(most) == found
    assert matcher.taken == [each for each in found if each != END_ID]


def test_no_end_token_is_forced_where_more_may_follow_or_the_engine_has_failed() -> None:
    assert state_of(FakeMatcher([1, 2], is_stopped=False)).forced(9) == [1, 2]
    failed = FakeMatcher([1, 2])
    failed.failed = True
    assert state_of(failed).forced(9) == []


def _filled(state: GrammarState) -> list[int]:
    mask = np.full(4, -1, dtype=np.int32)
    state.fill(mask)
    return _ids_in(mask)


def test_a_mask_has_what_the_engine_allows_and_only_the_end_token_where_it_allows_nothing() -> None:
    allowed = state_of(FakeMatcher([1], allowed=(5, END_ID, 127)))
    assert _filled(allowed) == [5, END_ID, 127]
    assert allowed.is_stuck is False
    whole = state_of(FakeMatcher())
    assert _filled(whole) == [END_ID]
    assert whole.is_stuck is False
    nothing = state_of(FakeMatcher([1]))
    assert _filled(nothing) == [END_ID]
    assert nothing.is_stuck is True
    failed = FakeMatcher([1], allowed=(5,))
    failed.failed = True
    state = state_of(failed)
    assert _filled(state) == [END_ID]
    assert state.is_stuck is True


def test_an_ignored_end_token_is_left_out_unless_nothing_else_may_follow() -> None:
    assert _filled(state_of(FakeMatcher([1], allowed=(5, END_ID, 127)), ignores_eos=True)) == [5, 127]
    assert _filled(state_of(FakeMatcher([1], allowed=(END_ID,)), ignores_eos=True)) == [END_ID]


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*a.{12})+",
        "(a|aa|aaa)*b",
        "(.{0,200}x){20}",
        "((\\w+\\s){1,100}\\d{1,50}){1,50}",
        "(.*[aeiou].{14}){3}",
        "(?:a?){300}a{300}",
        "(x.{1000}|y.{999}|[a-z ]{1,900})+",
    ],
)
def test_a_hostile_grammar_is_quick_from_token_to_token(executor: Executor, pattern: str) -> None:
    """What compiles may still be dear later: the engine's limits end such a sequence, and no step waits for it."""
    compiler = executor.admission.grammars
    state = compiler.start(
        SamplingParams(grammar=pattern, grammar_type=GrammarType.REGEX), (), num_left=200, ignores_eos=False
    )
    rng = random.Random(1)
    for _ in range(100):
        began = time.process_time()
        masks = TokenMasks.of([state], VOCAB_SIZE)
        assert time.process_time() - began < MOST_MASK_SECONDS
        assert masks is not None
        bits = np.unpackbits(masks.bits.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        if not state.push(int(rng.choice(np.flatnonzero(bits)))):
            return
