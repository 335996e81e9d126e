"""Decide which specs the fused step computes. The others are left to torch."""

from dataclasses import MISSING, Field, fields
from typing import Any

from funitel.model_server.spec.model_spec import ModelSpec, Norm

# Fields that the fused step reads: any other must have its default, so that one that is new to specs is not ignored.
_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
_NORMS = ("norm", "norm_eps", "norm_offset", "has_norm_weight", "has_norm_bias", "norm_placement")
_HEADS = ("qk_norm", "has_qk_norm_bias", "qkv_layout", "qkv_clip")
_SCORES = ("sliding_windows", "attention_scale", "is_scaled_by_layer", "attention_softcap")
_POSITIONS = ("position", "rotary", "window_rotary", "unrotated_layers", "position_offset")
_SLOPES = ("alibi_bias_max", "alibi_scale")
_BLOCKS = ("is_parallel", "activation", "is_gated", "residual_scale", "experts", "latent")
_BIASES = ("has_qkv_bias", "has_out_bias", "has_mlp_bias", "has_head_bias")
_ENDS = ("embedding_scale", "is_tied", "logit_scale", "logit_softcap")
_READ = {"architecture", "max_position_embeddings", "names"}
_READ |= {*_SIZES, *_NORMS, *_HEADS, *_SCORES, *_POSITIONS, *_SLOPES, *_BLOCKS, *_BIASES, *_ENDS}
_UNREAD_NAMES = ("embedding_in", "embedding_out")
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn")


def missing(spec: ModelSpec) -> str | None:
    """What of a spec the fused step does not know, if anything."""
    for each in fields(spec):
        value = getattr(spec, each.name)
        if each.name not in _READ and value != _default(each):
            return f"{each.name} {value}"
    named = next((name for name in _UNREAD_NAMES if getattr(spec.names, name)), None)
    if named is not None:
        return f"a tensor for {named}"
    if spec.norm is Norm.NONE:
        return f"norm {spec.norm}"
    for rotary in map(spec.rotary_of, range(spec.num_layers)):
        if rotary is not None and rotary.scaling.kind not in _ROTARY_KINDS:
            return f"rotary scaling {rotary.scaling.kind}"
    return None


def _default(each: "Field[Any]") -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default
