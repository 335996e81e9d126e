"""Gumbel noise of sampling: a function of (seed, position, token id) alone, on every device.

Adding it to the scores and taking the largest draws from their distribution (the Gumbel-max trick). A rounding error
of the scores changes the draw only where the two best sums lie closer than the error; inverting the cumulative
distribution would let it move every token in the tail.
"""

from collections.abc import Sequence

import numpy as np
import torch

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """The 64-bit key of the noise for the token at `position` of a sequence."""
    return _mix(_mix(seed) + position)


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`noise_key` of many sequences: their seeds as `mixed_seeds` gives them and their positions; [rows] uint64."""
    return _mix_many(seeds + positions.astype(np.uint64))


def uniform(seed: int, position: int, stream: int) -> float:
    """A number in [0, 1) for the token at `position` of a sequence, beside its noise; each stream has another one."""
    return _mix(noise_key(seed, position) + stream) / 2**64


def mixed_seeds(seeds: Sequence[int]) -> np.ndarray:
    """Seeds mixed for `noise_keys`: [len(seeds)] uint64."""
    return _mix_many(np.array(seeds, dtype=np.uint64))


def gumbel(keys: Sequence[int], num_tokens: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise [len(keys), num_tokens] float32; row i is a function of keys[i]."""
    first = torch.tensor([[_as_int32(key >> 32)] for key in keys], dtype=torch.int32, device=device)
    second = torch.tensor([[_as_int32(key)] for key in keys], dtype=torch.int32, device=device)
    return gumbel_of(first, second, num_tokens)


def gumbel_of(first: torch.Tensor, second: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`gumbel` of keys with upper and lower halves on a device, each [rows, 1] int32.

    The two halves of a key are mixed with each token id by xor-shift-multiply rounds, multipliers of "triple32"
    (github.com/skeeto/hash-prospector).
    """
    x = torch.arange(num_tokens, dtype=torch.int32, device=first.device) * _as_int32(0x9E3779B1) ^ first
    x ^= _shifted(x, 17)
    x *= _as_int32(0xED5AD4BB)
    x += second
    x ^= _shifted(x, 11)
    x *= _as_int32(0xAC4C1B51)
    x ^= _shifted(x, 15)
    x *= _as_int32(0x31848BAB)
    x ^= _shifted(x, 14)
    uniform = (x & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)  # in (0, 1]
    # -log(-log(u)) with u = 1 - uniform: log1p keeps the small values, which win, exact.
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right; torch's keeps the sign."""
    return (x >> count) & (MASK_32 >> count)


def _as_int32(x: int) -> int:
    x &= MASK_32
    return x - (1 << 32) if x >> 31 else x


def _mix(x: int) -> int:
    """One number of splitmix64 from state `x` (Steele et al., OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def _mix_many(x: np.ndarray) -> np.ndarray:
    """`_mix` of numbers [rows] uint64; their arithmetic wraps as it should."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
