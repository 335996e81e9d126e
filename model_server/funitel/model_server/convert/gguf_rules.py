"""Ways to read settings of a config.json off a GGUF's metadata, which architectures share."""

from typing import Any

from funitel.model_server.convert.gguf_reader import GgufFile
from funitel.model_server.convert.gguf_rope_rules import rope_scaling, rope_theta
from funitel.model_server.convert.gguf_row import Rule
from funitel.proto.errors import UnsupportedModel, WeightsError


def integer(name: str, default: int | None = None) -> Rule:
    """A whole number of the architecture's own."""
    return lambda gguf: gguf.integer(gguf.key(name), default)


def number(name: str, default: float | None = None) -> Rule:
    """A number of the architecture's own."""
    return lambda gguf: gguf.number(gguf.key(name), default)


def optional(name: str) -> Rule:
    """A number of the architecture's own; None where the file has none."""
    return lambda gguf: gguf.number(gguf.key(name)) if gguf.has(gguf.key(name)) else None


def holds(tensor: str) -> Rule:
    """Whether the file has a tensor."""
    return lambda gguf: tensor in gguf.tensors


def num_heads(gguf: GgufFile, name: str = "attention.head_count") -> int:
    """Query heads, or as many as `name` says; a file that does not say has one of each per query head."""
    num_query_heads = gguf.integer(gguf.key("attention.head_count"))
    count = gguf.integer(gguf.key(name), num_query_heads)
    if count < 1 or num_query_heads % count:
        raise WeightsError(f"{gguf.path}: {name} {count} does not divide {num_query_heads} query heads")
    return count


def num_kv_heads(gguf: GgufFile) -> int:
    """Heads of keys and values."""
    return num_heads(gguf, "attention.head_count_kv")


def head_dim(gguf: GgufFile) -> int:
    """Elements of a head: queries, keys and values alike."""
    even = gguf.integer(gguf.key("embedding_length")) // num_heads(gguf)
    size = gguf.integer(gguf.key("attention.key_length"), even)
    other = gguf.integer(gguf.key("attention.value_length"), size)
    if other != size:
        raise UnsupportedModel(f"{gguf.path}: attention.value_length {other} differs from the head size {size}")
    return size


def _whole_head_dim(gguf: GgufFile) -> int:
    """Elements of a head that turns as a whole."""
    size = head_dim(gguf)
    turned = gguf.integer(gguf.key("rope.dimension_count"), size)
    if turned != size:
        raise UnsupportedModel(f"{gguf.path}: rope.dimension_count {turned} differs from the head size {size}")
    return size


def turning_part(gguf: GgufFile) -> float:
    """The share of a head that turns."""
    size = head_dim(gguf)
    return gguf.integer(gguf.key("rope.dimension_count"), size) / max(size, 1)


def dense(gguf: GgufFile) -> str:
    """The activation of gated MLPs, once there are no experts."""
    num_experts = gguf.integer(gguf.key("expert_count"), 0)
    if num_experts:
        raise UnsupportedModel(f"{gguf.path}: {gguf.architecture} with {num_experts} experts is not supported")
    return "silu"


def own_layers(gguf: GgufFile) -> int:
    """Layers without those behind them, which predict tokens beyond the next."""
    return gguf.integer(gguf.key("block_count")) - gguf.integer(gguf.key("nextn_predict_layers"), 0)


def expansion(gguf: GgufFile) -> int:
    """How many times the hidden size an MLP has units."""
    units, size = (gguf.integer(gguf.key(name)) for name in ("feed_forward_length", "embedding_length"))
    if size < 1 or units % size:
        raise UnsupportedModel(f"{gguf.path}: feed_forward_length {units} is no multiple of embedding_length {size}")
    return units // size


def gemma_query_scalar(num_layers: int) -> Rule:
    """What Gemma's scores are divided by the root of. The file does not say: the size tells, as it does llama.cpp."""

    def read(gguf: GgufFile) -> int:
        is_largest = gguf.integer(gguf.key("block_count")) == num_layers
        return gguf.integer(gguf.key("embedding_length")) // num_heads(gguf) if is_largest else head_dim(gguf)

    return read


SIZES: dict[str, Any] = {
    "hidden_size": integer("embedding_length"),
    "intermediate_size": integer("feed_forward_length"),
    "num_hidden_layers": integer("block_count"),
    "num_attention_heads": num_heads,
    "num_key_value_heads": num_kv_heads,
    "max_position_embeddings": integer("context_length"),
}
"""Sizes, as most configs call them."""
RMS = {"rms_norm_eps": number("attention.layer_norm_rms_epsilon")}
LAYER = {"layer_norm_eps": number("attention.layer_norm_epsilon")}
WHOLE_ROPE: dict[str, Any] = {"head_dim": _whole_head_dim, "rope_theta": rope_theta, "rope_scaling": rope_scaling}
"""Heads that turn as a whole."""
PART_ROPE: dict[str, Any] = {
    "head_dim": head_dim,
    "rope_theta": rope_theta,
    "rope_scaling": rope_scaling,
    "partial_rotary_factor": turning_part,
}
"""Heads of which a part turns."""
MODERN: dict[str, Any] = SIZES | RMS | WHOLE_ROPE | {"hidden_act": dense}
"""Settings of a Llama without experts."""
BIASES: dict[str, Any] = {"attention_bias": holds("blk.0.attn_q.bias"), "mlp_bias": holds("blk.0.ffn_up.bias")}
"""Biases, where the first block has them."""
