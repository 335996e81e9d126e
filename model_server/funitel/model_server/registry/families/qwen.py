"""Rows of Qwen."""

from typing import Any

from funitel.model_server.registry.rules.asked_windows import LATER_WINDOWS, asked_windows
from funitel.model_server.registry.rules.common import ATTENTION_BIASES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import ArchitectureRow, Config, first, rotary, row, when, windows
from funitel.model_server.registry.rules.states import layers_of, mixer, spaced, states
from funitel.model_server.spec.model_spec import QkNorm
from funitel.model_server.spec.state_layers import DeltaNetSpec


def _delta_net(config: Config) -> DeltaNetSpec:
    return DeltaNetSpec(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_width=config["linear_conv_kernel_dim"],
    )


# Qwen3-Next and 3.5: gates of attention lie with the queries, norms but those of gated heads are stored less 1.
_QWEN: dict[str, Any] = ATTENTION_BIASES | {
    "norm_offset": 1.0,
    "qk_norm": QkNorm.HEAD,
    "has_output_gate": True,
    "rotary": rotary(part=0.25),
    **states(layers_of("linear_attention", spaced(4)), delta_net=_delta_net),
}
_QWEN_NAMES: dict[str, Any] = {
    "is_gate_in_q": True,
    "ignored": (r"rotary_emb\.inv_freq$", r"^mtp\."),
    **mixer("layers.{i}.linear_attn", conv="conv1d", decay="A_log", step_bias="dt_bias", norm="norm", out="out_proj"),
}
_QWEN_PACKED = mixer("layers.{i}.linear_attn", qkvz="in_proj_qkvz", ba="in_proj_ba")
_QWEN_APART = mixer(
    "layers.{i}.linear_attn", **{"in": "in_proj_qkv"}, gate="in_proj_z", beta="in_proj_b", step="in_proj_a"
)
_QWEN_SHARED = {
    "shared_gate": "layers.{i}.mlp.shared_expert.gate_proj",
    "shared_up": "layers.{i}.mlp.shared_expert.up_proj",
    "shared_down": "layers.{i}.mlp.shared_expert.down_proj",
    "shared_share": "layers.{i}.mlp.shared_expert_gate",
}
_SHARED_UNITS = first("shared_expert_intermediate_size")


ROWS: dict[str, ArchitectureRow] = {
    "Qwen2ForCausalLM": row(has_qkv_bias=True, sliding_windows=LATER_WINDOWS),
    "Qwen3ForCausalLM": row(
        **ATTENTION_BIASES,
        head_dim=first("head_dim", default=128),
        qk_norm=QkNorm.HEAD,
        sliding_windows=LATER_WINDOWS,
    ),
    "Qwen2MoeForCausalLM": row(
        has_qkv_bias=first("qkv_bias", default=True),
        sliding_windows=asked_windows(lambda c, i: i % 2 == 0 and i < c["max_window_layers"]),
        experts=experts(shared_size=first("shared_expert_intermediate_size")),
        names={
            "shared_gate": "layers.{i}.mlp.shared_expert.gate_proj",
            "shared_up": "layers.{i}.mlp.shared_expert.up_proj",
            "shared_down": "layers.{i}.mlp.shared_expert.down_proj",
            "shared_share": "layers.{i}.mlp.shared_expert_gate",
        },
    ),
    "Qwen3MoeForCausalLM": row(
        **ATTENTION_BIASES,
        qk_norm=QkNorm.HEAD,
        sliding_windows=when(first("use_sliding_window", default=False), windows(), ()),
        experts=experts(),
    ),
    "QWenLMHeadModel": row(
        has_qkv_bias=True,
        intermediate_size=lambda c: c["intermediate_size"] // 2,
        max_position_embeddings=first("seq_length"),
        rotary=rotary(),
        names={
            "prefix": "transformer.",
            "embedding": "wte",
            "attention_norm": "h.{i}.ln_1",
            "qkv": "h.{i}.attn.c_attn",
            "out": "h.{i}.attn.c_proj",
            "mlp_norm": "h.{i}.ln_2",
            "gate": "h.{i}.mlp.w2",
            "up": "h.{i}.mlp.w1",
            "down": "h.{i}.mlp.c_proj",
            "final_norm": "ln_f",
            "ignored": (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$"),
        },
        fixed={"no_bias": True},
    ),
    "Qwen3NextForCausalLM": row(
        **_QWEN,
        experts=experts(is_normalized=first("norm_topk_prob", default=True), shared_size=_SHARED_UNITS),
        names=_QWEN_NAMES | _QWEN_PACKED | _QWEN_SHARED,
    ),
    "Qwen3_5ForCausalLM": row(**_QWEN, names=_QWEN_NAMES | _QWEN_APART),
    "Qwen3_5MoeForCausalLM": row(
        **_QWEN,
        intermediate_size=first("intermediate_size", "moe_intermediate_size"),
        experts=experts(is_normalized=True, shared_size=_SHARED_UNITS),
        names=_QWEN_NAMES | _QWEN_APART | _QWEN_SHARED,
    ),
}
