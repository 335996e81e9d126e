"""The largest step there may be, computed before there is a pool, so that what it takes beside the pool is known."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from funitel.model_server.sampler import SamplingState, sample, token_logprobs
from funitel.model_server.scores import ScoreMath
from funitel.proto.step import SamplingParams

USUAL_BATCH_SIZE = 128  # sequences, where nobody says how many
MOST_REHEARSED = 1024  # sequences: beyond that each takes more than it can pay back
# Every filter there is, and the model's own scores kept beside those that it changes.
HEAVIEST = SamplingParams(
    do_sample=True,
    temperature=0.7,
    top_k=1000,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.1,
    raw_logprobs=True,
)


def num_rows(max_batch_size: int | None) -> int:
    """Sequences of the largest step, beside its prompts."""
    return min(max_batch_size or USUAL_BATCH_SIZE, MOST_REHEARSED)


def sample_heavily(logits: torch.Tensor, num_rows: int, maths: ScoreMath) -> None:
    """Take the log-probabilities of prompts, and sample `num_rows` sequences with everything that takes memory.

    `logits` [num_logits, vocab_size] are those of the prompts, then those of the sequences.
    """
    prompts = logits[: len(logits) - num_rows]
    token_logprobs(prompts, torch.zeros(len(prompts), dtype=torch.int64, device=logits.device))
    states = [SamplingState.over(HEAVIEST, 1, [0], []) for _ in range(num_rows)]
    sample(logits[len(prompts) :], states, [1] * num_rows, None, maths)


def within(prompts: Iterable[list[int]], budget: int) -> list[list[int]]:
    """The prompts that are not empty, cut off where they would be more tokens than `budget`."""
    kept = []
    for prompt in prompts:
        if tokens := prompt[:budget]:
            kept.append(tokens)
            budget -= len(tokens)
    return kept


def tables(counts: Sequence[int]) -> list[np.ndarray]:
    """Block tables of so many blocks each, one behind the other."""
    return np.split(np.arange(sum(counts), dtype=np.int32), np.cumsum(counts)[:-1])
