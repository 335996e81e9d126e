"""A model as data: one choice for each building block, and how its checkpoint names the tensors.

`families` maps a Hugging Face `config.json` to a ModelSpec; `decoder` runs any of them. No torch here.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum


class Norm(StrEnum):
    """Normalisation before each block."""

    RMS = "rms"
    LAYER = "layer"


class Activation(StrEnum):
    """Non-linearity of the MLP."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


class Position(StrEnum):
    """How positions enter the model."""

    ROTARY = "rotary"
    LEARNED = "learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the trained context (`rope_type` of the checkpoint)."""

    kind: str = "default"  # "default", "linear", "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Checkpoint names; `{i}` is the layer. Give either `q`, `k`, `v` or the packed `qkv`; `up` may stand alone."""

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    attention_norm: str = "layers.{i}.input_layernorm"
    q: str = "layers.{i}.self_attn.q_proj"
    k: str = "layers.{i}.self_attn.k_proj"
    v: str = "layers.{i}.self_attn.v_proj"
    qkv: str = ""
    q_norm: str = "layers.{i}.self_attn.q_norm"
    k_norm: str = "layers.{i}.self_attn.k_norm"
    out: str = "layers.{i}.self_attn.o_proj"
    mlp_norm: str = "layers.{i}.post_attention_layernorm"
    gate: str = "layers.{i}.mlp.gate_proj"
    up: str = "layers.{i}.mlp.up_proj"
    down: str = "layers.{i}.mlp.down_proj"
    final_norm: str = "norm"
    head: str = "lm_head"
    is_transposed: bool = False  # linear weights stored [in, out]
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)  # patterns of tensors that carry nothing


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
    intermediate_size: int
    max_position_embeddings: int
    norm: Norm = Norm.RMS
    norm_eps: float = 1e-6
    activation: Activation = Activation.SILU
    is_gated: bool = True
    position: Position = Position.ROTARY
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling = field(default_factory=RotaryScaling)
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    is_tied: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # per layer, in tokens; empty: none
    names: TensorNames = field(default_factory=TensorNames)

    def stretched(self, factor: float) -> "ModelSpec":
        """The spec with all rotary positions divided by `factor`, and a context that many times as long."""
        context = int(self.max_position_embeddings * factor)
        return replace(
            self, rotary_scaling=RotaryScaling(kind="linear", factor=factor), max_position_embeddings=context
        )

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None
