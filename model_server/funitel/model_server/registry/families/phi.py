"""Rows of Phi and StableLM."""

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, BIASES, LAYER
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import (
    ArchitectureRow,
    activation,
    first,
    rotary,
    row,
    when,
    windows,
)
from funitel.model_server.registry.rules.scaling import scaled_twice
from funitel.model_server.spec.model_spec import ExpertScore, QkNorm

ROWS: dict[str, ArchitectureRow] = {
    "PhimoeForCausalLM": row(
        **LAYER,
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_head_bias=first("lm_head_bias", default=False),
        sliding_windows=windows(),
        rotary=scaled_twice,
        experts=experts(
            num_chosen=2,  # whatever the config says
            score=ExpertScore.SPARSEMIXER,
            is_normalized=False,
            scale=1.0,
            jitter=first("router_jitter_noise", default=0.01),
        ),
        names={
            "router": "layers.{i}.block_sparse_moe.gate|layers.{i}.mlp.router",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2|layers.{i}.mlp.experts.down_proj[{j}]",
        },
    ),
    "PhiForCausalLM": row(
        **LAYER,
        **BIASES,
        has_head_bias=True,
        is_parallel=True,
        is_gated=False,
        activation=activation("hidden_act", default="gelu_new"),
        rotary=rotary(part=0.5),
        qk_norm=lambda c: QkNorm.HEAD if c.get("qk_layernorm") else QkNorm.NONE,
        has_qk_norm_bias=True,
        names={
            "out": "layers.{i}.self_attn.dense",
            "q_norm": "layers.{i}.self_attn.q_layernorm",
            "k_norm": "layers.{i}.self_attn.k_layernorm",
            "mlp_norm": "",
            "up": "layers.{i}.mlp.fc1",
            "down": "layers.{i}.mlp.fc2",
            "final_norm": "final_layernorm",
        },
    ),
    "Phi3ForCausalLM": row(
        sliding_windows=windows(),
        names={"qkv": "layers.{i}.self_attn.qkv_proj", "gate_up": "layers.{i}.mlp.gate_up_proj"},
    ),
    "StableLmForCausalLM": row(
        **LAYER,
        norm_eps=first("layer_norm_eps", default=1e-5),
        has_qkv_bias=first("use_qkv_bias", default=False),
        is_parallel=first("use_parallel_residual", default=False),
        rotary=rotary(part=0.25),
        qk_norm=lambda c: QkNorm.EACH if c.get("qk_layernorm") else QkNorm.NONE,
        names={
            "q_norm": "layers.{i}.self_attn.q_layernorm.norms.{j}",
            "k_norm": "layers.{i}.self_attn.k_layernorm.norms.{j}",
            "mlp_norm": when(first("use_parallel_residual", default=False), "", "layers.{i}.post_attention_layernorm"),
        },
    ),
}
