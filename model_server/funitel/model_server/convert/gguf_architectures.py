"""The table of GGUF architectures: each one's metadata as a Hugging Face configuration. A family is a row.

Names of tensors are in no row: what a tensor is for has one name in every GGUF (`ROLES`), and the family's ModelSpec
says what its checkpoints call the same thing.
Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and what llama.cpp's converter writes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from funitel.model_server.convert.gguf_reader import GgufFile
from funitel.proto.errors import UnsupportedModel, WeightsError

Rule = Callable[[GgufFile], Any]  # reads one setting off a file's metadata

# GGUF's name of a tensor -> the field of TensorNames for the same thing; `#` is the number of the block.
ROLES: Mapping[str, str] = {
    "token_embd": "embedding",
    "token_embd_norm": "embedding_norm",
    "position_embd": "positions",
    "blk.#.attn_norm": "attention_norm",
    "blk.#.post_attention_norm": "attention_post_norm",
    "blk.#.attn_q": "q",
    "blk.#.attn_k": "k",
    "blk.#.attn_v": "v",
    "blk.#.attn_qkv": "qkv",
    "blk.#.attn_q_a": "q_down",
    "blk.#.attn_q_a_norm": "q_latent_norm",
    "blk.#.attn_q_b": "q_up",
    "blk.#.attn_kv_a_mqa": "kv_down",
    "blk.#.attn_kv_a_norm": "kv_latent_norm",
    "blk.#.attn_kv_b": "kv_up",
    "blk.#.attn_q_norm": "q_norm",
    "blk.#.attn_k_norm": "k_norm",
    "blk.#.attn_output": "out",
    "blk.#.ffn_norm": "mlp_norm",
    "blk.#.post_ffw_norm": "mlp_post_norm",
    "blk.#.ffn_gate": "gate",
    "blk.#.ffn_up": "up",
    "blk.#.ffn_down": "down",
    "blk.#.ffn_gate_inp": "router",
    "blk.#.exp_probs_b": "router_correction",
    "blk.#.ffn_gate_exps": "expert_gate",
    "blk.#.ffn_up_exps": "expert_up",
    "blk.#.ffn_down_exps": "expert_down",
    "blk.#.ffn_gate_shexp": "shared_gate",
    "blk.#.ffn_up_shexp": "shared_up",
    "blk.#.ffn_down_shexp": "shared_down",
    "blk.#.ffn_gate_inp_shexp": "shared_share",
    "output_norm": "final_norm",
    "output": "head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face one.

    `settings` are those of config.json, each a value or a rule. In the files of a `is_permuted` architecture, the rows
    of each head of queries and keys lie as a rotary embedding of neighbours wants them, where Hugging Face's rotates
    halves. `factors` are tensors that the settings are read from. `roles` are those that differ from `ROLES`, empty
    for a tensor that it has not.
    """

    hf_class: str
    settings: Mapping[str, Any]
    is_permuted: bool = False
    factors: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    def config(self, gguf: GgufFile) -> dict[str, Any]:
        """The settings as `gguf` has them."""
        return {key: rule(gguf) if callable(rule) else rule for key, rule in self.settings.items()}


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


def _turning_part(gguf: GgufFile) -> float:
    """The share of a head that turns."""
    size = head_dim(gguf)
    return gguf.integer(gguf.key("rope.dimension_count"), size) / max(size, 1)


def find_architecture(gguf: GgufFile) -> Architecture:
    """The row for a file: by its architecture, a Llama's by whether it has experts, DeepSeek's by their scores.

    Raises:
        UnsupportedModel: there is none.
    """
    name = gguf.architecture
    if name == "llama" and gguf.integer(gguf.key("expert_count"), 0):
        return MIXTRAL
    if name == "deepseek2":
        _check_latent(gguf)
        if gguf.integer(gguf.key("expert_gating_func"), _SOFTMAX) == _SIGMOID:
            return DEEPSEEK3
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{gguf.path}: architecture {name} is not supported; supported: {supported}")
    return ARCHITECTURES[name]


