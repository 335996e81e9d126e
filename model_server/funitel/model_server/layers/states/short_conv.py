"""A short convolution in place of attention: tokens are gated, convolved over the last few, and gated again."""

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.state_pool import LayerStates, state_heads
from funitel.model_server.layers.linear import ColumnLinear, RowLinear
from funitel.model_server.layers.states.state_scan import Convolution, NoRecurrence, StateScan
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import ShortConvSpec


class ShortConv:
    """The channels of this rank."""

    def __init__(
        self, spec: ModelSpec, state: ShortConvSpec, weights: Weights, parallel: TensorParallel, index: int
    ) -> None:
        def name(template: str) -> str:
            return weights.named(template, i=index)

        names, size = spec.names, state.channels
        heads = state_heads(state, parallel.size, parallel.rank)
        mine = heads.q_start, heads.q_end
        parts = [(name(names.state_in), 3 * size, (at + mine[0], at + mine[1])) for at in (0, size, 2 * size)]
        self.inputs = ColumnLinear(
            weights, parts, spec.hidden_size, has_bias=state.has_bias, is_transposed=names.is_transposed
        )
        channels = [(name(names.state_conv), size, mine)]
        convolution = Convolution.read(weights, channels, state.conv_width, has_bias=state.has_bias, is_activated=False)
        self.scan = StateScan(convolution, NoRecurrence())
        self.out = RowLinear(
            weights,
            name(names.state_out),
            spec.hidden_size,
            size,
            mine,
            parallel,
            has_bias=state.has_bias,
            is_transposed=names.is_transposed,
        )

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, states: LayerStates) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out."""
        before, behind, values = self.inputs(x).chunk(3, dim=-1)
        convolved = self.scan(before * values, x, batch, states)
        return self.out(behind * convolved.to(x.dtype))
