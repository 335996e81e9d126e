"""The profile run: the largest step there may be, computed before there is a pool, so that what it takes is known."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from funitel.model_server.sampling.sampler import SamplingState, token_logprobs
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher, TextCodec
from funitel.model_server.sequence.table import SequenceState
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams

USUAL_BATCH_SIZE = 128  # sequences, where the router does not say how many
MAX_PROFILED_ROWS = 1024  # sequences: beyond that each takes more than it can pay back
TOP_N = 5
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
    return min(max_batch_size or USUAL_BATCH_SIZE, MAX_PROFILED_ROWS)


def rows_of(count: int, codec: TextCodec) -> list[SequenceState]:
    """So many sequences that ask for everything sampling can do, in places of the sequence table from 0 on."""
    stopping = StoppingParams(max_new_tokens=2, ignore_eos=True)
    begun = SequenceStart(request_id=0, sampling=HEAVIEST, stopping=stopping, top_n_tokens=TOP_N)
    return [
        SequenceState(
            index=i,
            start=begun,
            tokens=[0],
            prompt_len=1,
            num_cached=0,
            sampling=SamplingState.over(HEAVIEST, TOP_N, [0], []),
            detokenizer=Detokenizer(codec, [0]),
            stops=StopMatcher(()),
        )
        for i in range(count)
    ]


def describe_prompts(logits: torch.Tensor) -> None:
    """Take log-probabilities of prompts, from the logits of their tokens [num_logits, vocab_size]."""
    token_logprobs(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


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
