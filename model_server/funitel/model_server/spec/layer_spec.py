"""What differs between the layers of a decoder, and what some layers have besides attention and an MLP.

Part of a ModelSpec. Sizes are counts of elements, heads or tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer has in place of the model's; None: as the model."""

    head_dim: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    kv_source: int | None = None  # an earlier layer, of which it has the keys and values
    has_key_values: bool = False  # values are what keys are before norm and rotation
    gate_sparsity: float = 0.0  # gates below this quantile of a normal distribution are 0, and it is what others lose


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiplierSpec:
    """What hidden states in every layer are multiplied by. Source: Falcon-H1 and MiniMax-01 in transformers."""

    attention_in: float = 1.0  # what attention reads
    attention_out: float = 1.0  # what it gives
    state_in: float = 1.0  # the same of layers with a state
    state_out: float = 1.0
    state_parts: tuple[float, ...] = ()  # Mamba 2's gates, values, B, C and steps; empty: 1 each
    attention_residual: float = 1.0  # the residual that what attention gives is added to
    state_residual: float = 1.0  # the same of layers with a state
    mlp_residual: float = 1.0  # and of MLPs
    mlp_gate: float = 1.0  # gates of the MLP, before their activation
    mlp_out: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbeddingSpec:
    """Each layer has an embedding of the token, added to a projection of the token's first hidden states.

    A layer gates it by its hidden states and adds it to them. Source: Gemma 3n and 4 in transformers.
    """

    size: int  # elements for each layer
    vocab_size: int  # token ids with an embedding; all others have that of token 0
    media_token: int = 0  # tokens of images and sounds have the embedding of this one


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Several hidden states of a token, of which a layer computes one and predicts the others.

    Source: AltUp, arXiv 2301.13310.
    """

    num_streams: int
    active: int = 0  # the one that layers compute
    is_output_scaled: bool = True  # what gates a layer's embedding is multiplied by weights of the layer's own
