"""The second block of a decoder layer: one MLP, or a mixture of experts."""

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.layers.elementwise import ElementwiseOps, TorchElementwiseOps
from funitel.model_server.layers.expert_ops import ExpertOps, HeldExperts, TorchExpertOps
from funitel.model_server.layers.linear import (
    ACTIVATIONS,
    ColumnLinear,
    Matmul,
    NormLayer,
    RowLinear,
    XieluActivation,
    mlp_parts,
)
from funitel.model_server.spec.layer_spec import MultiplierSpec
from funitel.model_server.spec.model_spec import Activation, ExpertScore, ExpertsSpec, ModelSpec

MIN_SUM = 1e-20  # what scores are divided by at least

Choice = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From logits of experts to the chosen ones and their shares: see `Router.choose`."""


class Mlp:
    """Gated or plain MLP; hidden units are split between ranks.

    `sum_dtype` is the precision of the last product, and so of the result, where that is not the weights'.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        parallel: TensorParallel,
        index: int,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        def name(template: str) -> str:
            return weights.named(template, i=index)

        names, units = spec.names, spec.intermediate_size
        mine = parallel.split(units)
        self.num_units = mine[1] - mine[0]  # hidden units of this rank
        self.is_gated = spec.is_gated
        self.activation = spec.activation
        self.xielu = XieluActivation(weights, name(names.activation)) if spec.activation is Activation.XIELU else None
        self.is_interleaved = bool(names.gate_up) and names.is_stack_interleaved
        self.limit, self.shift = spec.gate_limit, spec.gate_shift
        factors = spec.multipliers or MultiplierSpec()
        self.gate_scale, self.scale = factors.mlp_gate, factors.mlp_out
        sparsity = spec.layer(index).gate_sparsity
        self.threshold = NormalDist().inv_cdf(sparsity) if sparsity else None  # in standard deviations of gates
        self.num_all_units = units
        self.elementwise: ElementwiseOps = TorchElementwiseOps()
        self.parallel = parallel
        self.up = ColumnLinear(
            weights,
            mlp_parts(spec, mine, name),
            spec.hidden_size,
            has_bias=spec.has_mlp_bias,
            is_transposed=names.is_transposed,
        )
        self.down = RowLinear(
            weights,
            name(names.down),
            spec.hidden_size,
            units,
            mine,
            parallel,
            has_bias=spec.has_mlp_bias,
            is_transposed=names.is_transposed,
            dtype=sum_dtype,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out."""
        return self.parallel.all_reduce(self.partial(x))

    def mlps(self) -> list["Mlp"]:
        """This one: see Experts."""
        return [self]

    def mixtures(self) -> list["Experts"]:
        """None: see Experts."""
        return []

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's hidden units add to the result."""
        if not self.is_gated:
            return self.down.partial((self.xielu or ACTIVATIONS[self.activation])(self.up(x)))
        gated = self.up.gated(x, self.activation) if self.is_plain else None
        if gated is None:
            gated = self.elementwise.gate(self._limited(self.up(x)), self.activation)
        result = self.down.partial(gated)
        return result if self.scale == 1.0 else result * self.scale

    @property
    def is_plain(self) -> bool:
        """Whether gates and values lie side by side and pass as they are."""
        is_unlimited = self.limit is None and not self.shift and self.threshold is None and self.gate_scale == 1.0
        return is_unlimited and not self.is_interleaved

    def _limited(self, x: torch.Tensor) -> torch.Tensor:
        """Gates and values side by side, each within its limits, of [num_tokens, 2 * units]."""
        if self.is_plain:
            return x
        if self.is_interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        gate, up = x.chunk(2, dim=-1)
        if self.gate_scale != 1.0:
            gate = gate * self.gate_scale
        if self.threshold is not None:
            gate = self._sparse(gate, self.threshold)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return torch.cat((gate, up + self.shift), dim=-1)

    def _sparse(self, gate: torch.Tensor, threshold: float) -> torch.Tensor:
        """Gates [num_tokens, units] less what is so many deviations above the mean of all ranks', and 0 below it."""
        mean = self._mean(gate)
        deviation = self._mean((gate - mean).square()).sqrt()
        return F.relu(gate - mean - threshold * deviation)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_reduce(x.sum(dim=-1, keepdim=True)) / self.num_all_units


class Router:
    """Which experts a token passes, and what share it takes of each. Every rank computes the same.

    Scores are float32. Source: group-limited choice, DeepSeek-V2, arXiv 2405.04434; corrected choice, DeepSeek-V3,
    arXiv 2412.19437.
    """

    def __init__(self, spec: ModelSpec, experts: ExpertsSpec, weights: Weights, index: int) -> None:
        name = weights.named(spec.names.router, i=index)
        weight = weights.read_linear(name, experts.num_experts, spec.hidden_size, dtype=torch.float32)
        self.norm_eps: float | None = None
        if spec.names.router_scale:
            self.norm_eps = spec.norm_eps
            scale = weights.named(spec.names.router_scale, i=index)
            weight = weight * (weights.read(scale, [spec.hidden_size], dtype=torch.float32) * spec.hidden_size**-0.5)
        bias: torch.Tensor | None = None
        if experts.has_router_bias:
            bias = weights.read(f"{name}.bias", [experts.num_experts], dtype=torch.float32)
        self.spec = experts
        self.product = Matmul(weight, bias)
        self.choice: Choice | None = None  # what computes `choose` in one kernel
        self.expert_scale: torch.Tensor | None = None  # [num_experts]
        if spec.names.expert_scale:
            whole = weights.named(spec.names.expert_scale, i=index)
            self.expert_scale = weights.read(whole, [experts.num_experts], dtype=torch.float32)
        self.correction: torch.Tensor | None = None  # [num_experts]
        if spec.names.router_correction:
            whole = weights.named(spec.names.router_correction, i=index)
            self.correction = weights.read(whole, [experts.num_experts], dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and shares of tokens [num_tokens, hidden_size], each [num_tokens, num_chosen]."""
        x = x.float()
        if self.norm_eps is not None:
            x = F.rms_norm(x, x.shape[-1:], eps=self.norm_eps)
        logits = self.product(x)
        return self.choose(logits) if self.choice is None else self.choice(logits)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and shares by logits [num_tokens, num_experts] float32, operation by operation."""
        spec = self.spec
        if spec.score is ExpertScore.SPARSEMIXER:
            return self._one_by_one(logits)
        scores = logits.softmax(dim=-1) if spec.score is ExpertScore.SOFTMAX else _sigmoid(logits)
        ranked = scores if self.correction is None else scores + self.correction
        if spec.num_groups > 1:
            ranked = self._in_best_groups(ranked)
        chosen = ranked.topk(spec.num_chosen).indices
        shares = scores.gather(1, chosen)
        if spec.is_normalized:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + MIN_SUM)
        if self.expert_scale is not None:
            shares = shares * self.expert_scale[chosen]
        return chosen, shares * spec.scale

    def _one_by_one(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best expert, then the best of those left, each with its share among those near it.

        Source: SparseMixer-v2, arXiv 2409.12136, and its code in transformers.
        """
        chosen, shares, left = [], [], logits
        for _ in range(self.spec.num_chosen):
            best = left.max(dim=-1, keepdim=True)
            is_far = (best.values - logits) / logits.abs().maximum(best.values) > 2 * self.spec.jitter
            shares.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, best.indices))
            chosen.append(best.indices)
            left = left.scatter(1, best.indices, -torch.inf)
        return torch.cat(chosen, dim=1), torch.cat(shares, dim=1) * self.spec.scale

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores [num_tokens, num_experts] of the experts in each token's best groups, -inf elsewhere."""
        grouped = scores.view(len(scores), self.spec.num_groups, -1)
        ranks = grouped.topk(self.spec.group_depth).values.sum(dim=-1)  # [num_tokens, num_groups]
        best = ranks.topk(self.spec.num_chosen_groups).indices
        is_left_out = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, best, False)
        kept: torch.Tensor = grouped.masked_fill(is_left_out[..., None], -torch.inf)
        return kept.flatten(1)


def held_experts(parallel: TensorParallel, num_experts: int) -> range:
    """Experts that a rank has, or has a part of: all, or its own where whole experts go to ranks."""
    return range(*parallel.split(num_experts)) if parallel.spreads_experts else range(num_experts)


class Experts:
    """A mixture of experts. Hidden units of each expert are split between ranks; only experts that are hit compute.

    With `TensorParallel.spreads_experts` each rank has some experts whole instead, and computes the rows of these.
    """

    def __init__(
        self, spec: ModelSpec, experts: ExpertsSpec, weights: Weights, parallel: TensorParallel, index: int
    ) -> None:
        self.parallel = parallel
        self.shared_scale = experts.shared_scale
        self.router = Router(spec, experts, weights, index)
        held = held_experts(parallel, experts.num_experts)
        each = [expert_spec(spec, experts, weights, index, j) for j in held]
        alone = TensorParallel(device=parallel.device) if parallel.spreads_experts else parallel
        self.experts = [Mlp(expert, weights, alone, index) for expert in each]
        self.held_experts = HeldExperts(self.experts, held, experts.num_experts, experts.is_input_scaled)
        self.ops: ExpertOps = TorchExpertOps()
        self.shared: Mlp | None = None
        self.share: Matmul | None = None
        if experts.shared_size:
            self.shared = Mlp(shared_spec(spec, experts), weights, parallel, index)
            if spec.names.shared_share:
                name = weights.named(spec.names.shared_share, i=index)
                self.share = Matmul(weights.read_linear(name, 1, spec.hidden_size))

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out. A token's result does not depend on the others.

        `routed` is what the router reads, if something else.
        """
        chosen, shares = self.router(x if routed is None else routed)
        return self.parallel.all_reduce(self.ops.add(self.held_experts, x, chosen, shares, self._shared(x)))

    @property
    def is_fixed(self) -> bool:
        """Whether launches depend on shapes alone, so that a CUDA graph may replay them."""
        return self.ops.is_fixed(self.held_experts)

    def mixtures(self) -> list["Experts"]:
        """This one."""
        return [self]

    def mlps(self) -> list[Mlp]:
        """The MLPs of the mixture."""
        return self.experts if self.shared is None else [*self.experts, self.shared]

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        """What this rank's hidden units of the shared MLP add, if there is one."""
        if self.shared is None:
            return None
        result = self.shared.partial(x)
        if self.shared_scale != 1.0:
            result = result * self.shared_scale
        return result if self.share is None else result * _sigmoid(self.share(x))


class MlpAndExperts:
    """The plain MLP and a mixture of experts on the same hidden states, each between norms of its own, added up.

    The router reads the hidden states as they are.
    """

    def __init__(
        self, spec: ModelSpec, experts: ExpertsSpec, weights: Weights, parallel: TensorParallel, index: int
    ) -> None:
        def norm(template: str) -> NormLayer:
            return NormLayer(spec, weights, weights.prefix + template.format(i=index), spec.hidden_size)

        names = spec.names
        self.mlp = Mlp(spec, weights, parallel, index)
        self.experts = Experts(spec, experts, weights, parallel, index)
        self.mlp_norms = norm(names.dense_norm), norm(names.dense_post_norm)
        self.experts_norms = norm(names.experts_norm), norm(names.experts_post_norm)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out."""
        before, after = self.mlp_norms
        result = after(self.mlp(before(x)))
        before, after = self.experts_norms
        return result + after(self.experts(before(x), x))

    def mlps(self) -> list[Mlp]:
        """All of them: see Experts."""
        return [self.mlp, *self.experts.mlps()]

    def mixtures(self) -> list[Experts]:
        """The mixture."""
        return [self.experts]


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Has the same bits wherever in a tensor a value lies; torch's own rounds the last few of them in another way."""
    return (1 + (-x).exp()).reciprocal()


def expert_spec(spec: ModelSpec, experts: ExpertsSpec, weights: Weights, index: int, expert: int) -> ModelSpec:
    """The spec with one expert as its MLP."""

    def name(template: str) -> str:
        return template.replace("{j}", str(expert))

    packed = weights.named(name(spec.names.expert_gate_up), i=index)
    mlp = any_expert_spec(spec, experts, is_packed=bool(spec.names.expert_gate_up) and weights.has_linear(packed))
    names = mlp.names
    named = replace(names, gate=name(names.gate), up=name(names.up), gate_up=name(names.gate_up), down=name(names.down))
    return replace(mlp, names=named)


def any_expert_spec(spec: ModelSpec, experts: ExpertsSpec, *, is_packed: bool = False) -> ModelSpec:
    """The spec with some expert as its MLP, with `{j}` in its names; `is_packed` where both have to be told apart."""
    names = spec.names
    gate_up = names.expert_gate_up if is_packed or not names.expert_gate else ""
    mlp = replace(names, gate=names.expert_gate, up=names.expert_up, gate_up=gate_up, down=names.expert_down)
    if gate_up:  # else experts lie one by one
        mlp = replace(mlp, is_transposed=names.is_stack_transposed)
    return replace(spec, intermediate_size=experts.intermediate_size, has_mlp_bias=experts.has_bias, names=mlp)


def shared_spec(spec: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    """The spec with the MLP that all tokens pass."""
    names = spec.names
    shared = replace(names, gate=names.shared_gate, up=names.shared_up, down=names.shared_down)
    shared = replace(shared, gate_up=names.shared_gate_up, is_stack_interleaved=False)
    return replace(spec, intermediate_size=experts.shared_size, names=shared)
