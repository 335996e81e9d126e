"""Describe layers that keep a state of a sequence in place of its keys and values, as part of a ModelSpec.

A state is as large for a long sequence as for a short one: what a convolution over the last tokens reads, and but for a
short convolution a matrix [key_dim, value_dim] for each head. No torch here.
"""

from dataclasses import dataclass
from typing import Protocol


class StateSpec(Protocol):
    """What is common to the kinds of layers with a state."""

    @property
    def conv_width(self) -> int:
        """Tokens that the convolution reads: a token and those before it."""

    @property
    def num_heads(self) -> int:
        """Heads with a matrix each, or channels where there are none: what ranks share."""

    @property
    def num_groups(self) -> int:
        """Groups of equally many heads with keys and queries in common; ranks share whole groups as far as they can."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Size of a head's matrix: (key_dim, value_dim), or (0, 0)."""

    def num_channels(self, num_heads: int, num_groups: int) -> int:
        """Channels of the convolution for so many of the heads and groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """Gated delta net: a head's matrix S becomes a * S + b * k (v - a * S^T k)^T, and gives S^T q.

    Source: Gated DeltaNet, arXiv 2412.06464. Key heads serve equally many value heads each; queries and keys have a
    length of 1, queries are multiplied by key_dim ** -0.5. With `rank` each row of S has a decay of its own: Kimi
    Delta Attention, arXiv 2510.26692.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # elements of a head's keys
    value_dim: int
    conv_width: int
    beta_scale: float = 1.0  # multiplies b, which is within 0..1
    rank: int | None = None  # of vectors that gates, and decays of rows, come from; None: one decay of a head, as gates
    has_sigmoid_gate: bool = False  # what heads give is multiplied by sigmoids of gates; else by their SiLU
    norm_eps: float | None = None  # of the norm of heads; None: as of all norms

    @property
    def num_heads(self) -> int:
        """See StateSpec."""
        return self.num_value_heads

    @property
    def num_groups(self) -> int:
        """See StateSpec."""
        return self.num_key_heads

    @property
    def matrix(self) -> tuple[int, int]:
        """See StateSpec."""
        return self.key_dim, self.value_dim

    def num_channels(self, num_heads: int, num_groups: int) -> int:
        """See StateSpec."""
        return 2 * num_groups * self.key_dim + num_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """Mamba 2: a head's matrix S becomes a * S + t * B x^T, and gives S^T C + D * x, with t a step and a its decay.

    Source: Mamba 2, arXiv 2405.21060. B and C are those of the head's group.
    """

    num_heads: int
    head_dim: int  # elements of a head's x
    state_dim: int  # elements of B and C
    num_groups: int
    conv_width: int
    has_conv_bias: bool = True
    has_bias: bool = False  # of the layer on the way in
    has_out_bias: bool | None = None  # of the one on the way out; None: as of the other
    has_norm: bool = True  # heads are normalised, by group
    is_norm_first: bool = False  # they are before their gates, instead of behind them
    min_step: float = 0.0  # steps are kept within these
    max_step: float | None = None  # None: no bound
    norm_eps: float | None = None  # None: as of all norms

    @property
    def matrix(self) -> tuple[int, int]:
        """See StateSpec."""
        return self.state_dim, self.head_dim

    def num_channels(self, num_heads: int, num_groups: int) -> int:
        """See StateSpec."""
        return num_heads * self.head_dim + 2 * num_groups * self.state_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba: the state s [state_dim] of a channel becomes exp(t * a) * s + t * x * B, and gives s^T C + D * x.

    Steps t, and B and C of all channels, come from all that is convolved; a is learnt for each element of a state.
    Source: Mamba, arXiv 2312.00752.
    """

    channels: int
    state_dim: int
    conv_width: int
    step_rank: int  # of the vector that steps come from
    has_conv_bias: bool = True
    has_bias: bool = False  # of the layers on the way in and out
    has_norms: bool = False  # that vector, B and C are normalised
    has_norm_weights: bool = True
    norm_eps: float | None = None  # None: as of all norms

    @property
    def num_heads(self) -> int:
        """See StateSpec."""
        return self.channels

    @property
    def num_groups(self) -> int:
        """See StateSpec."""
        return 1

    @property
    def matrix(self) -> tuple[int, int]:
        """See StateSpec."""
        return self.state_dim, 1

    def num_channels(self, num_heads: int, num_groups: int) -> int:
        """See StateSpec."""
        return num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec:
    """Lightning attention: a head's matrix S becomes a * S + k v^T, and gives S^T q, with a fixed decay a of the head.

    In layer i of n, -log a of head h of H is 2 ** (-8 * (h + 1) / H) * (1 - i / (n - 1 + e) + e), where e is 1e-5.
    Queries, keys and values pass the activation. Source: MiniMax-01, arXiv 2501.08313, and its code in transformers.
    """

    num_heads: int
    head_dim: int  # elements of a head's queries, keys and values
    norm_eps: float = 1e-6  # of the norm of all heads together

    @property
    def conv_width(self) -> int:
        """See StateSpec; there is no convolution."""
        return 1

    @property
    def num_groups(self) -> int:
        """See StateSpec."""
        return self.num_heads

    @property
    def matrix(self) -> tuple[int, int]:
        """See StateSpec."""
        return self.head_dim, self.head_dim

    def num_channels(self, num_heads: int, num_groups: int) -> int:
        """See StateSpec."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A convolution over the last few tokens, gated before and behind it. Source: LFM2, its code in transformers."""

    channels: int  # as many as the hidden size
    conv_width: int
    has_bias: bool = False  # of the convolution and of the layers on the way in and out

    @property
    def num_heads(self) -> int:
        """See StateSpec."""
        return self.channels

    @property
    def num_groups(self) -> int:
        """See StateSpec."""
        return self.channels

    @property
    def matrix(self) -> tuple[int, int]:
        """See StateSpec."""
        return 0, 0

    def num_channels(self, num_heads: int, num_groups: int) -> int:
        """See StateSpec."""
        return num_heads


STATE_KINDS = ("delta_net", "mamba2", "mamba", "lightning", "short_conv")
"""Fields of a ModelSpec, of which one says what layers with a state are."""
