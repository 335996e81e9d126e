"""Describe a decoder as data: one choice for each building block, and how its checkpoint names the tensors.

`families` maps a Hugging Face `config.json` to a ModelSpec, `spec_file` reads one that a user wrote; `decoder` runs any
of them. No torch here.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from funitel.model_server.spec.layer_spec import AltUpSpec, LayerEmbeddingSpec, LayerSpec, MultiplierSpec
from funitel.model_server.spec.state_layers import (
    STATE_KINDS,
    DeltaNetSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)
from funitel.model_server.spec.tensor_names import TensorNames


class Norm(StrEnum):
    """What normalises hidden states."""

    RMS = "rms"
    LAYER = "layer"
    NONE = "none"


class NormPlacement(StrEnum):
    """Where a block `f` is normalised, and what is added to the residual stream `x`."""

    PRE = "pre"  # x + f(norm(x))
    POST = "post"  # x + norm(f(x))
    BOTH = "both"  # x + post_norm(f(norm(x)))
    AFTER = "after"  # norm(x + f(x))
    WITHIN = "within"  # n + f(n), where n = norm(x)


NORMS_BEFORE = (NormPlacement.PRE, NormPlacement.BOTH, NormPlacement.WITHIN)
"""Placements with a norm before a block."""
NORMS_BEHIND = (NormPlacement.POST, NormPlacement.BOTH, NormPlacement.AFTER)
"""Placements with a norm of what a block gives, or of its sum with the residual."""


class QkNorm(StrEnum):
    """What normalises queries and keys before they are rotated."""

    NONE = "none"
    HEAD = "head"  # each head by the same weights [head_dim]
    EACH = "each"  # each head by weights of its own [heads, head_dim]
    WHOLE = "whole"  # all heads together, by weights [heads * head_dim]
    PLAIN = "plain"  # each head, without weights


class Activation(StrEnum):
    """Non-linearity of the MLP."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    QUICK_GELU = "quick_gelu"  # x * sigmoid(1.702 x)
    RELU_SQUARED = "relu_squared"
    XIELU = "xielu"  # of two learnt slopes in each layer; for MLPs that are not gated


class Position(StrEnum):
    """How positions enter the model."""

    ROTARY = "rotary"
    LEARNED = "learned"
    SINUSOIDAL = "sinusoidal"  # sines in the first half of the vector, cosines in the second
    ALIBI = "alibi"  # a bias on scores that grows with distance
    NONE = "none"


class ExpertScore(StrEnum):
    """What a router makes of its logits."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SPARSEMIXER = "sparsemixer"  # softmax over those near the largest that is left, for one expert after the other


class WholeSpans(StrEnum):
    """Layers in which all tokens of an image see each other, within a window too where the layer has one."""

    NONE = "none"
    ALL = "all"
    WINDOWS = "windows"  # layers with a sliding window


class QkvLayout(StrEnum):
    """How the rows of a packed `qkv` tensor lie."""

    STACKED = "stacked"  # all query heads, all key heads, all value heads
    GROUPED = "grouped"  # for each KV head: its query heads, its key, its value


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the trained context (`rope_type` of the checkpoint)."""

    kind: str = "default"  # one of ROTARY_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # tokens of the trained context
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    is_truncated: bool = True  # yarn: whole dimensions as bounds
    share: float = 1.0  # proportional: of the frequencies, the fastest, that turn; the others are 0
    amplitude: float = 1.0  # multiplies cosines and sines
    long_amplitude: float | None = None  # longrope: in place of it beyond the trained context; None: the same
    short_factors: tuple[float, ...] = ()  # longrope: a divisor for each frequency, within the trained context
    long_factors: tuple[float, ...] = ()  # longrope: beyond it


