"""Random cases for mixtures of experts: numbers of experts, sizes, tokens and held experts, each drawn from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from funitel.model_server.layers.expert_ops import Expert, ExpertOps, ExpertStack, HeldExperts
from funitel.model_server.layers.linear import ACTIVATIONS
from funitel.model_server.spec.model_spec import Activation

# Relative errors that kernels are held to; float32 sums whatever the inputs.
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3}


@dataclass(frozen=True)
class PlainExpert:
    """A gated MLP in torch; weights are [2 * units, hidden_size] and [hidden_size, units]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Activation

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """See Expert."""
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(ACTIVATIONS[self.activation](gate) * up, self.down)


@dataclass(frozen=True)
class ExpertCase:
    """Tokens on their way through chosen experts."""

    experts: HeldExperts
    x: torch.Tensor
    chosen: torch.Tensor
    shares: torch.Tensor
    shared: torch.Tensor | None

    def through(self, ops: ExpertOps) -> torch.Tensor:
        """What the operations make of them."""
        shared = None if self.shared is None else self.shared.clone()
        return ops.add(self.experts, self.x, self.chosen, self.shares, shared)

    def exact(self) -> "ExpertCase":
        """The same numbers as float32."""
        stack = self.experts.stack
        assert stack is not None
        wide = ExpertStack(stack.gate_up.float(), stack.down.float(), stack.activation)
        experts = replace(self.experts, mlps=experts_of(wide), stack=wide)
        shared = None if self.shared is None else self.shared.float()
        return ExpertCase(experts, self.x.float(), self.chosen, self.shares, shared)


def experts_of(stack: ExpertStack) -> Sequence[Expert]:
    """The experts of a stack, one by one."""
    return [
        PlainExpert(gate_up, down, stack.activation) for gate_up, down in zip(stack.gate_up, stack.down, strict=True)
    ]


def draw_experts(
    seed: int, device: torch.device, num_tokens: int | None = None, dtype: torch.dtype | None = None
) -> ExpertCase:
    """A case of its own for each seed: units that are no multiples of tiles, experts of other ranks, any shares.

    Of every fifth case all tokens choose one expert first, and some experts have no tokens at all.
    """
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype or list(BOUNDS)[seed % len(BOUNDS)]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    num_experts = int(random.choice([1, 2, 5, 8, 33]))
    num_chosen = int(random.integers(1, min(num_experts, 6) + 1))
    hidden_size, num_units = int(random.choice([16, 48, 100, 256])), int(random.choice([7, 22, 96, 130]))
    first = int(random.integers(0, num_experts)) if random.random() < 0.4 else 0
    held = range(first, int(random.integers(first + 1, num_experts + 1)) if first else num_experts)
    activation = list(ACTIVATIONS)[int(random.integers(0, len(ACTIVATIONS)))]
    stack = ExpertStack(
        drawn(len(held), 2 * num_units, hidden_size) / hidden_size**0.5,
        drawn(len(held), hidden_size, num_units) / num_units**0.5,
        activation,
    )
    num_tokens = num_tokens or int(random.integers(1, 71))
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if seed % 5 == 0:
        scores[:, int(random.choice(held))] += 1
    shares, chosen = scores.to(device).topk(num_chosen)
    is_scaled = bool(random.random() < 0.3)
    experts = HeldExperts(experts_of(stack), held, num_experts, is_scaled, stack)
    shared = drawn(num_tokens, hidden_size) if random.random() < 0.5 else None
    return ExpertCase(experts, drawn(num_tokens, hidden_size), chosen, shares, shared)
