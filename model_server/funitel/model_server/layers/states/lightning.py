"""Lightning attention in place of attention: linear attention with a fixed decay of each head."""

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.state_pool import LayerStates, state_heads
from funitel.model_server.layers.linear import ACTIVATIONS, ColumnLinear, RowLinear
from funitel.model_server.layers.states.linear_attention import attend, attend_once
from funitel.model_server.layers.states.state_scan import NoConvolution, StateScan
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import LightningSpec

_MARGIN = 1e-5  # keeps decays of the last layer below 1
_LOWEST = 8  # the last head's decay is 2 ** -8


class Lightning:
    """The heads of this rank."""

    def __init__(
        self, spec: ModelSpec, state: LightningSpec, weights: Weights, parallel: TensorParallel, index: int
    ) -> None:
        def name(template: str) -> str:
            return weights.named(template, i=index)

        names, dim = spec.names, state.head_dim
        heads = state_heads(state, parallel.size, parallel.rank)
        mine = heads.q_start * dim, heads.q_end * dim
        self.size = state.num_heads * dim  # elements of all heads, of all ranks
        self.parallel = parallel
        self.activation = ACTIVATIONS[spec.activation]
        transposed = names.is_transposed
        # A head's query, key and value lie together.
        packed = [(name(names.state_in), 3 * self.size, (3 * mine[0], 3 * mine[1]))]
        self.inputs = ColumnLinear(weights, packed, spec.hidden_size, has_bias=False, is_transposed=transposed)
        self.gate = ColumnLinear(
            weights,
            [(name(names.state_gate), self.size, mine)],
            spec.hidden_size,
            has_bias=False,
            is_transposed=transposed,
        )
        self.scan = StateScan(NoConvolution(), _Decay(spec, heads, weights.device, index))
        self.norm = weights.read(f"{name(names.state_norm)}.weight", [self.size], rows=mine).float()
        self.eps = state.norm_eps
        self.out = RowLinear(
            weights,
            name(names.state_out),
            spec.hidden_size,
            self.size,
            mine,
            parallel,
            has_bias=False,
            is_transposed=transposed,
        )

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, states: LayerStates) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out."""
        read = self.scan(self.activation(self.inputs(x)), x, batch, states)
        squares = self.parallel.all_reduce(read.square().sum(dim=-1, keepdim=True))
        normed = read * torch.rsqrt(squares / self.size + self.eps) * self.norm
        return self.out((self.gate(x).float().sigmoid() * normed).to(x.dtype))


class _Decay:
    """See Recurrence; what it scans has a head's query, key and value one after the other."""

    def __init__(self, spec: ModelSpec, heads: HeadSplit, device: torch.device, index: int) -> None:
        places = torch.arange(heads.q_start + 1, heads.q_end + 1, device=device)
        slopes = 2.0 ** (-_LOWEST / spec.num_heads * places)
        depth = 1 - index / (spec.num_layers - 1 + _MARGIN) + _MARGIN
        self.log_decay = -slopes[:, None] * depth  # [num_heads, 1]
        self.num_heads = heads.num_heads

    def scan(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        q, k, v, log_decay = self._parts(x)
        read, left = attend(q, k, v, log_decay, state[:, None])
        return read.flatten(1), left[:, 0]

    def step(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        q, k, v, log_decay = self._parts(x)
        read, left = attend_once(q, k, v, log_decay, state[:, :, None])
        return read.flatten(1), left[:, :, 0]

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys, values and log decays, each head a group of its own."""
        q, k, v = x.view(len(x), self.num_heads, -1).chunk(3, dim=-1)
        return [q, k, v[:, :, None], self.log_decay.expand(len(x), -1, -1)]
