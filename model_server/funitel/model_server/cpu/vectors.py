"""Load what a program needs beside matrices: norms, rotary positions, a table of positions, slopes."""

from collections.abc import Callable

import torch

from funitel.model_server.checkpoint.storage import Range
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.native import NativeEngine, NormRecord
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.layers.linear import read_head_norm
from funitel.model_server.layers.rotary import Rotary, alibi_slopes, sinusoids
from funitel.model_server.spec.model_spec import ModelSpec, Norm, Position, QkNorm, RotarySpec

NONE = -1  # in place of an index


class Vectors:
    """Puts the norms and positions of a model into an engine; `held_bytes` is what the engine keeps of them.

    Attributes:
        positions: index of the table that is added to embeddings, or `NONE`.
        slopes: index of this rank's slopes of ALiBi, or `NONE`.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, heads: HeadSplit, engine: NativeEngine) -> None:
        self.held_bytes = 0
        self._spec, self._weights, self._heads, self._engine = spec, weights, heads, engine
        rotaries = dict.fromkeys(spec.rotary_of(i) for i in range(spec.num_layers))
        self._turns: dict[RotarySpec | None, int] = {None: NONE}
        for each in rotaries:
            if each is not None:
                rotary = Rotary(each, spec.head_dim, weights.device)
                self._turns[each] = engine.add_turn(
                    rotary.frequencies, each.scaling.amplitude, is_interleaved=each.is_interleaved
                )
        self.positions = self._positions()
        self.slopes = NONE
        if spec.position is Position.ALIBI:
            every = alibi_slopes(spec.num_heads, spec.alibi_bias_max) * spec.alibi_scale
            self.slopes = self._add(every[heads.q_start : heads.q_end])

    def turn(self, layer: int) -> int:
        """Index of the rotary positions of a layer, or `NONE`."""
        return self._turns[self._spec.rotary_of(layer)]

    def norm(self, name: str) -> int:
        """Index of the norm of hidden states that the checkpoint calls so."""
        spec, size = self._spec, [self._spec.hidden_size]
        weight = bias = NONE
        if spec.has_norm_weight:
            weight = self._add(self._weights.read(f"{name}.weight", size) + spec.norm_offset)
        if spec.has_norm_bias:
            bias = self._add(self._weights.read(f"{name}.bias", size))
        is_layer = spec.norm is Norm.LAYER
        return self._engine.add_norm(NormRecord(weight=weight, bias=bias, is_layer=is_layer, eps=spec.norm_eps))

    def head_norms(self, name: Callable[[str], str]) -> tuple[int, int]:
        """Indices of a layer's norms of queries and of keys, or `NONE`; `name` is that of a template in the layer."""
        spec, heads = self._spec, self._heads
        if spec.qk_norm is QkNorm.NONE:
            return NONE, NONE
        queries, keys = (heads.q_start, heads.q_end), (heads.kv_start, heads.kv_end)
        return (
            self._head_norm(name(spec.names.q_norm), spec.num_heads, queries),
            self._head_norm(name(spec.names.k_norm), spec.num_kv_heads, keys),
        )

    def _head_norm(self, name: str, num_heads: int, mine: Range) -> int:
        spec, weights = self._spec, self._weights
        bias = NONE
        weight = self._add(read_head_norm(spec, weights, f"{name}.weight", num_heads, mine) + spec.norm_offset)
        if spec.has_qk_norm_bias:
            bias = self._add(read_head_norm(spec, weights, f"{name}.bias", num_heads, mine))
        record = NormRecord(
            weight=weight,
            bias=bias,
            is_layer=spec.norm is Norm.LAYER,
            head_stride=0 if spec.qk_norm is QkNorm.HEAD else spec.head_dim,
            whole_size=num_heads * spec.head_dim if spec.qk_norm is QkNorm.WHOLE else 0,
            eps=spec.norm_eps,
        )
        return self._engine.add_norm(record)

    def _positions(self) -> int:
        spec, count = self._spec, self._spec.max_position_embeddings
        if spec.position is Position.SINUSOIDAL:
            return self._add(sinusoids(torch.arange(count) + spec.position_offset, spec.hidden_size))
        if spec.position is not Position.LEARNED:
            return NONE
        name = f"{self._weights.prefix}{spec.names.positions}.weight"
        table = self._weights.read(name, [count + spec.position_offset, spec.hidden_size])
        return self._add(table[spec.position_offset :])

    def _add(self, values: torch.Tensor) -> int:
        self.held_bytes += values.numel() * values.element_size()
        return self._engine.add_vector(values)
