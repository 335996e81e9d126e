"""Sampling on the device against the reference sampler: the same tokens, log-probabilities and alternatives."""

from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.model_server.gpu_sampling.plan import RowStates, SamplingPlan
from funitel.model_server.gpu_sampling.result_copy import HostCopy
from funitel.model_server.gpu_sampling.sampler import DeviceSampler
from funitel.model_server.sampling.gumbel_noise import mixed_seeds, noise_key, noise_keys
from funitel.model_server.sampling.sampler import sample
from funitel.model_server.sequence.table import SequenceState
from funitel_testing.sampled_rows import draw_params, make_masks, make_row

CPU = torch.device("cpu")
VOCAB = 200


class Pair:
    """The same rows sampled by the reference and on a device, step by step."""

    def __init__(self, rows: list[SequenceState], seed: int) -> None:
        self.rows = rows
        self.states = RowStates(VOCAB, CPU)
        self.sampler = DeviceSampler(self.states, TorchMaths())
        self.generator = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)

    def step(self, rows: list[SequenceState], logits: torch.Tensor | None = None) -> None:
        """One step of some of the rows."""
        if logits is None:
            logits = torch.randn(len(rows), VOCAB, generator=self.generator) * 3
        positions = [len(row.tokens) for row in rows]
        masks = make_masks([i for i, row in enumerate(rows) if row.start.sampling.grammar], VOCAB, self.numpy)
        expected = sample(logits.clone(), [row.sampling for row in rows], positions, masks)
        plan = SamplingPlan.of(rows, self.states, self.sampler.maths)
        choice = self.sampler.sample(logits.clone(), plan, np.array(positions), masks)
        found = choice.read(HostCopy(choice.numbers()).wait())
        assert list(map(repr, found)) == list(map(repr, expected))  # NaN is not equal to itself
        for row, token in zip(rows, expected, strict=True):
            assert self.states.tokens[row.index] == token.id
            row.take(token.id)


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_every_kind_as_the_reference(seed: int) -> None:
    """Rows join and leave from step to step; those with penalties are counted on the device."""
    generator = np.random.default_rng(seed)
    rows = [make_row(i, draw_params(generator), generator, VOCAB) for i in range(9)]
    pair = Pair(rows, seed)
    for _ in range(4):
        chosen = generator.permutation(len(rows))[: generator.integers(1, len(rows) + 1)]
        pair.step([rows[i] for i in chosen])


@pytest.mark.parametrize("params", [{}, {"do_sample": True, "top_p": 0.7}, {"repetition_penalty": 1.4}, {"top_k": 3}])
def test_scores_that_are_no_numbers_are_their_rows_alone(params: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    rows = [make_row(i, params, generator, VOCAB, top_n=i) for i in range(4)]
    logits = torch.randn(4, VOCAB)
    logits[1, 7], logits[2, 9] = torch.nan, torch.inf
    Pair(rows, 0).step(rows, logits)


def test_many_ties_with_the_last_of_the_likeliest_are_all_told() -> None:
    generator = np.random.default_rng(0)
    rows = [make_row(i, {}, generator, VOCAB, top_n=3) for i in range(3)]
    logits = torch.randn(3, VOCAB)
    logits[0, 20:80] = 9.0
    logits[1, :] = 0.0
    logits[2, 3:] = -torch.inf
    Pair(rows, 0).step(rows, logits)


def test_a_slot_that_goes_to_another_sequence_begins_anew() -> None:
    generator = np.random.default_rng(0)
    how = {"presence_penalty": 1.0, "repetition_penalty": 1.5}
    first, second = (make_row(3, how, generator, VOCAB) for _ in range(2))
    pair = Pair([first], 1)
    pair.step([first])
    pair.step([second])
    assert len(pair.states.counts) == 8


def test_slots_and_counts_grow() -> None:
    states = RowStates(VOCAB, CPU)
    states.tokens[5] = 77
    states.reserve(3000)
    assert (len(states.tokens), int(states.tokens[5])) == (3000, 77)
    generator = np.random.default_rng(0)
    rows = [make_row(i, {"presence_penalty": 1.0}, generator, VOCAB) for i in range(20)]
    assert [states.place_of(row) for row in rows] == list(range(20))
    assert states.counts[:20, 0].sum(1).tolist() == [len(row.tokens) for row in rows]


def test_noise_keys_of_many_are_those_of_each() -> None:
    seeds, positions = [0, 5, 2**64 - 1, 1 << 63], [0, 9, 131_000, 3]
    found = noise_keys(mixed_seeds(seeds), np.array(positions))
    assert found.tolist() == list(map(noise_key, seeds, positions))
