"""Tiny configurations of families of which some layers keep a state: name -> transformers' kind, and its fields.

They are added to those that all checkpoints of the zoo have: in most three layers, the second of which attends.
"""

from collections.abc import Mapping
from typing import Any

NUM_LAYERS = 3
_LAYERS: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 25}
# Three key heads, so that two ranks get two and one.
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 10,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 28,
}

HYBRIDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _LAYERS | _SHARED | _DELTA | {"head_dim": 16, "mlp_only_layers": [2]}),
    "qwen3_next_biased": (
        "Qwen3Next",
        _LAYERS | _SHARED | _DELTA | {"head_dim": 16, "attention_bias": True, "linear_num_key_heads": 1},
    ),
    "qwen3_5": ("Qwen3_5Text", _LAYERS | _DELTA | {"head_dim": 16, "rope_parameters": None}),
    # two layers: with three, transformers' own logits differ by 1e-4 between steps and one forward
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        _SHARED
        | _DELTA
        | {"head_dim": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "lfm2": (
        "Lfm2",
        {"num_hidden_layers": NUM_LAYERS, "layer_types": ["conv", "full_attention", "conv"]}
        | {"conv_bias": True, "block_multiple_of": 10},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        _EXPERTS
        | {"num_hidden_layers": NUM_LAYERS, "layer_types": ["conv", "full_attention", "conv"]}
        | {"num_dense_layers": 1, "conv_L_cache": 4, "routed_scaling_factor": 1.7},
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        _LAYERS | _MAMBA2 | _GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 22},
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybrid",
        _LAYERS
        | _MAMBA2
        | _GRANITE
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 3, "mamba_proj_bias": True},
    ),
    "bamba": (
        "Bamba",
        _MAMBA2
        | {"num_hidden_layers": NUM_LAYERS, "attn_layer_indices": [1], "mamba_n_groups": 2, "attention_bias": True}
        | {"mamba_conv_bias": False, "head_dim": 16},
    ),
    # transformers cuts the convolution into three equal parts where it saves a model: as many keys as values
    "nemotron_h": (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]}
        | {"head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 12, "ssm_state_size": 10, "n_groups": 3}
        | {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
        | {"moe_shared_expert_intermediate_size": 25, "mlp_bias": True, "n_group": 3, "topk_group": 2, "chunk_size": 16}
        | {"routed_scaling_factor": 1.7, "use_bias": True},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        _LAYERS
        | _DELTA
        | {"linear_value_head_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "olmo_hybrid_rope": (
        "OlmoHybrid",
        _LAYERS | _DELTA | {"linear_value_head_dim": 4, "linear_allow_neg_eigval": False},
    ),
    "falcon_h1": (
        "FalconH1",
        _MAMBA2
        | {"mamba_d_ssm": 96, "mamba_n_groups": 2, "mamba_rms_norm": False, "projectors_bias": True, "head_dim": 16}
        | {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.6}
        | {"mlp_multipliers": [0.8, 0.4], "ssm_multipliers": [0.5, 0.9, 1.2, 0.7, 0.3]}
        | {"attention_in_multiplier": 0.7, "attention_out_multiplier": 0.8}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.4},
    ),
    "falcon_h1_normed": (
        "FalconH1",
        _MAMBA2
        | {"mamba_n_heads": 3, "mamba_d_head": 32, "mamba_d_ssm": None, "mamba_n_groups": 3, "mamba_rms_norm": True}
        | {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "falcon_h1_gated_first": (
        "FalconH1",
        _MAMBA2 | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "kimi_linear": (
        "KimiLinear",
        _LAYERS
        | {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
        | {"linear_head_dim": 12, "linear_num_heads": 3, "num_local_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 20, "n_group": 3, "topk_group": 2, "num_key_value_heads": 6},
    ),
    "mamba2": (
        "Mamba2",
        {"num_hidden_layers": NUM_LAYERS, "num_heads": 6, "head_dim": 16, "state_size": 10, "n_groups": 3}
        | {"chunk_size": 16, "use_bias": True, "tie_word_embeddings": False},
    ),
    "mamba": ("Mamba", {"num_hidden_layers": NUM_LAYERS, "state_size": 5, "use_bias": True, "use_conv_bias": False}),
    "falcon_mamba": ("FalconMamba", {"num_hidden_layers": NUM_LAYERS, "state_size": 5, "time_step_rank": 7}),
    "jamba": (
        "Jamba",
        {"num_hidden_layers": NUM_LAYERS, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4}
        | {"num_experts_per_tok": 2, "mamba_d_state": 5, "mamba_dt_rank": 4, "mamba_proj_bias": True},
    ),
    # the first layer attends: transformers takes from it how many tokens there were before a step
    "minimax": (
        "MiniMax",
        {"num_hidden_layers": NUM_LAYERS, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "block_size": 16}
        | {"full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.2}
        | {"linear_attn_beta_factor": 0.3, "mlp_alpha_factor": 0.9, "mlp_beta_factor": 0.7},
    ),
}
