"""`LLM.beam_search` against transformers' own beam search."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from funitel.llm import LLM, BeamSearchParams, InvalidRequest

NUM_PROMPTS = 20
MAX_TOKENS = 12
POOL_TOKENS = 4000


def prompts_of(vocab_size: int, seed: int = 0) -> list[list[int]]:
    chosen = random.Random(seed)
    return [[chosen.randrange(vocab_size) for _ in range(chosen.randint(1, 20))] for _ in range(NUM_PROMPTS)]


def expected(oracle: Any, prompt: list[int], *, num_beams: int, **options: Any) -> list[tuple[tuple[int, ...], float]]:
    """Sequences and scores that transformers finds, best first, without padding."""
    ids = torch.tensor([prompt])
    ends = oracle.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    with torch.no_grad():
        found = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=ends[0] if ends else 0,
            **options,
        )
    sequences = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        new = row[len(prompt) :]
        end = next((place + 1 for place, token_id in enumerate(new) if token_id in ends), len(new))
        sequences.append(((*prompt, *new[:end]), score))
    return sequences


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """As transformers computes it, in blocks so small that beams part within and between them."""
    with LLM(model, num_threads=1, block_size=4, dtype="float32", max_batch_total_tokens=POOL_TOKENS) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_the_beams_are_those_of_transformers(
    llm: LLM, oracle: Any, width: int, length_penalty: float, early_stopping: Any
) -> None:
    prompts = prompts_of(200)
    params = BeamSearchParams(
        beam_width=width, max_tokens=MAX_TOKENS, length_penalty=length_penalty, early_stopping=early_stopping
    )
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        wanted = expected(oracle, prompt, num_beams=width, length_penalty=length_penalty, early_stopping=early_stopping)
        assert [each.tokens for each in output.sequences] == [tokens for tokens, _ in wanted]
        assert [each.score for each in output.sequences] == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_a_width_beyond_the_pool_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="beam_width 100 needs .* tokens of the KV pool, which has 4000"):
        llm.beam_search([[1] * 100], BeamSearchParams(beam_width=100, max_tokens=100))
