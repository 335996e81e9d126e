"""Run calibration texts through a model one decoder layer at a time, and collect the Hessians of its linear layers.

One layer is in memory at a time; between layers there are only hidden states.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.attention import Attention
from funitel.model_server.layers.linear import ColumnLinear, Matmul, RowLinear
from funitel.model_server.layers.mlp import Mlp
from funitel.model_server.models.decoder import DecoderLayer, TokenEmbedding
from funitel.model_server.spec.model_spec import ModelSpec, QkvLayout
from funitel.model_server.tools.quantize.gptq import Hessian
from funitel.proto.errors import UnsupportedModel

_BLOCK_SIZE = 64  # tokens; the walk's own cache, forgotten after every sequence


@dataclass(frozen=True, slots=True)
class Inputs:
    """Linear layers that share an input: their names in the checkpoint and number of outputs, in the matmul's order."""

    parts: tuple[tuple[str, int], ...]
    num_inputs: int
    linear: Callable[[DecoderLayer], ColumnLinear | RowLinear]

    @property
    def num_outputs(self) -> int:
        """Outputs of all of them."""
        return sum(count for _, count in self.parts)


def inputs_of(spec: ModelSpec, prefix: str, index: int) -> list[Inputs]:
    """The linear layers of one decoder layer, in the order they compute.

    Raises:
        UnsupportedModel: there are blocks this does not know, or rows packed in another order than the matmul's.
    """
    kinds = {"a mixture of experts": spec.experts, "latent attention": spec.latent, "layers with a state": spec.state}
    what = next((kind for kind, found in kinds.items() if found is not None), None)
    if what is not None:
        raise UnsupportedModel(f"{spec.architecture} has {what}: it cannot be quantised")
    if spec.layers or spec.layer_embeddings is not None or spec.altup is not None:
        raise UnsupportedModel(
            f"{spec.architecture} has layers that differ or embeddings of them: it cannot be quantised"
        )
    if spec.names.qkv and spec.qkv_layout is QkvLayout.GROUPED:
        raise UnsupportedModel(f"{spec.architecture} packs queries, keys and values by head: it cannot be quantised")

    def name(template: str) -> str:
        return prefix + template.format(i=index)

    names, dim = spec.names, spec.head_dim
    num_q, num_kv = spec.num_heads * dim, spec.num_kv_heads * dim
    qkv: tuple[tuple[str, int], ...] = ((name(names.q), num_q), (name(names.k), num_kv), (name(names.v), num_kv))
    if names.qkv:
        qkv = ((name(names.qkv), num_q + 2 * num_kv),)
    units = spec.intermediate_size
    up = tuple((name(n), units) for n in ((names.gate, names.up) if spec.is_gated else (names.up,)))
    if spec.is_gated and names.gate_up:
        up = ((name(names.gate_up), 2 * units),)
    out, down = ((name(names.out), spec.hidden_size),), ((name(names.down), spec.hidden_size),)
    return [
        Inputs(qkv, spec.hidden_size, lambda layer: _attention(layer).qkv),
        Inputs(out, num_q, lambda layer: _attention(layer).out),
        Inputs(up, spec.hidden_size, lambda layer: _mlp(layer).up),
        Inputs(down, spec.intermediate_size, lambda layer: _mlp(layer).down),
    ]


def _attention(layer: DecoderLayer) -> Attention:
    assert isinstance(layer.attention, Attention)
    return layer.attention


def _mlp(layer: DecoderLayer) -> Mlp:
    assert isinstance(layer.mlp, Mlp)
    return layer.mlp


class _Seen(Exception):
    """The inputs are taken note of."""


class _Observed(Matmul):
    """Stands in for a layer's product, takes note of its inputs and goes no further."""

    def __init__(self, hessian: Hessian) -> None:
        self.hessian = hessian
        self.single_row = None  # every input passes `__call__`

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.hessian.add(x)
        raise _Seen


class Walk:
    """Hidden states of every sample, at the layer that comes next."""

    def __init__(self, spec: ModelSpec, weights: Weights, samples: Sequence[Sequence[int]]) -> None:
        self.spec = spec
        self.weights = weights
        self.samples = samples
        self.device = weights.device
        self._alone = TensorParallel(device=weights.device)
        self._attention = TorchAttention(_BLOCK_SIZE, weights.device)
        longest = max(map(len, samples))
        table = np.arange(1, 2 + -(-longest // _BLOCK_SIZE), dtype=np.int32)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        one_layer = dataclasses.replace(spec, num_layers=1)
        self._cache = KVCache(one_layer, heads, len(table) + 1, _BLOCK_SIZE, weights.dtype, weights.device)
        self._batches = [ForwardBatch.build([RowSpan(s, 0, table)], _BLOCK_SIZE, weights.device) for s in samples]
        self._entrance = TokenEmbedding(spec, weights, self._alone)
        self._hidden = [self._entrance(batch) for batch in self._batches]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(map(len, self.samples))

    def load(self, index: int) -> DecoderLayer:
        """Read one layer of the checkpoint."""
        layer = DecoderLayer(self.spec, self.weights, self._alone, self._attention, index)
        assert isinstance(layer.attention, Attention)
        layer.attention.index = 0  # its place in the walk's own cache
        return layer

    def hessian(self, layer: DecoderLayer, inputs: Inputs) -> torch.Tensor:
        """What goes into some linear layers of the layer that comes next, as it now is."""
        linear = inputs.linear(layer)
        product = linear.matmul
        observed = _Observed(Hessian(inputs.num_inputs, self.device))
        linear.matmul = observed
        for hidden, batch in zip(self._hidden, self._batches, strict=True):
            with suppress(_Seen):
                self._run(layer, hidden, batch)
        linear.matmul = product
        return observed.hessian.mean

    def advance(self, layer: DecoderLayer) -> None:
        """Go through a layer, as it now is."""
        states = zip(self._hidden, self._batches, strict=True)
        self._hidden = [self._run(layer, hidden, batch) for hidden, batch in states]

    def _run(self, layer: DecoderLayer, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rotations = self._entrance.rotations(batch, hidden.dtype)
        return layer(hidden, None, None, batch, self._cache, self._attention.plan(batch), rotations)[0]
