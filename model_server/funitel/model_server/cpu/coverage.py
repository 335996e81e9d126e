"""Which specs the fused step computes. Whatever is not known here is left to torch."""

from dataclasses import MISSING, Field, fields
from typing import Any

from funitel.model_server.cpu.program import ACTIVATIONS
from funitel.model_server.spec import ModelSpec, Norm, Position, QkNorm

# Fields that the fused step reads: any other must have its default, so that one that is new to specs is not ignored.
_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
_CHOICES = ("norm", "norm_eps", "has_norm_bias", "qk_norm", "activation", "is_gated", "position", "rotary")
_BIASES = ("has_qkv_bias", "has_out_bias", "has_mlp_bias")
_READ = {"architecture", "max_position_embeddings", "sliding_windows", "qkv_layout", "is_tied", "names"}
_READ |= {*_SIZES, *_CHOICES, *_BIASES}
_UNREAD_NAMES = ("embedding_norm", "embedding_in", "embedding_out", "attention_post_norm", "mlp_post_norm")
_PARTS = {"experts": "a mixture of experts", "latent": "latent attention"}
_ROTARY_KINDS = ("default", "linear", "llama3", "yarn")


def missing(spec: ModelSpec) -> str | None:
    """What of a spec the fused step does not know, if anything."""
    for each in fields(spec):
        value = getattr(spec, each.name)
        if each.name not in _READ and value != _default(each):
            return _PARTS.get(each.name) or f"{each.name} {value}"
    names, scaling = spec.names, spec.rotary.scaling
    named = next((name for name in _UNREAD_NAMES if getattr(names, name)), None)
    if named is not None:
        return f"a tensor for {named}"
    if not names.mlp_norm or not names.final_norm:
        return "a block without a norm of its own"
    if spec.norm is Norm.NONE or spec.has_norm_bias != (spec.norm is Norm.LAYER):
        return f"norm {spec.norm} {'with' if spec.has_norm_bias else 'without'} bias"
    if spec.qk_norm is not QkNorm.NONE and (spec.qk_norm is not QkNorm.HEAD or spec.norm is not Norm.RMS):
        return f"qk_norm {spec.qk_norm} of kind {spec.norm}"
    if spec.activation not in ACTIVATIONS:
        return f"activation {spec.activation}"
    if spec.position not in (Position.ROTARY, Position.LEARNED):
        return f"position {spec.position}"
    if spec.rotary.is_interleaved or spec.rotary.dims not in (None, spec.head_dim):
        return "rotary positions that are interleaved or of a part of the head"
    if scaling.kind not in _ROTARY_KINDS or scaling.amplitude != 1.0:
        return f"rotary scaling {scaling.kind}"
    return None


def _default(each: "Field[Any]") -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default
