"""Speculation in the offline model: drafts are verified, and the text is that of a model without them."""

from pathlib import Path
from typing import Any

import pytest

from funitel.llm import LLM, SamplingParams, StartupError, StepQueries
from funitel.llm.completions import CompletionBuilder
from funitel.proto.step import Generation

PROMPTS = ("a b a b a b a b a b", "The sea is", "x" * 60)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TWO_TOKENS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=[65, 66])  # repeats itself
SEEDED = SamplingParams(temperature=1.2, seed=7, max_tokens=40, ignore_eos=True, logprobs=2)
WAYS = (GREEDY, TWO_TOKENS, SEEDED)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Accepted drafts of each step's result, as they come."""
    found: list[int] = []
    feed = CompletionBuilder.feed

    def counted(builder: CompletionBuilder, generation: Generation) -> Any:
        found.append(generation.num_accepted)
        return feed(builder, generation)

    monkeypatch.setattr(CompletionBuilder, "feed", counted)
    return found


def texts(llm: LLM, params: SamplingParams) -> list[tuple[tuple[int, ...], str, int]]:
    outputs = [output.outputs[0] for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]
    return [(each.token_ids, each.text, len(each.logprobs or ())) for each in outputs]


@pytest.mark.parametrize("drafts_itself", [True, False])
def test_text_is_the_same_with_drafts(llm: LLM, model: Path, accepted: list[int], drafts_itself: bool) -> None:
    expected = [texts(llm, params) for params in WAYS]
    assert sum(accepted) == 0
    chosen: dict[str, Any] = {"num_threads": 1, "block_size": 4, "max_batch_total_tokens": 4000, "speculate": 3}
    if drafts_itself:
        chosen["draft_model"] = model
    with LLM(model, **chosen) as drafting:
        assert drafting.loaded.limits.max_speculate == 3
        assert [texts(drafting, params) for params in WAYS] == expected
        assert sum(accepted) > 0
        queries = StepQueries(drafting)
        queries.add_query(PROMPTS[0], GREEDY)
        ids: list[int] = []
        while len(queries):
            results = queries.infer()
            queries.commit({each.query_id: (each.token_id, each.is_end) for each in results})
            ids += [each.token_id for each in results]
        assert tuple(ids) == expected[0][0][0]
        accepted.clear()
        mirostat = SamplingParams(mirostat=2, seed=1, max_tokens=20, ignore_eos=True)
        assert texts(drafting, mirostat) == texts(llm, mirostat)
        assert sum(accepted) == 0  # no memory of a strategy is taken back


def test_settings_that_do_not_fit(model: Path) -> None:
    with pytest.raises(StartupError, match="speculate must be an integer >= 1, given 0"):
        LLM(model, speculate=0)
    with pytest.raises(StartupError, match=r"^draft_model .* makes drafts for speculate, which is not given"):
        LLM(model, draft_model=model)
