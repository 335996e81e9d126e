"""Gated delta net in place of attention: a recurrence that corrects what its state gives for a key."""

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.storage import Part, Range
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.state_pool import LayerStates, state_heads
from funitel.model_server.layers.linear import ColumnLinear, RowLinear
from funitel.model_server.layers.states.linear_attention import attend_by_delta, attend_once_by_delta
from funitel.model_server.layers.states.state_scan import Convolution, StateScan
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import DeltaNetSpec

_LENGTH_EPS = 1e-6  # added to the squared lengths of queries and keys


class DeltaNet:
    """The heads of this rank: value heads lie with their key head."""

    def __init__(
        self, spec: ModelSpec, state: DeltaNetSpec, weights: Weights, parallel: TensorParallel, index: int
    ) -> None:
        def name(template: str) -> str:
            return weights.named(template, i=index)

        names = spec.names
        heads = state_heads(state, parallel.size, parallel.rank)
        mine, kept = (heads.q_start, heads.q_end), torch.float32
        rows = _Rows(state, heads)
        self.sizes = rows.sizes
        self.value_dim = state.value_dim
        self.beta_scale = state.beta_scale
        self.inputs = ColumnLinear(
            weights,
            rows.parts(spec, weights, index),
            spec.hidden_size,
            has_bias=False,
            is_transposed=names.is_transposed,
        )
        convolution = Convolution.read(
            weights, rows.conv_parts(spec, weights, index), state.conv_width, has_bias=False, is_activated=True
        )
        self.scan = StateScan(convolution, _DeltaRule(state, heads))
        self.low_rank: _LowRank | None = None
        self.has_sigmoid_gate = state.has_sigmoid_gate
        if state.rank is None:
            each = [state.num_value_heads]
            self.rates = weights.read(name(names.state_decay), each, rows=mine, dtype=kept).exp()
            self.step_bias = weights.read(name(names.state_step_bias), each, rows=mine, dtype=kept)
        else:
            self.low_rank = _LowRank(spec, state.rank, weights, rows, index)
            whole = weights.read(name(names.state_decay), [1, 1, state.num_value_heads, 1], dtype=kept).flatten()
            self.rates = whole[mine[0] : mine[1]].exp().repeat_interleave(state.key_dim)
            total = state.num_value_heads * state.key_dim
            self.step_bias = weights.read(name(names.state_step_bias), [total], rows=rows.decays, dtype=kept)
        self.norm = weights.read(f"{name(names.state_norm)}.weight", [state.value_dim])
        self.eps = spec.norm_eps if state.norm_eps is None else state.norm_eps
        self.out = RowLinear(
            weights,
            name(names.state_out),
            spec.hidden_size,
            state.num_value_heads * state.value_dim,
            (mine[0] * state.value_dim, mine[1] * state.value_dim),
            parallel,
            has_bias=False,
            is_transposed=names.is_transposed,
        )

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, states: LayerStates) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out."""
        if self.low_rank is None:
            mixed, gate, beta, step = torch.split(self.inputs(x), self.sizes, dim=-1)
        else:
            mixed, beta = torch.split(self.inputs(x), self.sizes, dim=-1)
            gate, step = self.low_rank(x)
        log_decay = -self.rates * F.softplus(step.float() + self.step_bias)
        beta = beta.float().sigmoid() * self.beta_scale
        read = self.scan(mixed, torch.cat((log_decay, beta), dim=-1), batch, states)
        read = read.view(len(x), -1, self.value_dim)
        normed = F.rms_norm(read, read.shape[-1:], self.norm.float(), self.eps)
        gate = gate.float().view_as(normed)
        gated = normed * (gate.sigmoid() if self.has_sigmoid_gate else F.silu(gate))
        return self.out(gated.flatten(1).to(x.dtype))


class _LowRank:
    """Gates of heads and steps of decays of this rank, each from a small vector, which every rank makes."""

    def __init__(self, spec: ModelSpec, rank: int, weights: Weights, rows: "_Rows", index: int) -> None:
        names, state = spec.names, rows.state
        self.downs, self.ups = [], []
        values = state.num_value_heads * state.value_dim, rows.values
        decays = state.num_value_heads * state.key_dim, rows.decays
        for down, up, size in (
            (names.state_gate_down, names.state_gate, values),
            (names.state_step_down, names.state_step, decays),
        ):
            is_transposed = names.is_transposed
            part = weights.named(down, i=index), rank, (0, rank)
            self.downs.append(
                ColumnLinear(weights, [part], spec.hidden_size, has_bias=False, is_transposed=is_transposed)
            )
            part = weights.named(up, i=index), *size
            self.ups.append(ColumnLinear(weights, [part], rank, has_bias=False, is_transposed=is_transposed))

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, num_heads * value_dim] and [num_tokens, num_heads * key_dim] of hidden states."""
        gate, step = (up(down(x)) for down, up in zip(self.downs, self.ups, strict=True))
        return gate, step


