"""How positions enter a model: rotary embeddings (RoPE) with their scalings, ALiBi slopes, sinusoidal vectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.spec.model_spec import RotaryScaling, RotarySpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of one step's tokens. `cos` and `sin` are [num_tokens, 1, dims / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the leading elements of heads [num_tokens, num_heads, head_dim]; the others pass."""
        half = self.cos.shape[-1]
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self.is_interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        results = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        rotated = torch.stack(results, dim=-1).flatten(-2) if self.is_interleaved else torch.cat(results, dim=-1)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class Rotary:
    """Rotary position embedding. Source: RoFormer, arXiv 2104.09864; scalings as transformers names them.

    Where frequencies depend on how long a sequence is (dynamic, longrope), a token takes those of its sequence's prompt
    or of its own position, whichever reaches further: chunks and neighbours change nothing.
    """

    def __init__(self, spec: RotarySpec, head_dim: int, device: torch.device) -> None:
        self.spec = spec
        self.dims = spec.dims or head_dim
        scaling = spec.scaling
        plain = 1.0 / self._periods(torch.tensor(spec.base))
        self.frequencies = _scaled(plain, spec.base, scaling).to(device)  # [dims / 2]
        self._axes = torch.tensor(spec.axes(), device=device)  # by which each pair turns; empty: there is one axis
        self._long: torch.Tensor | None = None
        if scaling.kind == "longrope":
            self._long = (plain / torch.tensor(scaling.long_factors)).to(device)

    def _periods(self, base: torch.Tensor) -> torch.Tensor:
        exponents = torch.arange(0, self.dims, 2, dtype=torch.int64, device=base.device).float() / self.dims
        return base[..., None] ** exponents

    @property
    def needs_reaches(self) -> bool:
        """Whether frequencies depend on how long a sequence is."""
        return self.spec.scaling.kind in ("dynamic", "longrope")

    def rotation(self, positions: torch.Tensor, reaches: torch.Tensor | None, dtype: torch.dtype) -> Rotation:
        """The rotation of tokens at `positions` of sequences of at least `reaches` tokens, each [num_tokens].

        Positions may be [3, num_tokens], by axis.
        """
        frequencies = self.frequencies if reaches is None else self._frequencies_within(reaches)
        angles = (self._by_pair(positions).float() * frequencies)[:, None]
        amplitude = self._amplitude(reaches)
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        return Rotation(cos.to(dtype), sin.to(dtype), self.spec.is_interleaved)

    def _by_pair(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens for each pair, [num_tokens, dims / 2], or for all alike, [num_tokens, 1]."""
        if positions.dim() == 1:
            return positions[:, None]
        return positions[self._axes].t() if len(self._axes) else positions[0, :, None]

    def _amplitude(self, reaches: torch.Tensor | None) -> torch.Tensor | float:
        """What multiplies cosines and sines: a number, or one for each token, [num_tokens, 1, 1]."""
        scaling = self.spec.scaling
        if scaling.long_amplitude is None or reaches is None:
            return scaling.amplitude
        is_long = reaches > scaling.original_max_position
        return torch.where(is_long, scaling.long_amplitude, scaling.amplitude)[:, None, None]

    def _frequencies_within(self, reaches: torch.Tensor) -> torch.Tensor:
        """Frequencies [num_tokens, dims / 2] of the kinds that depend on length."""
        scaling, trained = self.spec.scaling, self.spec.scaling.original_max_position
        if self._long is not None:
            return torch.where((reaches > trained)[:, None], self._long, self.frequencies)
        stretch = scaling.factor * reaches.clamp(min=trained).float() / trained - (scaling.factor - 1)
        return 1.0 / self._periods(self.spec.base * stretch ** (self.dims / (self.dims - 2)))


def _scaled(frequencies: torch.Tensor, base: float, scaling: RotaryScaling) -> torch.Tensor:
    """Stretch rotary frequencies for a longer context. Source: transformers' definitions of each `rope_type`."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        return frequencies / torch.tensor(scaling.short_factors)
    if scaling.kind == "proportional":
        is_turned = torch.arange(len(frequencies)) < int(scaling.share * len(frequencies))
        return frequencies * is_turned / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * torch.pi)  # full turns over the trained context
        span = scaling.high_freq_factor - scaling.low_freq_factor
        share = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)  # 1: fast frequencies stay as they are
        return frequencies * share + frequencies / scaling.factor * (1 - share)
    if scaling.kind == "yarn":
        share = 1 - _yarn_ramp(2 * len(frequencies), base, scaling)
        return frequencies * share + frequencies / scaling.factor * (1 - share)
    return frequencies


def _yarn_ramp(dims: int, base: float, scaling: RotaryScaling) -> torch.Tensor:
    """0 for frequencies that stay, 1 for those divided by the factor. Source: YaRN, arXiv 2309.00071."""

    def place(turns: float) -> float:
        return dims * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    return ((torch.arange(dims // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def alibi_slopes(num_heads: int, bias_max: float) -> torch.Tensor:
    """How fast each head's scores fall with distance, [num_heads]. Source: ALiBi, arXiv 2108.12409.

    Heads that are no power of two take the slopes of the next one: every second first, then those between.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (torch.arange(1, power + 1) * (-bias_max / power))
    return slopes if power == num_heads else torch.cat((slopes[1::2], slopes[::2]))[:num_heads]


def sinusoids(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Vectors [num_tokens, size]: sines in the first half, cosines in the second. Source: tensor2tensor."""
    half = size // 2
    frequencies = torch.exp(torch.arange(half, device=positions.device).float() * (-math.log(10000) / (half - 1)))
    angles = positions.float()[:, None] * frequencies
    return torch.nn.functional.pad(torch.cat((angles.sin(), angles.cos()), dim=-1), (0, size % 2))


def rotations_of(rotaries: Sequence[Rotary], batch: ForwardBatch, dtype: torch.dtype) -> dict[RotarySpec, Rotation]:
    """How a step's queries and keys are rotated."""
    return {
        rotary.spec: rotary.rotation(batch.rotary_positions, batch.reaches() if rotary.needs_reaches else None, dtype)
        for rotary in rotaries
    }
