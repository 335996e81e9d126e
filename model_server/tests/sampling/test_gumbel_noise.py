"""Sampling noise: Gumbel in every direction - over tokens, seeds and positions - and a function of these alone."""

import math

import numpy as np
import pytest
import torch

from funitel.model_server.sampling.gumbel_noise import gumbel, mixed_seeds, noise_key, noise_keys

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


def reference(key: int, token: int) -> float:
    """The noise of one token in Python's numbers."""
    bits = (1 << 32) - 1
    x = (token * 0x9E3779B1 ^ key >> 32) & bits
    x = (x ^ x >> 17) * 0xED5AD4BB + key & bits
    x = (x ^ x >> 11) * 0xAC4C1B51 & bits
    x = (x ^ x >> 15) * 0x31848BAB & bits
    x ^= x >> 14
    uniform = min(((x & 0x7FFFFFFF) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


def test_the_noise_of_a_key_is_the_same_for_ever() -> None:
    """A sequence that is resumed elsewhere, or by another version, draws the same tokens."""
    largest = 0x5432AE93  # of token 0: its bits are as many ones as there may be, in float32 a uniform number of 1
    keys = [0, 1, largest, 0x8000_0000_8000_0000, noise_key(7, 3), 2**64 - 1]
    found = gumbel(keys, 500, CPU)
    expected = torch.tensor([[reference(key, token) for token in range(500)] for key in keys])
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_keys_are_numbers_of_splitmix64() -> None:
    seeds = [0, 1234567, 2**64 - 1]
    assert mixed_seeds(seeds)[:2].tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]  # its published first numbers
    positions = np.array([0, 3, 1 << 20])
    keys = noise_keys(mixed_seeds(seeds), positions).tolist()
    assert keys == [noise_key(seed, int(position)) for seed, position in zip(seeds, positions, strict=True)]
    assert keys[0] == int(mixed_seeds([0xE220A8397B1DCDAF])[0])
