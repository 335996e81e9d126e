"""Rows of the table of GGUF architectures with experts."""

from typing import Any

from funitel.model_server.convert.gguf_reader import GgufFile
from funitel.model_server.convert.gguf_rope_rules import FACTORS, rope_scaling, rope_theta
from funitel.model_server.convert.gguf_row import Architecture, Rule
from funitel.model_server.convert.gguf_rules import (
    PART_ROPE,
    RMS,
    SIZES,
    WHOLE_ROPE,
    holds,
    integer,
    num_heads,
    number,
    own_layers,
)
from funitel.proto.errors import UnsupportedModel


def _scored_by(number: int) -> Rule:
    """Whether the weights of the chosen experts are normalised, once their scores are of one kind."""

    def read(gguf: GgufFile) -> bool:
        found = gguf.integer(gguf.key("expert_gating_func"), number)
        if found != number:
            raise UnsupportedModel(f"{gguf.path}: expert_gating_func {found} is not supported; supported: {number}")
        return gguf.flag(gguf.key("expert_weights_norm"), number == SIGMOID)

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


SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
_EXPERTS: dict[str, Any] = (
    SIZES
    | RMS
    | WHOLE_ROPE
    | {
        "hidden_act": "silu",
        "num_experts": integer("expert_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
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
    SIZES
    | RMS
    | _SHARED_EXPERTS
    | {
        "num_key_value_heads": num_heads,
        "num_hidden_layers": own_layers,
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
        "norm_topk_prob": _scored_by(SIGMOID),
    },
)
"""What is called a deepseek2 too."""

EXPERT_ROWS: dict[str, Architecture] = {
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
        factors=FACTORS,
    ),
    "glm4moe": Architecture(
        hf_class="Glm4MoeForCausalLM",
        settings=SIZES
        | RMS
        | PART_ROPE
        | _SHARED_EXPERTS
        | {
            "model_type": "glm4_moe",
            "num_hidden_layers": own_layers,
            "attention_bias": holds("blk.0.attn_q.bias"),
            "use_qk_norm": holds("blk.0.attn_q_norm.weight"),
            "norm_topk_prob": _scored_by(SIGMOID),
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
            "norm_topk_prob": _scored_by(SOFTMAX),
        },
    ),
}
