"""Decide which specs the fused step computes. The others are left to torch."""

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from funitel.model_server.spec.model_spec import (
    Activation,
    ExpertScore,
    ExpertsSpec,
    ModelSpec,
    Norm,
    NormPlacement,
    QkNorm,
)
from funitel.model_server.spec.state_layers import STATE_KINDS

# Fields that the fused step reads: any other must have its default, so that one that is new to specs is not ignored.
_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
_NORMS = ("norm", "norm_eps", "norm_offset", "has_norm_weight", "has_norm_bias", "norm_placement")
_HEADS = ("qk_norm", "has_qk_norm_bias", "qkv_layout", "qkv_clip")
_SCORES = ("sliding_windows", "attention_scale", "is_scaled_by_layer", "attention_softcap", "whole_spans")
_POSITIONS = ("position", "rotary", "window_rotary", "unrotated_layers", "position_offset")
_SLOPES = ("alibi_bias_max", "alibi_scale")
_BLOCKS = ("is_parallel", "activation", "is_gated", "residual_scale", "experts", "latent")
_BIASES = ("has_qkv_bias", "has_out_bias", "has_mlp_bias", "has_head_bias")
_ENDS = ("embedding_scale", "is_tied", "logit_scale", "logit_softcap")
_READ = {"architecture", "max_position_embeddings", "names", "first_layer", "end_layer"}
_READ |= {*_SIZES, *_NORMS, *_HEADS, *_SCORES, *_POSITIONS, *_SLOPES, *_BLOCKS, *_BIASES, *_ENDS}
_UNREAD_NAMES = ("embedding_in", "embedding_out", "is_stack_interleaved") + (
    "router_scale",
    "expert_scale",
)
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
# The same for a mixture of experts.
_READ_OF_EXPERTS = {"num_experts", "num_chosen", "intermediate_size", "dense_layers", "score", "is_normalized", "scale"}
_READ_OF_EXPERTS |= {"num_groups", "num_chosen_groups", "group_depth", "shared_size"}
_UNREAD_KINDS = {
    "norm": Norm.NONE,
    "norm_placement": NormPlacement.WITHIN,
    "qk_norm": QkNorm.PLAIN,
    "activation": Activation.XIELU,
    "experts.score": ExpertScore.SPARSEMIXER,
}


def missing(spec: ModelSpec) -> str | None:
    """What of a spec the fused step does not know, if anything."""
    state = next((name for name in STATE_KINDS if getattr(spec, name)), None)
    if spec.state_layers and state is not None:
        return f"layers with a state ({state})"
    kinds = {name: getattr(spec, name) for name in ("norm", "norm_placement", "qk_norm", "activation")}
    kinds |= {"experts.score": spec.experts.score} if spec.experts else {}
    for name, kind in kinds.items():
        if kind is _UNREAD_KINDS[name]:
            return f"{name} {kind}"
    found = _unread(spec, _READ) or (spec.experts and _unread(spec.experts, _READ_OF_EXPERTS, "experts."))
    if found:
        return found
    named = next((name for name in _UNREAD_NAMES if getattr(spec.names, name)), None)
    if named is not None:
        return f"names with {named}" if named.startswith("is_") else f"a tensor for {named}"
    for rotary in map(spec.rotary_of, range(spec.num_layers)):
        if rotary is not None and rotary.scaling.kind not in _ROTARY_KINDS:
            return f"rotary scaling {rotary.scaling.kind}"
    return None


def _unread(spec: ModelSpec | ExpertsSpec, read: set[str], prefix: str = "") -> str | None:
    """A field that has not its default and is not among those that are read, with its value unless that is long."""
    for each in fields(spec):
        value = getattr(spec, each.name)
        if each.name not in read and value != _default(each):
            return f"{prefix}{each.name}" + ("" if isinstance(value, tuple) or is_dataclass(value) else f" {value}")
    return None


def _default(each: "Field[Any]") -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default
