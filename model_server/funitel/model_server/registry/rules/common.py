"""Fields and names that rows of several families share."""

from typing import Any

from funitel.model_server.registry.rules.row import Rule, first
from funitel.model_server.spec.model_spec import Norm

LAYER: dict[str, Any] = {"norm": Norm.LAYER, "has_norm_bias": True}
"""Layer norms."""
BIASES: dict[str, Any] = {"has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True}
"""Biases in every linear layer."""


def biases(rule: Rule) -> dict[str, Any]:
    """Biases in every linear layer, where a rule says so."""
    return dict.fromkeys(BIASES, rule)


TIED: dict[str, Any] = {"is_tied": first("tie_word_embeddings", default=True)}
"""A head that shares the embedding's weights, where the config does not say."""
ATTENTION_BIAS = first("attention_bias", default=False)
ATTENTION_BIASES: dict[str, Any] = {"has_qkv_bias": ATTENTION_BIAS, "has_out_bias": ATTENTION_BIAS}
"""Biases in attention's linear layers, where the config says so."""
SANDWICH_NAMES = {
    "attention_post_norm": "layers.{i}.post_attention_layernorm",
    "mlp_norm": "layers.{i}.pre_feedforward_layernorm",
    "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}
"""Norms before and behind attention and the MLP."""
