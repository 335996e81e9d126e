"""Tokens drawn behind accepted drafts have the target's distribution, whatever is drafted."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.sampling.logits_processors import TorchLogitsProcessors
from funitel.model_server.speculation.interface import DraftRow
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams
from funitel_testing.executors import load_executor, prefill
from funitel_testing.tiny import save_tiny

NUM_DRAWS = 20_000
ALLOWED = (40, 41, 55, 90, 120, 201)
PROMPT = (33, 77, 41)
ROWS, BLOCKS = 50, 3


class Arbitrary:
    """Drafts any of the allowed tokens, at random."""

    name = "arbitrary"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._random = random.Random(5)

    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [[self._random.choice(ALLOWED) for _ in range(row.limit)] for row in rows]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder: Path = save_tiny("llama", tmp_path_factory.mktemp("tiny"))
    return load_executor(folder, speculate=2)


def probabilities(executor: Executor, tokens: Sequence[int], params: SamplingParams) -> np.ndarray:
    """The target's distribution over `ALLOWED` behind tokens, in float64."""
    with torch.inference_mode():
        logits = executor.runner.forward([RowSpan(list(tokens), 0, np.arange(1, 5, dtype=np.int32))])
    assert logits is not None
    masked = torch.full_like(logits, -torch.inf)
    masked[:, list(ALLOWED)] = logits[:, list(ALLOWED)]
    if params.is_sampled:
        TorchLogitsProcessors().warp(masked, [0], [params])
    chances: np.ndarray = masked.double().softmax(dim=1)[0, list(ALLOWED)].numpy()
    return chances


@pytest.mark.parametrize(
    "sampler", [{"temperature": 1.3}, {"temperature": 1.5, "top_k": 4}, {"temperature": 1.2, "top_p": 0.85}]
)
def test_pairs_of_tokens_have_the_distribution_of_the_target(executor: Executor, sampler: dict[str, Any]) -> None:
    params = SamplingParams(do_sample=True, allowed_token_ids=ALLOWED, **sampler)
    first = probabilities(executor, PROMPT, params)
    expected = np.stack(
        [p * probabilities(executor, (*PROMPT, i), params) for p, i in zip(first, ALLOWED, strict=True)]
    )
    assert executor.speculator is not None
    executor.speculator.drafter = Arbitrary()
    executor.speculator.max_step_drafts = 2 * ROWS
    counts, num_accepted = np.zeros((len(ALLOWED), len(ALLOWED))), 0
    for begin in range(0, NUM_DRAWS, ROWS):
        starts = [
            SequenceStart(
                request_id=begin + i,
                input_ids=PROMPT[:2],
                output_ids=PROMPT[2:],
                blocks=tuple(range(1 + BLOCKS * i, 1 + BLOCKS * (i + 1))),
                chunk_len=2,
                sampling=SamplingParams(
                    do_sample=True, allowed_token_ids=ALLOWED, seed=(begin + i) * 7919 + 3, **sampler
                ),
                stopping=StoppingParams(max_new_tokens=4, ignore_eos=True),
                speculate=2,
            )
            for i in range(ROWS)
        ]
        batch = prefill(executor, 1, starts).batch
        assert batch is not None
        pairs: dict[int, list[int]] = {start.request_id: [] for start in starts}
        for row in executor.batches.get(batch.id):
            row.gain = None  # what earlier rows of the class gained keeps none from drafts
        executor.speculator._gains.classes.clear()
        while any(len(pair) < 2 for pair in pairs.values()):
            result = executor.compute_decode([batch]).describe()
            num_accepted += result.num_accepted_tokens
            for generation in result.generations:
                pairs[generation.request_id] += generation.tokens.ids
            if result.batch is None:
                break
            batch = result.batch
        executor.clear()
        for one, two, *_ in pairs.values():
            counts[ALLOWED.index(one), ALLOWED.index(two)] += 1
    assert counts.sum() == NUM_DRAWS
    assert num_accepted > NUM_DRAWS / 20
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    found, wanted = counts[is_possible], expected[is_possible] * NUM_DRAWS
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    degrees = torch.tensor((is_possible.sum() - 1) / 2, dtype=torch.float64)
    p = float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
    assert p > 0.01