def _dense(gguf: GgufFile) -> str:
    """The activation of gated MLPs, once there are no experts."""
    num_experts = gguf.integer(gguf.key("expert_count"), 0)
    if num_experts:
        raise UnsupportedModel(f"{gguf.path}: {gguf.architecture} with {num_experts} experts is not supported")
    return "silu"


def _check_latent(gguf: GgufFile) -> None:
    """Refuse a file that has the parts of one matrix apart, each of its heads turned round."""
    if "blk.0.attn_kv_b.weight" not in gguf.tensors and "blk.0.attn_k_b.weight" in gguf.tensors:
        message = "has attn_k_b and attn_v_b, which are not supported; a file with attn_kv_b is"
        raise UnsupportedModel(f"{gguf.path}: {message}")


def _own_layers(gguf: GgufFile) -> int:
    """Layers without those behind them, which predict tokens beyond the next."""
    return gguf.integer(gguf.key("block_count")) - gguf.integer(gguf.key("nextn_predict_layers"), 0)


def _scored_by(number: int) -> Rule:
    """Whether the weights of the chosen experts are normalised, once their scores are of one kind."""

    def read(gguf: GgufFile) -> bool:
        found = gguf.integer(gguf.key("expert_gating_func"), number)
        if found != number:
            raise UnsupportedModel(f"{gguf.path}: expert_gating_func {found} is not supported; supported: {number}")
        return gguf.flag(gguf.key("expert_weights_norm"), number == _SIGMOID)

    return read


def _latent_size(name: str) -> Rule:
    """The size of a head's keys or values; newer files have that of the vector that is cached under the older name."""
    return lambda gguf: gguf.integer(gguf.key(f"attention.{name}_mla"), gguf.integer(gguf.key(f"attention.{name}")))


def _latent_scaling(gguf: GgufFile) -> dict[str, object] | None:
    """Yarn that stretches scores too. The file has one factor, for both of the equal ones of every published model."""
    scaling = rope_scaling(gguf)
    if scaling is not None and gguf.has(gguf.key("rope.scaling.yarn_log_multiplier")):
        stretch = round(10 * gguf.number(gguf.key("rope.scaling.yarn_log_multiplier")), 6)
        scaling |= {"mscale": stretch, "mscale_all_dim": stretch}
    return scaling


def rope_theta(gguf: GgufFile) -> float:
    """Base of the rotary frequencies."""
    return gguf.number(gguf.key("rope.freq_base"), 10000.0)


