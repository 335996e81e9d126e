"""Rows of Qwen."""

from funitel.model_server.registry.rules.asked_windows import LATER_WINDOWS, asked_windows
from funitel.model_server.registry.rules.common import ATTENTION_BIASES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import ArchitectureRow, first, rotary, row, when, windows
from funitel.model_server.spec.model_spec import QkNorm

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
}
