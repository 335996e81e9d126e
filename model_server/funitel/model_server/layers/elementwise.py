"""What lies between the matrix products of a layer: norms and the residual, positions and the cache, gates of MLPs.

Here in torch, operation by operation; `elementwise_kernels` has the same in few kernels.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from funitel.model_server.kv_cache.pool import KVCache, Slots
from funitel.model_server.layers.linear import ACTIVATIONS, HeadNorm, NormLayer
from funitel.model_server.layers.rotary import Rotation
from funitel.model_server.spec.model_spec import Activation


@dataclass(frozen=True, slots=True, eq=False)
class HeadRule:
    """What becomes of the query, key and value heads of one layer on this rank before they attend."""

    num_heads: int
    num_kv_heads: int  # 0 where the keys and values are another layer's
    clip: float | None  # all are kept within +- this
    norms: tuple[HeadNorm, HeadNorm] | None  # of queries and of keys
    key_scale: float = 1.0  # keys are divided by it on their way to the pool
    value_scale: float = 1.0
    is_norm_last: bool = False  # heads are normalised once they are rotated
    has_key_values: bool = False  # values are what keys are before norm and rotation
    value_eps: float | None = None  # of the norm of values, which has no weights; None: they have none

    @property
    def is_scaled(self) -> bool:
        """Whether either scale does anything."""
        return (self.key_scale, self.value_scale) != (1.0, 1.0)


class ElementwiseOps(Protocol):
    """How these are computed; chosen once, when the model is loaded."""

    name: str

    def norm(self, norm: NormLayer, x: torch.Tensor) -> torch.Tensor:
        """Normalise hidden states [num_tokens, size]."""

    def join(
        self, x: torch.Tensor, result: torch.Tensor, after: NormLayer | None, scale: float, before: NormLayer | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's result to the residual, and normalise the sum for the block that follows.

        Args:
            x: the residual, [num_tokens, hidden_size].
            result: what the block gives, of the same shape.
            after: the norm of the result.
            scale: multiplies the result after that.
            before: the norm of the sum.

        Returns:
            The sum, and what the block that follows reads.
        """

    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """From gates and values side by side, [num_tokens, 2 * units], to activated gates times values."""

    def place(
        self, qkv: torch.Tensor, rule: HeadRule, rotation: Rotation | None, cache: KVCache, layer: int, slots: Slots
    ) -> torch.Tensor:
        """Normalise and rotate heads and write keys and values to their slots.

        Args:
            qkv: [num_tokens, query + key + value heads, head_dim], without heads that the rule says are not there.
            rule: how many of each there are, and what becomes of them.
            rotation: the rotation of the tokens, if the layer has one.
            cache: the pool, into which those of `layer` are written.
            layer: the layer's index.
            slots: where the tokens go.

        Returns:
            The queries, [num_tokens, num_heads, head_dim], contiguous.
        """


class TorchElementwiseOps:
    """The reference."""

    name = "torch"

    def norm(self, norm: NormLayer, x: torch.Tensor) -> torch.Tensor:
        """See ElementwiseOps."""
        return norm(x)

    def join(
        self, x: torch.Tensor, result: torch.Tensor, after: NormLayer | None, scale: float, before: NormLayer | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ElementwiseOps."""
        if after is not None:
            result = after(result)
        if scale != 1.0:
            result = result * scale
        x = x + result
        return x, x if before is None else before(x)

    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See ElementwiseOps."""
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def place(
        self, qkv: torch.Tensor, rule: HeadRule, rotation: Rotation | None, cache: KVCache, layer: int, slots: Slots
    ) -> torch.Tensor:
        """See ElementwiseOps."""
        num_qk = rule.num_heads + rule.num_kv_heads
        if rule.clip is not None:
            qkv = qkv.clamp(-rule.clip, rule.clip)
        qk, v = qkv[:, :num_qk], qkv[:, rule.num_heads if rule.has_key_values else num_qk :]
        if rule.value_eps is not None:
            v = F.rms_norm(v, v.shape[-1:], eps=rule.value_eps)
        if not rule.is_norm_last:
            qk = _normalized(qk, rule)
        if rotation is not None:
            qk = rotation(qk)
        if rule.is_norm_last:
            qk = _normalized(qk, rule)
        if not rule.num_kv_heads:
            return qk.contiguous()
        k = qk[:, rule.num_heads :]
        if rule.is_scaled:
            k, v = k / rule.key_scale, v / rule.value_scale
        cache.write(layer, slots, k, v)
        return qk[:, : rule.num_heads].contiguous()


def _normalized(qk: torch.Tensor, rule: HeadRule) -> torch.Tensor:
    """Query and key heads [num_tokens, query + key heads, head_dim], each with its norm where the rule has norms."""
    if rule.norms is None:
        return qk
    q_norm, k_norm = rule.norms
    if not rule.num_kv_heads:
        return q_norm(qk)
    return torch.cat((q_norm(qk[:, : rule.num_heads]), k_norm(qk[:, rule.num_heads :])), dim=1)