ROTARY_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary positions of a layer."""

    base: float = 10000.0
    dims: int | None = None  # leading elements of a head that turn; None: all of them
    is_interleaved: bool = False  # pairs are neighbours, instead of element i with element i + dims / 2
    sections: tuple[int, ...] = ()  # pairs that turn by each of three axes: frame, row, column; empty: all by one
    has_mixed_sections: bool = False  # axes alternate from pair to pair while rows and columns last; else one by one
    scaling: RotaryScaling = field(default_factory=RotaryScaling)

    def axes(self) -> tuple[int, ...]:
        """The axis by which each pair turns, of the slowest last: [dims / 2], or empty where there is one axis.

        Source: M-RoPE of Qwen2-VL, arXiv 2409.12191; mixed as in Qwen3-VL.
        """
        if not self.has_mixed_sections:
            return tuple(axis for axis, size in enumerate(self.sections) for _ in range(size))
        axes = [0] * sum(self.sections)
        for axis in (1, 2):
            for place in range(axis, 3 * self.sections[axis], 3):
                axes[place] = axis
        return tuple(axes)

    def stretched(self, factor: float) -> "RotarySpec":
        """With all positions divided by `factor`, in place of another scaling."""
        kind = "proportional" if self.scaling.kind == "proportional" else "linear"
        return replace(self, scaling=RotaryScaling(kind=kind, factor=factor, share=self.scaling.share))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowthSpec:
    """Queries grow with their position p: times 1 + rate * log(1 + floor((p + offset) / period))."""

    rate: float
    period: int  # tokens
    offset: int = 0
    is_unrotated_only: bool = False  # in layers without rotary positions; else in all


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention: keys and values of all heads come from one small vector of a token, and that is cached.

    The last `rotary.dims` elements of a query turn; those of the key are beside the vector, one for all heads. There is
    one KV head, and `has_qkv_bias` speaks of the layers that make the vectors. Source: DeepSeek-V2, arXiv 2405.04434.
    """

    rank: int  # elements of the vector
    value_dim: int  # elements of a head's values
    query_rank: int | None = None  # queries come from a vector of so many elements; None: from hidden states
    norm_eps: float = 1e-6  # of the norms of these vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Sparse attention: a token attends to those that an indexer with small heads of its own scores highest.

    It has one key for all its heads; the leading elements turn as the layer's do. Source: DeepSeek-V3.2-Exp.
    """

    num_heads: int
    head_dim: int
    num_chosen: int  # tokens that a token attends to
    is_interleaved: bool = False  # pairs that turn together are neighbours
    sharing_layers: tuple[int, ...] = ()  # layers that attend to the tokens which the layer before chose
    norm_eps: float = 1e-6  # of the norm of its keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: a token passes the few of many MLPs that a router scores highest, and adds them up.

    Where experts are in groups, the best groups are chosen first, and the experts from these.
    """

    num_experts: int
    num_chosen: int  # experts of a token
    intermediate_size: int  # hidden units of an expert
    dense_layers: tuple[int, ...] = ()  # layers with the plain MLP instead
    score: ExpertScore = ExpertScore.SOFTMAX
    is_normalized: bool = False  # scores of a token's experts are divided by their sum
    scale: float = 1.0  # multiplies them after that
    num_groups: int = 1  # of equally many experts
    num_chosen_groups: int = 1
    group_depth: int = 1  # best experts of a group that rank it, by the sum of their scores
    shared_size: int = 0  # hidden units of an MLP that all tokens pass besides; 0: none
    shared_scale: float = 1.0  # multiplies what that MLP gives
    is_beside_mlp: bool = False  # layers have the plain MLP as well, and add both up, each with norms of its own
    is_input_scaled: bool = False  # an expert reads its token times the share, instead of giving its result times it
    has_bias: bool = False  # of experts
    has_router_bias: bool = False
    jitter: float = 0.0  # sparsemixer: scores count that are off the largest by twice as much, relative to their size


_AS_THE_MODEL = LayerSpec()