class _DeltaRule:
    """See Recurrence; `inputs` are log decays, of heads or of all rows of their matrices, and rates of correction."""

    def __init__(self, state: DeltaNetSpec, heads: HeadSplit) -> None:
        self.groups, self.num_heads = heads.num_kv_heads, heads.num_heads
        self.is_by_row = state.rank is not None
        self.keys = self.groups * state.key_dim
        self.value_dim = state.value_dim
        self.scale = state.key_dim**-0.5

    def scan(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        q, k, v, decay, beta = self._parts(x, inputs)
        read, left = attend_by_delta(q, k, v, decay, beta, self._grouped(state[None])[0])
        return read.flatten(1), left.flatten(0, 1)

    def step(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        q, k, v, decay, beta = self._parts(x, inputs)
        read, left = attend_once_by_delta(q, k, v, decay, beta, self._grouped(state))
        return read.flatten(1), left.flatten(1, 2)

    def _grouped(self, state: torch.Tensor) -> torch.Tensor:
        return state.reshape(len(state), self.groups, -1, *state.shape[2:])

    def _parts(self, x: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values, log decays and rates, by group."""
        q, k, v = torch.split(x, [self.keys, self.keys, x.shape[1] - 2 * self.keys], dim=-1)
        q, k = (_unit(part.reshape(len(part), self.groups, -1)) for part in (q, k))
        v = v.reshape(len(v), self.groups, -1, self.value_dim)
        decay, beta = torch.split(inputs, [inputs.shape[1] - self.num_heads, self.num_heads], dim=-1)
        decay, beta = (part.reshape(len(part), self.groups, -1) for part in (decay, beta))
        if self.is_by_row:
            decay = decay.reshape(*beta.shape, -1)
        return q * self.scale, k, v, decay, beta


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _LENGTH_EPS)


class _Rows:
    """Rows of a rank in checkpoint tensors: queries and keys of its key heads, values and more of its value heads."""

    def __init__(self, state: DeltaNetSpec, heads: HeadSplit) -> None:
        self.state = state
        self.heads = heads
        self.num_channels = state.num_channels(heads.num_heads, heads.num_kv_heads)
        self.keys = heads.kv_start * state.key_dim, heads.kv_end * state.key_dim
        self.values = heads.q_start * state.value_dim, heads.q_end * state.value_dim
        self.decays = heads.q_start * state.key_dim, heads.q_end * state.key_dim
        self.each = heads.q_start, heads.q_end
        self.num_keys = state.num_key_heads * state.key_dim
        self.num_values = state.num_value_heads * state.value_dim

    @property
    def sizes(self) -> list[int]:
        """What hidden states become at once: what is convolved, gates, rates and steps, or the first and third."""
        heads = self.heads.num_heads
        if self.state.rank is not None:
            return [self.num_channels, heads]
        return [self.num_channels, heads * self.state.value_dim, heads, heads]

    def stacked(self) -> list[Range]:
        """Of all queries, then all keys, then all values."""
        starts = ((0, self.keys), (self.num_keys, self.keys), (2 * self.num_keys, self.values))
        return [(start + first, start + last) for start, (first, last) in starts]

    def conv_parts(self, spec: ModelSpec, weights: Weights, index: int) -> list[Part]:
        """Channels of the convolution, in one tensor or in three."""
        names, total = spec.names, 2 * self.num_keys + self.num_values
        whole = weights.named(names.state_conv, i=index)
        if weights.has_linear(whole) or not names.state_conv_q:
            return [(whole, total, rows) for rows in self.stacked()]
        sizes = ((self.num_keys, self.keys), (self.num_keys, self.keys), (self.num_values, self.values))
        templates = names.state_conv_q, names.state_conv_k, names.state_conv_v
        return [(weights.named(each, i=index), *size) for each, size in zip(templates, sizes, strict=True)]

    def parts(self, spec: ModelSpec, weights: Weights, index: int) -> list[Part]:
        """Queries, keys, values, their gates, rates of correction and steps."""

        def name(template: str) -> str:
            return weights.named(template, i=index)

        names = spec.names
        if names.state_qkvz:
            dims = (self.state.key_dim, self.state.key_dim, self.state.value_dim, self.state.value_dim)
            parts = self._grouped(name(names.state_qkvz), dims, (False, False, True, True))
        elif names.state_in:
            total = 2 * self.num_keys + self.num_values
            parts = [(name(names.state_in), total, rows) for rows in self.stacked()]
        else:
            parts = [(name(each), self.num_keys, self.keys) for each in (names.state_q, names.state_k)]
            parts.append((name(names.state_v), self.num_values, self.values))
        every = self.state.num_value_heads
        if self.state.rank is not None:
            return [*parts, (name(names.state_beta), every, self.each)]
        if names.state_gate:
            parts.append((name(names.state_gate), self.num_values, self.values))
        if names.state_ba:
            return parts + self._grouped(name(names.state_ba), (1, 1), (True, True))
        return parts + [(name(each), every, self.each) for each in (names.state_beta, names.state_step)]

    def _grouped(self, name: str, dims: tuple[int, ...], is_value: tuple[bool, ...]) -> list[Part]:
        """Rows of a tensor in which those of a key head lie together: `dims` of it, or of each of its value heads."""
        group = self.state.num_value_heads // self.state.num_key_heads
        heights = [dim * (group if of_values else 1) for dim, of_values in zip(dims, is_value, strict=True)]
        height, found, start = sum(heights), list[Part](), 0
        for dim, of_values, rows in zip(dims, is_value, heights, strict=True):
            for key_head in range(self.heads.kv_start, self.heads.kv_end):
                begin = key_head * height + start
                first, last = 0, dim
                if of_values:
                    first = max(self.heads.q_start - key_head * group, 0) * dim
                    last = min(self.heads.q_end - key_head * group, group) * dim
                found.append((name, self.state.num_key_heads * height, (begin + first, begin + last)))
            start += rows
        return found
