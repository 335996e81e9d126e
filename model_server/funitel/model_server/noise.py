"""The noise of sampling: a function of (seed, position, token id) alone, on every device.

Adding it to the scores and taking the largest draws from their distribution (the Gumbel-max trick). A rounding error
of the scores changes the draw only where the two best sums lie closer than the error; inverting the cumulative
distribution would let it move every token in the tail.
"""

from collections.abc import Sequence

import torch

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """The 64-bit key of the noise for the token at `position` of a sequence."""
    return _mix(_mix(seed) + position)


def gumbel(keys: Sequence[int], num_tokens: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise [len(keys), num_tokens] float32; row i is a function of keys[i].

    The two halves of a key are mixed with each token id by xor-shift-multiply rounds, multipliers of "triple32"
    (github.com/skeeto/hash-prospector).
    """
    first = torch.tensor([[_as_int32(key >> 32)] for key in keys], dtype=torch.int32, device=device)
    second = torch.tensor([[_as_int32(key)] for key in keys], dtype=torch.int32, device=device)
    x = torch.arange(num_tokens, dtype=torch.int32, device=device) * _as_int32(0x9E3779B1) ^ first
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