class ModelFacts(Protocol):
    """What is to be known of any model besides how to compute it."""

    @property
    def architecture(self) -> str:
        """The name of its class in transformers."""

    @property
    def vocab_size(self) -> int:
        """Token ids there are."""

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the decoder needs to know. Sizes are counts of elements, heads, layers or tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # hidden units of the plain MLP
    max_position_embeddings: int

    norm: Norm = Norm.RMS
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to the weights of norms: Gemma's are stored less 1
    has_norm_weight: bool = True
    has_norm_bias: bool = False
    norm_placement: NormPlacement = NormPlacement.PRE
    is_parallel: bool = False  # attention and MLP read the same residual and are added together
    qk_norm: QkNorm = QkNorm.NONE
    has_qk_norm_bias: bool = False
    is_qk_norm_last: bool = False  # heads are normalised once they are rotated, in layers where they are
    has_value_norm: bool = False  # value heads are normalised too, each by itself and without weights

    activation: Activation = Activation.SILU
    is_gated: bool = True
    gate_limit: float | None = None  # gates are kept below it, and what they multiply within +- it
    gate_shift: float = 0.0  # added to what gates multiply
    experts: ExpertsSpec | None = None  # in place of the MLP

    position: Position = Position.ROTARY
    rotary: RotarySpec = field(default_factory=RotarySpec)
    window_rotary: RotarySpec | None = None  # of layers with a sliding window; None: as the others
    unrotated_layers: tuple[int, ...] = ()  # layers without rotary positions
    position_offset: int = 0  # rows of the position table before that of position 0
    alibi_bias_max: float = 8.0  # the slopes are powers of 2 ** (-alibi_bias_max / heads)
    alibi_scale: float = 1.0  # multiplies the slopes

    sliding_windows: tuple[int | None, ...] = ()  # per layer, in tokens; empty: none
    chunk_sizes: tuple[int | None, ...] = ()  # per layer: tokens attend within chunks of so many; empty: none
    has_sinks: bool = False  # each head has a score that takes part in the softmax, and no value
    has_output_gate: bool = False  # what heads attend to is multiplied by sigmoids of a linear layer on hidden states
    query_growth: QueryGrowthSpec | None = None  # None: queries are the same at every position
    attention_scale: float | None = None  # multiplies scores; None: head_dim ** -0.5
    is_scaled_by_layer: bool = False  # scores of layer i are also divided by i + 1
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    whole_spans: WholeSpans = WholeSpans.NONE
    qkv_layout: QkvLayout = QkvLayout.STACKED
    qkv_clip: float | None = None  # queries, keys and values are kept within +- this
    latent: LatentSpec | None = None  # where keys and values come from; None: from hidden states
    indexer: IndexerSpec | None = None  # chooses what tokens attend to, with `latent`; None: to all before

    delta_net: DeltaNetSpec | None = None
    mamba2: Mamba2Spec | None = None
    mamba: MambaSpec | None = None
    lightning: LightningSpec | None = None
    short_conv: ShortConvSpec | None = None
    state_layers: tuple[int, ...] = ()  # layers that keep a state instead of attending, of the one kind given above
    is_state_beside: bool = False  # these layers attend as well, and what both give is added up
    mlp_layers: tuple[int, ...] = ()  # layers of an MLP alone; where there are some, the others have none
    has_mlp: bool = True  # layers that attend or keep a state have an MLP too, unless there are `mlp_layers`
    state_norm_placement: NormPlacement | None = None  # in these layers; None: as in the others

    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False  # of all MLPs but a mixture's experts
    has_head_bias: bool = False

    layers: tuple[LayerSpec, ...] = ()  # what layers have of their own; empty: all are alike
    layer_embeddings: LayerEmbeddingSpec | None = None
    has_layer_scale: bool = False  # hidden states behind a layer are multiplied by a number of the checkpoint
    laurel_rank: int | None = None  # of a learnt residual beside attention (LAuReL, arXiv 2411.07501)
    altup: AltUpSpec | None = None
    multipliers: MultiplierSpec | None = None

    embedding_size: int | None = None  # of the embedding table; None: the hidden size
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what a block adds to the residual
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    is_tied: bool = False  # the head is the embedding table
    is_head_normalized: bool = False  # rows of the head are divided by their length
    names: TensorNames = field(default_factory=TensorNames)

    @property
    def table_size(self) -> int:
        """Elements of a row of the embedding table."""
        return self.embedding_size or self.hidden_size

    @property
    def score_scale(self) -> float:
        """What scores of queries and keys are multiplied by in a layer that is not scaled by its place."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def cached_dim(self) -> int:
        """Elements of a token in the cache, for a KV head: its key, and as many for its value; with `latent` both."""
        return self.head_dim if self.latent is None else self.latent.rank + (self.rotary.dims or 0)

    @property
    def state(self) -> StateSpec | None:
        """What layers with a state are, or None where there are none."""
        return (
            next((getattr(self, kind) for kind in STATE_KINDS if getattr(self, kind)), None)
            if self.state_layers
            else None
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with keys and values in the cache."""
        return tuple(i for i in self.held_layers if self.attends(i))

    @property
    def held_layers(self) -> range:
        """Layers that this shard has: all of them, but for a pipeline stage."""
        return range(self.num_layers)

    @property
    def is_first(self) -> bool:
        """Whether the first layer is here, and so the embedding."""
        return self.held_layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the last layer is here, and so the final norm and the head."""
        return self.held_layers.stop == self.num_layers

    @property
    def holds_table(self) -> bool:
        """Whether the embedding table is here: for the embedding, or for a head that is the same."""
        return self.is_first or (self.is_last and self.is_tied)

    def of_one_layer(self) -> "ModelSpec":
        """The spec of a model with one layer as these, which attends."""
        return replace(self, num_layers=1, state_layers=())

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return layer not in self.mlp_layers and (self.is_state_beside or layer not in self.state_layers)

    def placement(self, layer: int) -> NormPlacement:
        """Where the blocks of a layer are normalised."""
        return self.state_norm_placement or self.norm_placement if layer in self.state_layers else self.norm_placement

    def layer(self, index: int) -> LayerSpec:
        """What a layer has in place of the model's."""
        return self.layers[index] if self.layers else _AS_THE_MODEL

    def choice_source(self, layer: int) -> int:
        """The layer with the indexer that chooses for a layer."""
        sharing = self.indexer.sharing_layers if self.indexer else ()
        return next(i for i in range(layer, -1, -1) if i not in sharing)

    def at(self, index: int) -> "ModelSpec":
        """The spec with the sizes of one layer as the model's."""
        own = self.layer(index)
        sizes = {name: getattr(own, name) for name in ("head_dim", "num_kv_heads", "intermediate_size")}
        given = {name: size for name, size in sizes.items() if size is not None}
        return replace(self, **given) if given else self

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """The experts of a layer, or None where it has one plain MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def stretched(self, factor: float) -> "ModelSpec":
        """The spec with all rotary positions divided by `factor`, and a context that many times as long."""
        return replace(
            self,
            rotary=self.rotary.stretched(factor),
            window_rotary=self.window_rotary and self.window_rotary.stretched(factor),
            max_position_embeddings=int(self.max_position_embeddings * factor),
        )

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def chunk(self, layer: int) -> int | None:
        """Size of the chunks in tokens within which a layer attends, or None where it has none."""
        return self.chunk_sizes[layer] if self.chunk_sizes else None

    def sees_spans(self, layer: int) -> bool:
        """Whether tokens of an image see those behind them in it, in a layer."""
        kinds = (WholeSpans.ALL, WholeSpans.WINDOWS) if self.window(layer) else (WholeSpans.ALL,)
        return self.whole_spans in kinds

    def growth_of(self, layer: int) -> QueryGrowthSpec | None:
        """How queries of a layer grow with positions, or None where they do not."""
        growth = self.query_growth
        return None if growth is None or (growth.is_unrotated_only and self.rotary_of(layer)) else growth

    def rotary_of(self, layer: int) -> RotarySpec | None:
        """Rotary positions of a layer, or None where it has none."""
        if self.position is not Position.ROTARY or layer in self.unrotated_layers or not self.attends(layer):
            return None
        return self.window_rotary if self.window_rotary and self.window(layer) else self.rotary
