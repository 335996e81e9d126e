"""Carry calibration texts through a model one decoder layer at a time, and see what goes into its linear layers.

One layer is in memory at a time; between layers there are only hidden states.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.attention import TorchAttention
from funitel.model_server.batch import ForwardBatch, RowSpan
from funitel.model_server.decoder import Layer
from funitel.model_server.kv_cache import KVCache
from funitel.model_server.layers import ColumnLinear, Matmul, Rotary, RowLinear, VocabEmbedding
from funitel.model_server.parallel import HeadSplit, TensorParallel
from funitel.model_server.quantizer.gptq import Hessian
from funitel.model_server.spec import ModelSpec, Position
from funitel.model_server.weights import Weights

_BLOCK_SIZE = 64  # tokens; the walk's own cache, forgotten after every sequence


@dataclass(frozen=True, slots=True)
class Inputs:
    """Linear layers that share an input: their names in the checkpoint and number of outputs, in the matmul's order."""

    parts: tuple[tuple[str, int], ...]
    num_inputs: int
    linear: Callable[[Layer], ColumnLinear | RowLinear]

    @property
    def num_outputs(self) -> int:
        """Outputs of all of them."""
        return sum(count for _, count in self.parts)


def inputs_of(spec: ModelSpec, prefix: str, index: int) -> list[Inputs]:
    """The linear layers of one decoder layer, in the order they compute."""

    def name(template: str) -> str:
        return prefix + template.format(i=index)

    names, dim = spec.names, spec.head_dim
    num_q, num_kv = spec.num_heads * dim, spec.num_kv_heads * dim
    qkv: tuple[tuple[str, int], ...] = ((name(names.q), num_q), (name(names.k), num_kv), (name(names.v), num_kv))
    if names.qkv:
        qkv = ((name(names.qkv), num_q + 2 * num_kv),)
    up = tuple((name(n), spec.intermediate_size) for n in ((names.gate, names.up) if spec.is_gated else (names.up,)))
    out, down = ((name(names.out), spec.hidden_size),), ((name(names.down), spec.hidden_size),)
    return [
        Inputs(qkv, spec.hidden_size, lambda layer: layer.attention.qkv),
        Inputs(out, num_q, lambda layer: layer.attention.out),
        Inputs(up, spec.hidden_size, lambda layer: layer.mlp.up),
        Inputs(down, spec.intermediate_size, lambda layer: layer.mlp.down),
    ]


class _Observed(Matmul):
    """Stands in for a layer's product and takes note of its inputs."""

    def __init__(self, product: Matmul, hessian: Hessian) -> None:
        self.product = product
        self.hessian = hessian

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.hessian.add(x)
        return self.product(x)


class Walk:
    """Hidden states of every sample, at the layer that comes next."""

    def __init__(self, spec: ModelSpec, weights: Weights, samples: Sequence[Sequence[int]]) -> None:
        self.spec = spec
        self.weights = weights
        self.samples = samples
        self.device = weights.device
        self._alone = TensorParallel(device=weights.device)
        self._attention = TorchAttention(_BLOCK_SIZE, spec.head_dim, weights.device)
        self._rotary: Rotary | None = None
        longest = max(map(len, samples))
        table = np.arange(1, 2 + -(-longest // _BLOCK_SIZE), dtype=np.int32)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        one_layer = dataclasses.replace(spec, num_layers=1)
        self._cache = KVCache(one_layer, heads, len(table) + 1, _BLOCK_SIZE, weights.dtype, weights.device)
        self._batches = [ForwardBatch.build([RowSpan(s, 0, table)], _BLOCK_SIZE, weights.device) for s in samples]
        self._hidden = list(self._embed())

    def _embed(self) -> Iterator[torch.Tensor]:
        spec, names, prefix = self.spec, self.spec.names, self.weights.prefix
        embedding = VocabEmbedding(spec, self.weights, prefix + names.embedding, self._alone)
        positions: torch.Tensor | None = None
        if spec.position is Position.LEARNED:
            shape = [spec.max_position_embeddings, spec.hidden_size]
            positions = self.weights.read(f"{prefix}{names.positions}.weight", shape)
        else:
            self._rotary = Rotary(spec.head_dim, spec.rotary_base, spec.rotary_scaling, self.device)
        for batch in self._batches:
            hidden = embedding(batch.input_ids)
            yield hidden if positions is None else hidden + positions[batch.positions]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(map(len, self.samples))

    def load(self, index: int) -> Layer:
        """Read one layer of the checkpoint."""
        layer = Layer(self.spec, self.weights, self._alone, self._attention, index)
        layer.attention.index = 0  # its place in the walk's own cache
        return layer

    def hessian(self, layer: Layer, inputs: Inputs) -> torch.Tensor:
        """What goes into some linear layers of the layer that comes next, as it now is."""
        linear = inputs.linear(layer)
        product = linear.matmul
        observed = _Observed(product, Hessian(inputs.num_inputs, self.device))
        linear.matmul = observed
        for hidden, batch in zip(self._hidden, self._batches, strict=True):
            self._run(layer, hidden, batch)
        linear.matmul = product
        return observed.hessian.mean

    def advance(self, layer: Layer) -> None:
        """Go through a layer, as it now is."""
        states = zip(self._hidden, self._batches, strict=True)
        self._hidden = [self._run(layer, hidden, batch) for hidden, batch in states]

    def _run(self, layer: Layer, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        angles = self._rotary.angles(batch.positions, hidden.dtype) if self._rotary is not None else None
        return layer(hidden, batch, self._cache, self._attention.plan(batch), angles)
