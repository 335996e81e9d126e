"""How a mixture computes the experts that its router chose: `ExpertOps`, and the reference in torch, expert by expert.

`experts.kernels` computes all experts in a few kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from funitel.model_server.spec.model_spec import Activation


class Expert(Protocol):
    """The MLP of one expert."""

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's hidden units add to the result: hidden states [rows, hidden_size] in and out."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """The weights of all held experts of a layer, one expert after the other; each expert's own are views of these."""

    gate_up: torch.Tensor  # [held experts, 2 * units, hidden_size], the gates of an expert first
    down: torch.Tensor  # [held experts, hidden_size, units]
    activation: Activation


@dataclass(slots=True, eq=False)
class HeldExperts:
    """The experts of a layer that this rank computes, or computes a part of."""

    mlps: Sequence[Expert]
    held: range  # their numbers
    num_experts: int  # of the layer
    is_input_scaled: bool  # an expert reads its token times the share
    stack: ExpertStack | None = None


class ExpertOps(Protocol):
    """How experts are computed; chosen once, when the model is loaded."""

    name: str

    def is_fixed(self, experts: HeldExperts) -> bool:
        """Whether launches depend on shapes alone, so that a CUDA graph may replay them."""

    def add(
        self,
        experts: HeldExperts,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the chosen experts of each token and sum their results, in an order that is fixed.

        Args:
            experts: those of this rank; others add nothing.
            x: hidden states, [num_tokens, hidden_size].
            chosen: experts of the tokens, [num_tokens, num_chosen] int64.
            shares: of those, [num_tokens, num_chosen] float32.
            shared: what the sum begins with, of the shape of `x`, and may be overwritten; None: zeros.

        Returns:
            The sum, [num_tokens, hidden_size].
        """


class TorchExpertOps:
    """The reference. The host reads how many tokens each expert has, and computes the experts that have any."""

    name = "torch"

    def is_fixed(self, experts: HeldExperts) -> bool:
        """See ExpertOps."""
        return False

    def add(
        self,
        experts: HeldExperts,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ExpertOps."""
        num_chosen = chosen.shape[1]
        chosen, shares = chosen.flatten(), shares.flatten()
        total = torch.zeros_like(x) if shared is None else shared
        sizes = chosen.bincount(minlength=experts.num_experts).tolist()
        every = torch.split(chosen.argsort(stable=True), sizes)
        for expert, places in zip(experts.mlps, every[experts.held.start : experts.held.stop], strict=True):
            if len(places):
                tokens, share = places // num_chosen, shares[places, None].to(x.dtype)
                if experts.is_input_scaled:
                    result = expert.partial(x[tokens] * share)
                else:
                    result = expert.partial(x[tokens]) * share
                total.index_add_(0, tokens, result)
        return total
