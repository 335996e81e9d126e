"""Mamba in place of attention: each channel keeps a vector, and a token decides what of it is left."""

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.state_pool import LayerStates, state_heads
from funitel.model_server.layers.linear import ColumnLinear, RowLinear
from funitel.model_server.layers.states.state_scan import Convolution, StateScan
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import MambaSpec

_CHUNK = 64  # tokens of which the decays are there at once


class Mamba:
    """The channels of this rank; B and C are those of all ranks."""

    def __init__(
        self, spec: ModelSpec, state: MambaSpec, weights: Weights, parallel: TensorParallel, index: int
    ) -> None:
        def name(template: str) -> str:
            return weights.named(template, i=index)

        names, size = spec.names, state.channels
        heads = state_heads(state, parallel.size, parallel.rank)
        mine = heads.q_start, heads.q_end
        self.inputs = ColumnLinear(
            weights,
            [(name(names.state_in), 2 * size, (start + mine[0], start + mine[1])) for start in (0, size)],
            spec.hidden_size,
            has_bias=state.has_bias,
            is_transposed=names.is_transposed,
        )
        channels = [(name(names.state_conv), size, mine)]
        convolution = Convolution.read(
            weights, channels, state.conv_width, has_bias=state.has_conv_bias, is_activated=True
        )
        self.scan = StateScan(convolution, _Selection(spec, state, weights, parallel, mine, index))
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
        mixed, gate = self.inputs(x).chunk(2, dim=-1)
        read = self.scan(mixed, x, batch, states)
        return self.out((read * F.silu(gate.float())).to(x.dtype))


class _Selection:
    """See Recurrence; it makes all it needs of what is convolved. `mine` are the channels of this rank."""

    def __init__(
        self,
        spec: ModelSpec,
        state: MambaSpec,
        weights: Weights,
        parallel: TensorParallel,
        mine: tuple[int, int],
        index: int,
    ) -> None:
        names, kept = spec.names, torch.float32
        self.dtype = weights.dtype
        self.sizes = [state.step_rank, state.state_dim, state.state_dim]
        self.eps: float | None = None
        self.norms: list[torch.Tensor | None] = [None] * len(self.sizes)
        if state.has_norms:
            self.eps = spec.norm_eps if state.norm_eps is None else state.norm_eps
        if state.has_norms and state.has_norm_weights:
            norms = names.state_step_norm, names.state_b_norm, names.state_c_norm
            self.norms = [
                weights.read(f"{weights.named(each, i=index)}.weight", [size], dtype=kept)
                for each, size in zip(norms, self.sizes, strict=True)
            ]
        self.select = RowLinear(
            weights,
            weights.named(names.state_select, i=index),
            sum(self.sizes),
            state.channels,
            mine,
            parallel,
            has_bias=False,
            is_transposed=names.is_transposed,
        )
        self.steps = ColumnLinear(
            weights,
            [(weights.named(names.state_step, i=index), state.channels, mine)],
            state.step_rank,
            has_bias=True,
            is_transposed=names.is_transposed,
        )
        decay = weights.named(names.state_decay, i=index)
        self.rates = -weights.read(decay, [state.channels, state.state_dim], rows=mine, dtype=kept).exp()
        self.skip = weights.read(weights.named(names.state_skip, i=index), [state.channels], rows=mine, dtype=kept)

    def scan(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        steps, b, c = self._parts(x)
        left, results = state[..., 0], []
        for parts in zip(*(torch.split(each, _CHUNK) for each in (x, steps, b, c)), strict=True):
            decays, written = self._changes(*parts[:3])
            states = []
            for decay, added in zip(decays, written, strict=True):
                left = torch.addcmul(added, decay, left)
                states.append(left)
            results.append(self._read(torch.stack(states), parts[3]))
        return torch.addcmul(torch.cat(results), x, self.skip), left[..., None]

    def step(self, x: torch.Tensor, inputs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Recurrence."""
        steps, b, c = self._parts(x)
        decays, written = self._changes(x, steps, b)
        left = torch.addcmul(written, decays, state[..., 0])
        return torch.addcmul(self._read(left, c), x, self.skip), left[..., None]

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Steps [num_tokens, channels], and B and C, each [num_tokens, state_dim]."""
        parts = torch.split(self.select(x.to(self.dtype)).float(), self.sizes, dim=-1)
        if self.eps is not None:
            normed = zip(parts, self.norms, strict=True)
            parts = tuple([F.rms_norm(part, part.shape[-1:], norm, self.eps) for part, norm in normed])
        vector, b, c = parts
        return [F.softplus(self.steps(vector.to(self.dtype)).float()), b, c]

    def _changes(self, x: torch.Tensor, steps: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is left of states and what is added to them, each [num_tokens, channels, state_dim]."""
        return (steps[..., None] * self.rates).exp(), (steps * x)[..., None] * b[:, None]

    def _read(self, states: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """[num_tokens, channels] of states [num_tokens, channels, state_dim]."""
        return (states @ c[..., None])[..., 0]
