"""Queries that advance a step at a time: each is what it is alone, and the caller chooses the tokens."""

from collections.abc import Sequence
from typing import Any

import pytest

from funitel.llm import LLM, Grammar, InvalidRequest, SamplingParams, StepQueries

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 5, "temperature": 1.2, "top_k": 40},
    {"seed": 6, "repetition_penalty": 1.4, "frequency_penalty": 0.9, "no_repeat_ngram_size": 3},
    {"temperature": 0, "grammar": Grammar.regex("(yes|no), [0-9]{12}")},
)


def alone(llm: LLM, prompt: str, params: SamplingParams) -> tuple[int, ...]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def advance(queries: StepQueries, texts: dict[int, list[int]]) -> list[int]:
    """One step with the tokens that sampling chose; the ids of the queries that had a result."""
    results = queries.infer()
    queries.commit({each.query_id: (each.token_id, each.is_end) for each in results})
    for each in results:
        texts.setdefault(each.query_id, []).append(each.token_id)
    return [each.query_id for each in results]


def test_queries_that_join_and_leave_are_what_they_are_alone(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=10 + i, ignore_eos=True, **ways) for i, ways in enumerate(WAYS)]
    prompts = [f"Query number {i}" for i in range(len(WAYS))]
    expected = [alone(llm, *each) for each in zip(prompts, params, strict=True)]
    queries, texts = StepQueries(llm), {}
    ids = [queries.add_query(prompts[0], params[0]), queries.add_query("It leaves", GREEDY)]
    leaving = ids.pop()
    for _ in range(3):
        assert advance(queries, texts) == [ids[0], leaving]
    ids += [queries.add_query(*each) for each in zip(prompts[1:], params[1:], strict=True)]
    assert queries.remove_query(leaving)
    assert not queries.remove_query(leaving)
    while len(queries):
        advance(queries, texts)
    assert [tuple(texts[i]) for i in ids] == expected
    assert tuple(texts[leaving]) == alone(llm, "It leaves", GREEDY)[:3]


def test_long_prompts_are_computed_in_chunks_in_the_order_of_ids(llm: LLM) -> None:
    long = "x" * 150
    expected = [alone(llm, prompt, GREEDY) for prompt in ("first", long, "second")]
    queries, texts = StepQueries(llm, max_step_tokens=64), {}
    ids = [queries.add_query(prompt, GREEDY) for prompt in ("first", long, "second")]
    steps: list[Sequence[int]] = []
    while len(queries):
        steps.append(advance(queries, texts))
    assert steps[:3] == [[ids[0]], [ids[0]], [ids[0], ids[1], ids[2]]]
    assert [tuple(texts[i]) for i in ids] == expected


def test_the_caller_chooses_the_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    queries = StepQueries(llm)
    query = queries.add_query("Choose", params)
    (result,) = queries.infer()
    assert (result.query_id, result.candidates[0]) == (query, (result.token_id, result.text, result.logprob))
    assert queries.infer() == [result]  # not committed: the same again
    second = result.candidates[1][0]
    queries.commit({query: (second, False)})
    (after,) = queries.infer()
    prompt = [*llm.generate("Choose", params, use_tqdm=False)[0].prompt_token_ids, second]
    assert after.token_id == alone(llm, prompt, GREEDY)[0]  # type: ignore[arg-type]
    queries.commit({query: (after.token_id, True)})
    assert not len(queries)


def test_wrong_calls_are_named(llm: LLM) -> None:
    queries = StepQueries(llm, max_queries=1)
    assert queries.infer() == []
    query = queries.add_query("one", GREEDY)
    assert query > 0
    assert queries.add_query("two", GREEDY) == 0
    with pytest.raises(InvalidRequest, match=f"query {query} has no result to commit a token for"):
        queries.commit({query: (1, False)})
    queries.infer()
    with pytest.raises(InvalidRequest, match=f"query {query}: tokens must be within 0..287, given 288"):
        queries.commit({query: (288, False)})
    queries.remove_query(query)
    with pytest.raises(InvalidRequest, match="mirostat must be 0 for a query"):
        queries.add_query("one", SamplingParams(mirostat=2))
    with pytest.raises(InvalidRequest, match="n must be 1 for a query, given 2"):
        queries.add_query("one", SamplingParams(n=2))
    with pytest.raises(InvalidRequest, match="max_queries must be an integer >= 1, given 0"):
        StepQueries(llm, max_queries=0)
