"""Mamba 2 in place of attention: a recurrence in which a token decides what it writes and how much is left."""

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.state_pool import LayerStates, state_heads
from funitel.model_server.layers.linear import ColumnLinear, RowLinear
from funitel.model_server.layers.states.linear_attention import attend, attend_once
from funitel.model_server.layers.states.state_scan import Convolution, StateScan
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import Mamba2Spec


class Mamba2:
    """The heads of this rank; with more ranks than groups, ranks have the B and C of their group in common."""

    def __init__(
        self, spec: ModelSpec, state: Mamba2Spec, weights: Weights, parallel: TensorParallel, index: int
    ) -> None:
        def name(template: str) -> str:
            return weights.named(template, i=index)

        names, kept = spec.names, torch.float32
        heads = state_heads(state, parallel.size, parallel.rank)
        mine = heads.q_start, heads.q_end
        values = mine[0] * state.head_dim, mine[1] * state.head_dim
        keys = heads.kv_start * state.state_dim, heads.kv_end * state.state_dim
        num_values, num_keys = state.num_heads * state.head_dim, state.num_groups * state.state_dim
        starts = ((0, values), (num_values, keys), (num_values + num_keys, keys))
        convolved = [(start + first, start + last) for start, (first, last) in starts]
        num_channels = num_values + 2 * num_keys
        total = num_values + num_channels + state.num_heads
        steps = total - state.num_heads
        rows = [
            values,
            *((num_values + first, num_values + last) for first, last in convolved),
            (steps + mine[0], steps + mine[1]),
        ]
        self.sizes = [
            heads.num_heads * state.head_dim,
            state.num_channels(heads.num_heads, heads.num_kv_heads),
            heads.num_heads,
        ]
        self.inputs = ColumnLinear(
            weights,
            [(name(names.state_in), total, each) for each in rows],
            spec.hidden_size,
            has_bias=state.has_bias,
            is_transposed=names.is_transposed,
        )
        channels = [(name(names.state_conv), num_channels, each) for each in convolved]
        convolution = Convolution.read(
            weights, channels, state.conv_width, has_bias=state.has_conv_bias, is_activated=True
        )
        each = [state.num_heads]
        skip = weights.read(name(names.state_skip), each, rows=mine, dtype=kept)
        self.scan = StateScan(convolution, _Selection(state, heads, skip))
        self.rates = weights.read(name(names.state_decay), each, rows=mine, dtype=kept).exp()
        self.step_bias = weights.read(name(names.state_step_bias), each, rows=mine, dtype=kept)
        self.bounds = state.min_step, state.max_step
        self.norm: _GroupNorm | None = None
        if state.has_norm:
            self.norm = _GroupNorm(spec, state, weights, name(names.state_norm), heads, parallel)
        self.is_norm_first = state.is_norm_first
        self.multipliers: torch.Tensor | None = None  # of all that hidden states become
        if spec.multipliers is not None and spec.multipliers.state_parts:
            factors = zip(spec.multipliers.state_parts, rows, strict=True)
            every = [torch.full((last - first,), factor) for factor, (first, last) in factors]
            self.multipliers = torch.cat(every).to(weights.device)
        self.out = RowLinear(
            weights,
            name(names.state_out),
            spec.hidden_size,
            num_values,
            values,
            parallel,
            has_bias=state.has_bias if state.has_out_bias is None else state.has_out_bias,
            is_transposed=names.is_transposed,
        )

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, states: LayerStates) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out."""
        parts = self.inputs(x)
        parts = parts if self.multipliers is None else parts * self.multipliers
        gate, mixed, step = torch.split(parts, self.sizes, dim=-1)
        steps = F.softplus(step.float() + self.step_bias).clamp(*self.bounds)
        read = self.scan(mixed, torch.cat((steps, -self.rates * steps), dim=-1), batch, states)
        return self.out(self._gated(read, F.silu(gate.float())).to(x.dtype))

    def _gated(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """What heads read, behind their gates and normalised."""
        if self.norm is None:
            return read * gate
        return self.norm(read) * gate if self.is_norm_first else self.norm(read * gate)


class _Selection:
    """See Recurrence; `inputs` are steps and log decays, [..., 2 * num_heads]. `skip` [num_heads]: see Mamba2Spec."""

    def __init__(self, state: Mamba2Spec, heads: HeadSplit, skip: torch.Tensor) -> None:
        self.groups = heads.num_kv_heads
        self.keys = self.groups * state.state_dim
        self.head_dim = state.head_dim
        self.skip = skip

    def scan(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        values, b, c, steps, decay = self._parts(x, inputs)
        read, left = attend(c, b, values * steps[..., None], decay, self._grouped(state[None])[0])
        return self._with_skip(read, values), left.flatten(0, 1)

    def step(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        values, b, c, steps, decay = self._parts(x, inputs)
        read, left = attend_once(c, b, values * steps[..., None], decay, self._grouped(state))
        return self._with_skip(read, values), left.flatten(1, 2)

    def _grouped(self, state: torch.Tensor) -> torch.Tensor:
        return state.reshape(len(state), self.groups, -1, *state.shape[2:])

    def _parts(self, x: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values, keys B, queries C, steps and log decays, by group."""
        values, b, c = torch.split(x, [x.shape[1] - 2 * self.keys, self.keys, self.keys], dim=-1)
        b, c = (part.reshape(len(part), self.groups, -1) for part in (b, c))
        values = values.reshape(len(values), self.groups, -1, self.head_dim)
        steps, decay = (part.reshape(len(part), self.groups, -1) for part in inputs.chunk(2, dim=-1))
        return values, b, c, steps, decay

    def _with_skip(self, read: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (read + values * self.skip.view(self.groups, -1, 1)).flatten(1)


class _GroupNorm:
    """RMS norm over all heads of a group, also where ranks share a group. Reads and gives float32."""

    def __init__(
        self,
        spec: ModelSpec,
        state: Mamba2Spec,
        weights: Weights,
        name: str,
        heads: HeadSplit,
        parallel: TensorParallel,
    ) -> None:
        dim, total = state.head_dim, state.num_heads * state.head_dim
        rows = heads.q_start * dim, heads.q_end * dim
        self.weight = weights.read(f"{name}.weight", [total], rows=rows)
        self.eps = spec.norm_eps if state.norm_eps is None else state.norm_eps
        self.groups = heads.kv_start, heads.kv_end
        self.num_groups = state.num_groups
        self.num_elements = total // state.num_groups
        self.parallel = parallel
        self.is_shared = parallel.size > state.num_groups

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.groups
        grouped = x.view(len(x), last - first, -1)
        squares = grouped.square().sum(dim=-1)  # [num_tokens, groups of this rank]
        if self.is_shared:
            every = squares.new_zeros(len(x), self.num_groups)
            every[:, first:last] = squares
            squares = self.parallel.all_reduce(every)[:, first:last]
        scale = torch.rsqrt(squares / self.num_elements + self.eps)
        return (grouped * scale[..., None]).flatten(1) * self.weight.float()
