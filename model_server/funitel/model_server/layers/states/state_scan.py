"""What layers with a state have in common: a convolution and a recurrence over the tokens of a batch, and their states.

Rows that compute one token are computed together, with their states gathered and scattered; the tokens of every other
row one row after the other, cut where its state is saved.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.storage import Part
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.state_pool import LayerStates


class Recurrence(Protocol):
    """A recurrence in float32, from what is convolved and other inputs of the tokens."""

    def scan(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Results [num_tokens, num_outputs] of tokens of one sequence, and its state behind them.

        `state` is [num_heads, key_dim, value_dim], the others are [num_tokens, ...].
        """

    def step(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `scan` for one token of each of several sequences, with their states [num_rows, ...]."""


class NoRecurrence:
    """What is convolved is the result. See Recurrence."""

    def scan(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        return x, state

    step = scan


class NoConvolution:
    """What enters is what is scanned, in float32. See Convolution."""

    def __call__(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Convolution; there is no past."""
        return x.float(), past


class Convolution:
    """A causal convolution of each channel over the last tokens, in float32, and SiLU behind it if `is_activated`.

    `weight` is [width, channels], of the latest token last.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_activated: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.is_activated = is_activated

    @classmethod
    def read(
        cls, weights: Weights, parts: Sequence[Part], width: int, *, has_bias: bool, is_activated: bool
    ) -> "Convolution":
        """Read the channels of this rank, one part after the other."""
        kept = torch.float32
        read = [
            weights.read(f"{name}.weight", [size, 1, width], rows=rows, dtype=kept)[:, 0] for name, size, rows in parts
        ]
        bias: torch.Tensor | None = None
        if has_bias:
            bias = torch.cat(
                [weights.read(f"{name}.bias", [size], rows=rows, dtype=kept) for name, size, rows in parts]
            )
        return cls(torch.cat(read).t().contiguous(), bias, is_activated=is_activated)

    def __call__(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolved tokens of [..., num_tokens, channels], and the last inputs [..., width - 1, channels] with them.

        `past` are the last inputs before them.
        """
        whole, count = torch.cat((past, x.float()), dim=-2), x.shape[-2]
        result = whole[..., :count, :] * self.weight[0]
        for i in range(1, len(self.weight)):
            result = torch.addcmul(result, whole[..., i : i + count, :], self.weight[i])
        result = result if self.bias is None else result + self.bias
        return F.silu(result) if self.is_activated else result, whole[..., count:, :]


class StateScan:
    """A convolution, then a recurrence."""

    def __init__(self, convolution: Convolution | NoConvolution, recurrence: Recurrence) -> None:
        self.convolution = convolution
        self.recurrence = recurrence

    def __call__(self, x: torch.Tensor, inputs: torch.Tensor, batch: ForwardBatch, states: LayerStates) -> torch.Tensor:
        """Results [num_tokens, num_outputs] float32 of `x` [num_tokens, channels]; `states` become those behind it."""
        results, num_decode = [], batch.num_decode
        if num_decode:
            results.append(self._step(x[:num_decode], inputs[:num_decode], batch, states))
        for segment in batch.state_segments:
            tokens, slot = slice(segment.begin, segment.end), segment.slot
            convolved, conv = self.convolution(x[tokens], states.conv[slot])
            result, matrices = self.recurrence.scan(convolved, inputs[tokens], states.matrices[slot])
            for to in (slot, *segment.saves):
                states.conv[to] = conv
                states.matrices[to] = matrices
            results.append(result)
        return torch.cat(results)

    def _step(self, x: torch.Tensor, inputs: torch.Tensor, batch: ForwardBatch, states: LayerStates) -> torch.Tensor:
        slots = batch.decode_slots
        convolved, conv = self.convolution(x[:, None], states.conv[slots])
        result, matrices = self.recurrence.step(convolved[:, 0], inputs, states.matrices[slots])
        states.conv[slots] = conv
        states.matrices[slots] = matrices
        if batch.decode_saves is not None:
            places, saved = batch.decode_saves
            states.conv[saved] = conv[places]
            states.matrices[saved] = matrices[places]
        return result
