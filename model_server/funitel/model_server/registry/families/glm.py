"""Rows of GLM."""

from funitel.model_server.registry.rules.common import ATTENTION_BIAS
from funitel.model_server.registry.rules.experts import CORRECTED, CORRECTED_NAMES, dense_by_kind, experts
from funitel.model_server.registry.rules.latent import DEEPSEEK
from funitel.model_server.registry.rules.row import NUM_HEADS, ArchitectureRow, first, rotary, row, when
from funitel.model_server.spec.model_spec import Norm, NormPlacement, QkNorm

ROWS: dict[str, ArchitectureRow] = {
    "Glm4MoeLiteForCausalLM": row(
        **DEEPSEEK,
        norm_eps=first("rms_norm_eps", default=1e-5),
        experts=experts(
            **CORRECTED,
            dense_layers=dense_by_kind(1),
            scale=lambda c: float(c.get("routed_scaling_factor", 1.8)),
            shared_size=lambda c: c.get("n_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=CORRECTED_NAMES,
    ),
    "ChatGLMModel": row(
        vocab_size=first("padded_vocab_size", "vocab_size"),
        num_kv_heads=lambda c: c["multi_query_group_num"] if c.get("multi_query_attention") else NUM_HEADS(c),
        intermediate_size=first("ffn_hidden_size"),
        max_position_embeddings=first("seq_length"),
        norm=lambda c: Norm.RMS if c.get("rmsnorm", True) else Norm.LAYER,
        has_norm_bias=lambda c: not c.get("rmsnorm", True),
        norm_eps=first("layernorm_epsilon", default=1e-5),
        has_qkv_bias=lambda c: bool(c.get("add_qkv_bias") or c.get("add_bias_linear")),
        has_out_bias=first("add_bias_linear", default=False),
        has_mlp_bias=first("add_bias_linear", default=False),
        rotary=lambda c: rotary(base=1e4 * c.get("rope_ratio", 1), part=0.5, is_interleaved=True)(c),
        names={
            "prefix": "transformer.",
            "embedding": "embedding.word_embeddings",
            "attention_norm": "encoder.layers.{i}.input_layernorm",
            "qkv": "encoder.layers.{i}.self_attention.query_key_value",
            "out": "encoder.layers.{i}.self_attention.dense",
            "mlp_norm": "encoder.layers.{i}.post_attention_layernorm",
            "gate_up": "encoder.layers.{i}.mlp.dense_h_to_4h",
            "down": "encoder.layers.{i}.mlp.dense_4h_to_h",
            "final_norm": "encoder.final_layernorm",
            "head": "transformer.output_layer",
            "ignored": (r"rotary_pos_emb\.inv_freq$",),
        },
        fixed={"apply_residual_connection_post_layernorm": False, "post_layer_norm": True, "original_rope": True},
    ),
    "GlmForCausalLM": row(
        has_qkv_bias=ATTENTION_BIAS,
        rotary=rotary(part=0.5, is_interleaved=True),
        names={"gate_up": "layers.{i}.mlp.gate_up_proj"},
    ),
    "Glm4ForCausalLM": row(
        has_qkv_bias=ATTENTION_BIAS,
        norm_placement=NormPlacement.BOTH,
        rotary=rotary(part=0.5, is_interleaved=True),
        names={
            "attention_post_norm": "layers.{i}.post_self_attn_layernorm",
            "mlp_post_norm": "layers.{i}.post_mlp_layernorm",
            "gate_up": "layers.{i}.mlp.gate_up_proj",
        },
    ),
    "Glm4MoeForCausalLM": row(
        has_qkv_bias=ATTENTION_BIAS,
        norm_eps=first("rms_norm_eps", default=1e-5),
        rotary=rotary(part=0.5),
        qk_norm=when(first("use_qk_norm", default=False), QkNorm.HEAD, QkNorm.NONE),
        experts=experts(**CORRECTED),
        names=CORRECTED_NAMES,
    ),
}
ROWS["ChatGLMForConditionalGeneration"] = ROWS["ChatGLMModel"]
