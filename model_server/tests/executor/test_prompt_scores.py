"""Scores of prompts: log-probabilities and the likeliest tokens at each place, within bounded memory."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from funitel.model_server.executor import prompt_scores
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.prompt_scores import score
from funitel.model_server.forward.batch import ForwardBatch
from funitel.proto.step import Generation, StepResult, WarmupLimits
from funitel_testing.executors import chunk, decode, load_executor, prefill, start
from funitel_testing.tiny import save_tiny

PROMPT = list(range(40, 60))
OTHER = list(range(100, 133))
WIDTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Executor:
    executor = load_executor(folder, enable_prefill_logprobs=False)
    executor.warmup([start(0, PROMPT)], WarmupLimits(max_prefill_tokens=200, max_batch_total_tokens=2000))
    return executor


@pytest.fixture
def executor(loaded: Executor) -> Executor:
    loaded.clear()
    return loaded


class Watched:
    """A forward that notes of how many tokens it gave logits."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self.num_logits: list[int] = []

    def __call__(self, batch: ForwardBatch, cache: Any) -> torch.Tensor | None:
        self.num_logits.append(len(batch.logit_indices))
        logits: torch.Tensor | None = self._forward(batch, cache)
        return logits


def truth(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [len(ids), vocab_size] of what follows each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs


def of(result: StepResult, request_id: int) -> Generation:
    return next(generation for generation in result.generations if generation.request_id == request_id)


def assert_scored(generation: Generation, ids: Sequence[int], expected: torch.Tensor, width: int) -> None:
    prompt, top = generation.prefill_tokens, generation.prompt_top
    assert prompt is not None
    assert top is not None
    assert list(prompt.ids) == list(ids)
    assert math.isnan(prompt.logprobs[0])
    assert len(top.ranks) == len(ids) - 1
    for place, token_id in enumerate(ids[1:]):
        row = expected[place]
        assert prompt.logprobs[place + 1] == pytest.approx(float(row[token_id]), abs=1e-4)
        assert top.ranks[place] == int((row > row[token_id]).sum()) + 1
        best = row.topk(width)
        assert [each for each, _, _ in top.at(place)] == best.indices.tolist()
        assert [logprob for _, _, logprob in top.at(place)] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert top.texts.keys() == set(top.ids)


@pytest.mark.parametrize("most", [1, 7, 1000])
@pytest.mark.parametrize("chunks", [[33], [10, 1, 22]])
def test_b2_scores_equal_transformers_however_divided(
    executor: Executor, folder: Path, monkeypatch: pytest.MonkeyPatch, most: int, chunks: list[int]
) -> None:
    """No flag is needed; `most` tokens have logits in one forward, beside the last of each row."""
    monkeypatch.setattr(prompt_scores, "MAX_LOGITS_BYTES", 4 * executor.spec.vocab_size * most)
    watched = Watched(executor.runner.decoder)
    monkeypatch.setattr(executor.runner, "decoder", watched)
    starts = [
        start(1, OTHER, chunk_len=chunks[0], prompt_logprobs=WIDTH),
        start(2, PROMPT),
        start(3, PROMPT, prompt_logprobs=0),
    ]
    result = prefill(executor, 1, starts)
    plain, short = of(result, 2), of(result, 3)
    assert result.num_forwards == len(watched.num_logits)
    for count in chunks[1:]:
        assert result.batch is not None
        result = decode(executor, [result.batch], [chunk(1, count)])
    assert_scored(of(result, 1), OTHER, truth(folder, OTHER), WIDTH)
    assert_scored(short, PROMPT, truth(folder, PROMPT), 0)
    assert plain.prefill_tokens is plain.prompt_top is None
    assert plain.tokens == short.tokens, "what follows is the same, scored or not"
    assert max(watched.num_logits) <= most + 2


def test_b2_a_prompt_of_one_token_has_no_scores(executor: Executor) -> None:
    found = of(prefill(executor, 1, [start(1, [40], prompt_logprobs=WIDTH)]), 1)
    assert found.prefill_tokens is not None
    assert found.prompt_top is not None
    assert len(found.prefill_tokens.ids) == 1
    assert found.prompt_top.ids == found.prompt_top.ranks == ()


def test_b2_no_more_tokens_than_there_are(executor: Executor) -> None:
    size = executor.spec.vocab_size
    found = of(prefill(executor, 1, [start(1, PROMPT, prompt_logprobs=size + 5)]), 1)
    assert found.prompt_top is not None
    assert found.prompt_top.width == size


def test_b2_texts_of_a_prompt_are_its_text(executor: Executor) -> None:
    ids = executor.codec.encode("héllo wörld, 😀 ok", add_special_tokens=False)
    found = of(prefill(executor, 1, [start(1, ids, prompt_logprobs=1)]), 1).prefill_tokens
    assert found is not None
    assert "".join(found.texts) == executor.codec.decode(ids)
    assert found.is_special == (False,) * len(ids)


def test_b2_scores_come_once(executor: Executor) -> None:
    result = prefill(executor, 1, [start(1, PROMPT, 3, prompt_logprobs=1)])
    assert result.batch is not None
    assert of(decode(executor, [result.batch]), 1).prompt_top is None
    resumed = of(prefill(executor, 2, [start(2, PROMPT, 3, prompt_logprobs=1, output_ids=(5,))]), 2)
    assert resumed.prompt_top is resumed.prefill_tokens is None


def test_b2_equal_scores_have_one_rank() -> None:
    found = score(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.tensor([2]), 2)
    expected = torch.tensor([1.0, 3.0, 3.0, 2.0]).log_softmax(-1)
    assert found[0, 0] == pytest.approx(float(expected[2]))
    assert found[0, 1] == 1
    assert sorted(found[0, 2:4].tolist()) == [1, 2]
    assert found[0, 4] == found[0, 5] == found[0, 0], "equal to the bit, for clients compare them"
