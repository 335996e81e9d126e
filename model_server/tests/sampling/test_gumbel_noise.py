"""Sampling noise: Gumbel in every direction - over tokens, seeds and positions - and a function of these alone."""

import math

import pytest
import torch

from funitel.model_server.sampling.gumbel_noise import gumbel, noise_key

CPU = torch.device("cpu")


def uniforms(noise: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-noise.double()))


@pytest.mark.parametrize(
    ("seeds", "positions", "num_tokens"),
    [
        ([0], [0], 40_000),
        (range(40_000), [3] * 40_000, 1),
        ([9] * 40_000, range(40_000), 1),
        ([2**64 - 1], [7], 40_000),
    ],
    ids=["tokens", "seeds", "positions", "largest seed"],
)
def test_noise_is_gumbel(seeds: list[int], positions: list[int], num_tokens: int) -> None:
    noise = gumbel(list(map(noise_key, seeds, positions)), num_tokens, CPU).flatten()
    assert torch.isfinite(noise).all()
    counts = torch.histc(uniforms(noise).float(), bins=20, min=0, max=1)
    chi_square = float(((counts - 2000) ** 2 / 2000).sum())
    assert chi_square < 43.8  # 0.1 % of 19 degrees of freedom


def test_neighbours_are_not_correlated() -> None:
    u = uniforms(gumbel([noise_key(seed, 5) for seed in range(100)], 1000, CPU)) - 0.5
    v = uniforms(gumbel([noise_key(5, position) for position in range(100)], 1000, CPU)) - 0.5
    for pairs in ((u[:, 1:] * u[:, :-1]), (u[1:] * u[:-1]), (v[1:] * v[:-1]), (u[1:, 1:] * u[:-1, :-1])):
        assert abs(float(pairs.mean()) * 12) < 4 / math.sqrt(pairs.numel())


def test_a_row_is_a_function_of_its_seed_and_position() -> None:
    together = gumbel([noise_key(1, 4), noise_key(2, 4), noise_key(1, 5)], 300, CPU)
    for row, (seed, position) in enumerate([(1, 4), (2, 4), (1, 5)]):
        assert torch.equal(gumbel([noise_key(seed, position)], 300, CPU)[0], together[row])
    assert len({tuple(row.tolist()) for row in together}) == 3


def test_the_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    assert torch.allclose(gumbel([8], 100, CPU), gumbel([8], 5000, CPU)[:, :100], atol=1e-6)
