"""One choice: tokens become parts, special tokens that mark calls included, whatever the steps."""

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funitel.proto.step import FinishReason, GeneratedText, Generation, SamplingParams, StoppingParams, Tokens
from funitel.router.chat.answer import ChatAnswer
from funitel.router.chat.call import Tool
from funitel.router.chat.choice import Choice
from funitel.router.chat.parts import EndReason
from funitel.router.chat.prompt import ChatPrompt
from funitel.router.chat.reasoning_parser import REASONING_FORMATS
from funitel.router.chat.tool_formats import BY_NAME
from funitel.router.core.request import Request
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.prepare import GenerationJob
from funitel.router.serving.service import Service

SPECIAL = {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>", "<tool_call>"}


def answer(
    pieces: Sequence[str],
    prompt: ChatPrompt,
    *,
    stops: tuple[str, ...] = (),
    strides: Sequence[int] = (1,),
    parallel_calls: bool = True,
) -> ChatAnswer:
    """What a client gets when a model writes some tokens, so many a step."""
    request = Request(
        input_ids=(1, 2), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=99, stop_sequences=stops)
    )
    job = GenerationJob(cast(Service, None), request, arrived=Arrival(0.0))
    choice = Choice(job, prompt, top_logprobs=0, parallel_calls=parallel_calls)
    parts = []
    for generation in generations(pieces, stops, strides):
        parts += choice.feed(generation)
    return ChatAnswer.of(parts)


def generations(pieces: Sequence[str], stops: tuple[str, ...], strides: Sequence[int]) -> list[Generation]:
    """What a shard would send: it looks for stops in the text without special tokens."""
    taken: list[str] = []
    stop = None
    for piece in (*pieces, "</s>"):
        taken.append(piece)
        text = "".join(each for each in taken if each not in SPECIAL)
        stop = next((text.find(each) for each in stops if each in text), None)
        if stop is not None:
            break
    reason = FinishReason.EOS_TOKEN if stop is None else FinishReason.STOP_SEQUENCE
    finished = GeneratedText(text, len(taken), reason, stop_index=None if stop is None else 0, stop_start=stop)
    steps, place = [], 0
    while place < len(taken):
        group = taken[place : place + strides[len(steps) % len(strides)]]
        place += len(group)
        tokens = Tokens((0,) * len(group), (-1.0,) * len(group), tuple(group), tuple(t in SPECIAL for t in group))
        steps.append(Generation(0, tokens, finished=finished if place >= len(taken) else None))
    return steps


def prompt(tool_format: str | None = None, reasoning: str | None = None, is_thinking: bool = False) -> ChatPrompt:
    return ChatPrompt(
        "",
        tools=(Tool(name="add"),),
        tool_format=BY_NAME[tool_format] if tool_format else None,
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        is_thinking=is_thinking,
    )


def test_markers_may_be_special_tokens() -> None:
    found = answer(["Well", " then", "[TOOL_CALLS]", "add", "[ARGS]", '{"a"', ": 1}"], prompt("mistral"))
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("add", '{"a": 1}')]
    assert found.text == "Well then"
    assert found.finished.reason is EndReason.TOOL_CALLS


def test_special_tokens_are_not_shown_where_they_mark_nothing() -> None:
    assert answer(["a", "[TOOL_CALLS]", "b"], prompt()).text == "ab"
    assert answer(["a", "[ARGS]", "b"], prompt("hermes")).text == "ab"


def test_reasoning_may_be_marked_by_special_tokens() -> None:
    found = answer(["[THINK]", "Hm", ".", "[/THINK]", "Yes", "."], prompt(reasoning="mistral"))
    assert (found.reasoning, found.text) == ("Hm.", "Yes.")
    assert found.finished.usage.reasoning_tokens == 2
    assert [token.text for token in found.tokens] == ["Yes", "."]


def test_thoughts_come_before_calls() -> None:
    pieces = ["Hm", "</think>", "\n", "<tool_call>", '{"name": "add"}', "</tool_call>"]
    found = answer(pieces, prompt("hermes", "think", is_thinking=True))
    assert (found.reasoning, found.text) == ("Hm", "")
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("add", "{}")]


@pytest.mark.parametrize("strides", [(1,), (2,), (99,)])
def test_a_stop_cuts_after_the_markers_before_it(strides: Sequence[int]) -> None:
    pieces = ["Well", "[TOOL_CALLS]", "add", "[ARGS]", '{"a": "st', 'op"}', "[TOOL_CALLS]"]
    found = answer(pieces, prompt("mistral"), stops=("stop",), strides=strides)
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("add", '{"a": "')]
    found = answer(["a sto", "p b"], prompt("mistral"), stops=("stop",), strides=strides)
    assert (found.text, found.finished.reason, found.finished.stop_sequence) == ("a ", EndReason.STOP_SEQUENCE, "stop")


def test_calls_beyond_the_first_are_dropped_where_parallel_ones_are_off() -> None:
    pieces = ['[{"name": "add", "arguments": {"a": 1}}, ', '{"name": "add", "arguments": {"a": 2}}]']
    found = answer(pieces, prompt("json"), parallel_calls=False)
    assert [call.arguments for call in found.tool_calls] == ['{"a": 1}']


PIECES = st.sampled_from(
    [
        *sorted(SPECIAL - {"</s>"}),
        *("</tool_call>", '{"name": "add", "arguments": {"a": 1}}', "add", '{"b": "', '"}', "[", "]", ",", "st", "op"),
        *(" ", "\n", "", "text", "{", "}", "é"),
    ]
)


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=16),
    strides=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    format=st.sampled_from([None, *sorted(BY_NAME)]),
    reasoning=st.sampled_from([None, "mistral"]),
    stops=st.sampled_from([(), ("stop",), ("add",)]),
)
def test_the_answer_does_not_depend_on_the_steps(
    pieces: list[str], strides: list[int], format: str | None, reasoning: str | None, stops: tuple[str, ...]
) -> None:
    answers = [
        answer(pieces, prompt(format, reasoning), stops=stops, strides=steps)
        for steps in (strides, [1], [len(pieces) + 1])
    ]
    results = [
        (a.text, a.reasoning, [(c.name, c.arguments) for c in a.tool_calls], a.finished, [t.text for t in a.tokens])
        for a in answers
    ]
    assert results[0] == results[1] == results[2]