def rope_scaling(gguf: GgufFile) -> dict[str, object] | None:
    """How the rotary positions of a longer context are made of those trained."""
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf)
    kind = gguf.text(gguf.key("rope.scaling.type"), "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{gguf.path}: rope scaling {kind} is not supported; supported: linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": gguf.number(gguf.key("rope.scaling.factor"))}
    if kind == "yarn":
        original = gguf.integer(gguf.key("rope.scaling.original_context_length"))
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(gguf: GgufFile) -> dict[str, object]:
    """Find Llama 3's scaling again: the file holds only its outcome, a divisor for each rotary frequency.

    Every published Llama 3 has these bounds; a file with divisors that they do not explain is refused.
    Source: `_compute_llama3_parameters` of transformers.
    """
    low, high, original = 1.0, 4.0, 8192
    divisors = gguf.dequantise("rope_freqs.weight")  # [head_dim / 2]
    factor = float(divisors.max())
    exponents = np.arange(len(divisors)) / len(divisors)
    turns = original / (2 * math.pi * rope_theta(gguf) ** exponents)  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnsupportedModel(f"{gguf.path}: the factors in rope_freqs.weight are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope_scaling(gguf: GgufFile) -> dict[str, object] | None:
    """Phi-3's two lists of factors, where the file has them."""
    if not any(name in gguf.tensors for name in _LONGROPE):
        return rope_scaling(gguf)
    if missing := [name for name in _LONGROPE if name not in gguf.tensors]:
        raise WeightsError(f"{gguf.path}: tensor {missing[0]} is missing")
    short, long = (gguf.dequantise(name).tolist() for name in _LONGROPE)
    return {"type": "longrope", "short_factor": short, "long_factor": long}


def _expansion(gguf: GgufFile) -> int:
    """How many times the hidden size an MLP has units."""
    units, size = (gguf.integer(gguf.key(name)) for name in ("feed_forward_length", "embedding_length"))
    if size < 1 or units % size:
        raise UnsupportedModel(f"{gguf.path}: feed_forward_length {units} is no multiple of embedding_length {size}")
    return units // size


def _gemma_query_scalar(num_layers: int) -> Rule:
    """What Gemma's scores are divided by the root of. The file does not say: the size tells, as it does llama.cpp."""

    def read(gguf: GgufFile) -> int:
        is_largest = gguf.integer(gguf.key("block_count")) == num_layers
        return gguf.integer(gguf.key("embedding_length")) // num_heads(gguf) if is_largest else head_dim(gguf)

    return read


_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_FACTORS = ("rope_freqs.weight",)
_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_SIZES: dict[str, Any] = {
    "hidden_size": integer("embedding_length"),
    "intermediate_size": integer("feed_forward_length"),
    "num_hidden_layers": integer("block_count"),
    "num_attention_heads": num_heads,
    "num_key_value_heads": num_kv_heads,
    "max_position_embeddings": integer("context_length"),
}
_RMS = {"rms_norm_eps": number("attention.layer_norm_rms_epsilon")}
_LAYER = {"layer_norm_eps": number("attention.layer_norm_epsilon")}
_WHOLE_ROPE: dict[str, Any] = {"head_dim": _whole_head_dim, "rope_theta": rope_theta, "rope_scaling": rope_scaling}
_PART_ROPE: dict[str, Any] = {
    "head_dim": head_dim,
    "rope_theta": rope_theta,
    "rope_scaling": rope_scaling,
    "partial_rotary_factor": _turning_part,
}
_MODERN: dict[str, Any] = _SIZES | _RMS | _WHOLE_ROPE | {"hidden_act": _dense}
_BIASES: dict[str, Any] = {"attention_bias": holds("blk.0.attn_q.bias"), "mlp_bias": holds("blk.0.ffn_up.bias")}
_LLAMA = _MODERN | _BIASES | {"model_type": "llama"}
_EXPERTS: dict[str, Any] = (
    _SIZES
    | _RMS
    | _WHOLE_ROPE
    | {
        "hidden_act": "silu",
        "num_experts": integer("expert_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
_GEMMA = _SIZES | _RMS | _WHOLE_ROPE | {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_GPT: dict[str, Any] = {
    "n_embd": integer("embedding_length"),
    "n_inner": integer("feed_forward_length"),
    "n_layer": integer("block_count"),
    "n_head": num_heads,
    "n_positions": integer("context_length"),
    "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
}

_SHARED_EXPERTS: dict[str, Any] = {
    "hidden_act": "silu",
    "n_routed_experts": integer("expert_count"),
    "num_experts_per_tok": integer("expert_used_count"),
    "moe_intermediate_size": integer("expert_feed_forward_length"),
    "n_shared_experts": integer("expert_shared_count", 0),
    "first_k_dense_replace": integer("leading_dense_block_count", 0),
    "routed_scaling_factor": number("expert_weights_scale", 1.0),
    "n_group": integer("expert_group_count", 1),
    "topk_group": integer("expert_group_used_count", 1),
    "moe_layer_freq": 1,
}
_DEEPSEEK: dict[str, Any] = (
    _SIZES
    | _RMS
    | _SHARED_EXPERTS
    | {
        "num_key_value_heads": num_heads,
        "num_hidden_layers": _own_layers,
        "attention_bias": False,
        "q_lora_rank": lambda gguf: gguf.integer(gguf.key("attention.q_lora_rank"), 0) or None,
        "kv_lora_rank": integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": integer("rope.dimension_count"),
        "qk_nope_head_dim": lambda gguf: (
            _latent_size("key_length")(gguf) - gguf.integer(gguf.key("rope.dimension_count"))
        ),
        "v_head_dim": _latent_size("value_length"),
        "rope_theta": rope_theta,
        "rope_scaling": _latent_scaling,
    }
)

MIXTRAL = Architecture(
    hf_class="MixtralForCausalLM",
    settings=_EXPERTS | {"model_type": "mixtral", "num_local_experts": integer("expert_count"), "sliding_window": None},
    is_permuted=True,
)
"""What is called a Llama too."""

DEEPSEEK3 = Architecture(
    hf_class="DeepseekV3ForCausalLM",
    settings=_DEEPSEEK
    | {
        "model_type": "deepseek_v3",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": _scored_by(_SIGMOID),
    },
)
"""What is called a deepseek2 too."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(hf_class="LlamaForCausalLM", settings=_LLAMA, is_permuted=True, factors=_FACTORS),
    "qwen2": Architecture(
        hf_class="Qwen2ForCausalLM", settings=_MODERN | {"model_type": "qwen2", "use_sliding_window": False}
    ),
    "qwen3": Architecture(
        hf_class="Qwen3ForCausalLM",
        settings=_MODERN | {"model_type": "qwen3", "attention_bias": False, "use_sliding_window": False},
    ),
    "qwen2moe": Architecture(
        hf_class="Qwen2MoeForCausalLM",
        settings=_EXPERTS
        | {
            "model_type": "qwen2_moe",
            "use_sliding_window": False,
            "moe_intermediate_size": integer("expert_feed_forward_length"),
            "shared_expert_intermediate_size": integer("expert_shared_feed_forward_length"),
            "norm_topk_prob": False,
        },
    ),
    "qwen3moe": Architecture(
        hf_class="Qwen3MoeForCausalLM",
        settings=_EXPERTS
        | {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "use_sliding_window": False,
            "moe_intermediate_size": integer("expert_feed_forward_length"),
            "norm_topk_prob": True,
        },
    ),
    "olmoe": Architecture(
        hf_class="OlmoeForCausalLM",
        settings=_EXPERTS | {"model_type": "olmoe", "attention_bias": False, "norm_topk_prob": False, "clip_qkv": None},
    ),
    "gemma": Architecture(hf_class="GemmaForCausalLM", settings=_GEMMA | {"model_type": "gemma"}),
    "gemma2": Architecture(
        hf_class="Gemma2ForCausalLM",
        settings=_GEMMA
        | {
            "model_type": "gemma2",
            "query_pre_attn_scalar": _gemma_query_scalar(46),
            "attn_logit_softcapping": number("attn_logit_softcapping"),
            "final_logit_softcapping": number("final_logit_softcapping"),
            "sliding_window": integer("attention.sliding_window"),
        },
    ),
    "gemma3": Architecture(
        hf_class="Gemma3ForCausalLM",
        settings=_GEMMA
        | {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": _gemma_query_scalar(62),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": optional("final_logit_softcapping"),
            "sliding_window": integer("attention.sliding_window"),
            "sliding_window_pattern": integer("attention.sliding_window_pattern", 6),
            "rope_theta": number("rope.freq_base", 1e6),
            "rope_local_base_freq": number("rope.freq_base_swa", 1e4),
        },
    ),
    "phi2": Architecture(
        hf_class="PhiForCausalLM",
        settings=_SIZES | _LAYER | _PART_ROPE | {"model_type": "phi", "hidden_act": "gelu_new", "qk_layernorm": False},
    ),
    "phi3": Architecture(
        hf_class="Phi3ForCausalLM",
        settings=_MODERN
        | {
            "model_type": "phi3",
            "head_dim": head_dim,
            "partial_rotary_factor": _turning_part,
            "rope_scaling": _longrope_scaling,
            "original_max_position_embeddings": integer("rope.scaling.original_context_length", 4096),
            "sliding_window": lambda gguf: gguf.integer(gguf.key("attention.sliding_window"), 0) or None,
        },
        factors=_LONGROPE,
    ),
    "gpt2": Architecture(
        hf_class="GPT2LMHeadModel", settings=_GPT | {"model_type": "gpt2", "activation_function": "gelu_new"}
    ),
    "starcoder": Architecture(
        hf_class="GPTBigCodeForCausalLM",
        settings=_GPT
        | {
            "model_type": "gpt_bigcode",
            "activation_function": "gelu_pytorch_tanh",
            "multi_query": lambda gguf: num_kv_heads(gguf) == 1,
        },
    ),
    "starcoder2": Architecture(
        hf_class="Starcoder2ForCausalLM",
        settings=_SIZES
        | _WHOLE_ROPE
        | {
            "model_type": "starcoder2",
            "norm_epsilon": number("attention.layer_norm_epsilon"),
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": holds("blk.0.attn_q.bias"),
        },
    ),
    "gptneox": Architecture(
        hf_class="GPTNeoXForCausalLM",
        settings=_SIZES
        | _LAYER
        | {
            "model_type": "gpt_neox",
            "hidden_act": "gelu",
            "rotary_pct": _turning_part,
            "rotary_emb_base": rope_theta,
            "rope_scaling": rope_scaling,
            "attention_bias": holds("blk.0.attn_qkv.bias"),
            "use_parallel_residual": lambda gguf: gguf.flag(gguf.key("use_parallel_residual"), True),
        },
    ),
    "bloom": Architecture(
        hf_class="BloomForCausalLM",
        settings={
            "model_type": "bloom",
            "hidden_size": integer("embedding_length"),
            "n_layer": integer("block_count"),
            "n_head": num_heads,
            "seq_length": integer("context_length"),
            "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
        },
    ),
    "stablelm": Architecture(
        hf_class="StableLmForCausalLM",
        settings=_SIZES
        | _LAYER
        | _PART_ROPE
        | {
            "model_type": "stablelm",
            "hidden_act": _dense,
            "use_qkv_bias": holds("blk.0.attn_q.bias"),
            "use_parallel_residual": lambda gguf: "blk.0.ffn_norm.weight" not in gguf.tensors,
            "qk_layernorm": False,
        },
    ),
    "olmo": Architecture(
        hf_class="OlmoForCausalLM",
        settings=_SIZES
        | _WHOLE_ROPE
        | {
            "model_type": "olmo",
            "hidden_act": _dense,
            "attention_bias": False,
            "clip_qkv": optional("attention.clamp_kqv"),
        },
        is_permuted=True,
    ),
    "olmo2": Architecture(
        hf_class="Olmo2ForCausalLM", settings=_MODERN | {"model_type": "olmo2", "attention_bias": False}
    ),
    "command-r": Architecture(
        hf_class="CohereForCausalLM",
        settings=_SIZES
        | _LAYER
        | _WHOLE_ROPE
        | {
            "model_type": "cohere",
            "hidden_act": _dense,
            "attention_bias": False,
            "logit_scale": number("logit_scale"),
            "use_qk_norm": False,
        },
    ),
    "granite": Architecture(
        hf_class="GraniteForCausalLM",
        settings=_MODERN
        | _BIASES
        | {
            "model_type": "granite",
            "embedding_multiplier": number("embedding_scale"),
            "residual_multiplier": number("residual_scale"),
            "attention_multiplier": number("attention.scale"),
            "logits_scaling": number("logit_scale"),
        },
        is_permuted=True,
        factors=_FACTORS,
    ),
    "granitemoe": Architecture(
        hf_class="GraniteMoeForCausalLM",
        settings=_EXPERTS
        | {
            "model_type": "granitemoe",
            "attention_bias": False,
            "num_local_experts": integer("expert_count"),
            "embedding_multiplier": number("embedding_scale"),
            "residual_multiplier": number("residual_scale"),
            "attention_multiplier": number("attention.scale"),
            "logits_scaling": number("logit_scale"),
        },
        is_permuted=True,
        factors=_FACTORS,
    ),
    "minicpm": Architecture(  # the same arithmetic under other names; older files leave out the first model's values
        hf_class="GraniteForCausalLM",
        settings=_MODERN
        | _BIASES
        | {
            "model_type": "granite",
            "embedding_multiplier": number("embedding_scale", 12.0),
            "residual_multiplier": lambda gguf: gguf.number(
                gguf.key("residual_scale"), 1.4 / max(gguf.integer(gguf.key("block_count")), 1) ** 0.5
            ),
            "attention_multiplier": lambda gguf: max(head_dim(gguf), 1) ** -0.5,
            "logits_scaling": lambda gguf: gguf.number(
                gguf.key("logit_scale"), gguf.integer(gguf.key("embedding_length")) / 256
            ),
        },
        is_permuted=True,
        factors=_FACTORS,
    ),
    "smollm3": Architecture(
        hf_class="SmolLM3ForCausalLM",
        settings=_MODERN | _BIASES | {"model_type": "smollm3", "no_rope_layer_interval": 4},
        is_permuted=True,
        factors=_FACTORS,
    ),
    "mpt": Architecture(
        hf_class="MptForCausalLM",
        settings={
            "model_type": "mpt",
            "d_model": integer("embedding_length"),
            "n_layers": integer("block_count"),
            "n_heads": num_heads,
            "max_seq_len": integer("context_length"),
            "expansion_ratio": _expansion,
            "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
            "attn_config": lambda gguf: {
                "alibi_bias_max": gguf.number(gguf.key("attention.max_alibi_bias")),
                "clip_qkv": optional("attention.clamp_kqv")(gguf),
            },
        },
    ),
    "qwen": Architecture(
        hf_class="QWenLMHeadModel",
        settings={
            "model_type": "qwen",
            "hidden_size": integer("embedding_length"),
            "intermediate_size": integer("feed_forward_length"),  # twice the units of the MLP, as config.json has it
            "num_hidden_layers": integer("block_count"),
            "num_attention_heads": num_heads,
            "kv_channels": head_dim,
            "seq_length": integer("context_length"),
            "layer_norm_epsilon": number("attention.layer_norm_rms_epsilon"),
            "rotary_emb_base": rope_theta,
            "no_bias": True,
        },
    ),
    "chatglm": Architecture(
        hf_class="ChatGLMModel",
        settings={
            "model_type": "chatglm",
            "hidden_size": integer("embedding_length"),
            "ffn_hidden_size": integer("feed_forward_length"),
            "num_layers": integer("block_count"),
            "num_attention_heads": num_heads,
            "kv_channels": lambda gguf: gguf.integer(gguf.key("embedding_length")) // num_heads(gguf),
            "multi_query_attention": True,
            "multi_query_group_num": num_kv_heads,
            "seq_length": integer("context_length"),
            "layernorm_epsilon": number("attention.layer_norm_rms_epsilon"),
            "add_qkv_bias": holds("blk.0.attn_qkv.bias"),
            "add_bias_linear": False,
            "rope_ratio": lambda gguf: rope_theta(gguf) / 1e4,
        },
    ),
    "glm4": Architecture(
        hf_class="Glm4ForCausalLM",
        settings=_SIZES
        | _RMS
        | _PART_ROPE
        | {"model_type": "glm4", "hidden_act": "silu", "attention_bias": holds("blk.0.attn_q.bias")},
    ),
    "glm4moe": Architecture(
        hf_class="Glm4MoeForCausalLM",
        settings=_SIZES
        | _RMS
        | _PART_ROPE
        | _SHARED_EXPERTS
        | {
            "model_type": "glm4_moe",
            "num_hidden_layers": _own_layers,
            "attention_bias": holds("blk.0.attn_q.bias"),
            "use_qk_norm": holds("blk.0.attn_q_norm.weight"),
            "norm_topk_prob": _scored_by(_SIGMOID),
        },
        roles={"blk.#.post_attention_norm": "mlp_norm", "blk.#.ffn_norm": ""},
    ),
    "deepseek2": Architecture(
        hf_class="DeepseekV2ForCausalLM",
        settings=_DEEPSEEK
        | {
            "model_type": "deepseek_v2",
            "scoring_func": "softmax",
            "topk_method": lambda gguf: (
                "group_limited_greedy" if gguf.integer(gguf.key("expert_group_count"), 1) > 1 else "greedy"
            ),
            "norm_topk_prob": _scored_by(_SOFTMAX),
        },
    ),
    "internlm2": Architecture(hf_class="LlamaForCausalLM", settings=_LLAMA, is_permuted=True, factors=_FACTORS),
}
