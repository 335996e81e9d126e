"""Rows of ERNIE, gpt-oss, MiniMax and other families of mixtures of experts."""

from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIAS, ATTENTION_BIASES, TIED, biases
from funitel.model_server.registry.rules.experts import CORRECTED, OTHER_CORRECTION, dense_by_kind, experts
from funitel.model_server.registry.rules.row import (
    NUM_HEADS,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    first,
    head_dim,
    rotary,
    row,
    windows,
)
from funitel.model_server.registry.rules.states import mixer, states
from funitel.model_server.spec.layer_spec import MultiplierSpec
from funitel.model_server.spec.model_spec import Activation, ExpertScore, NormPlacement, QkNorm
from funitel.model_server.spec.state_layers import LightningSpec

_ERNIE: dict[str, Any] = {
    **TIED,
    **biases(first("use_bias", default=False)),
    "norm_eps": first("rms_norm_eps", default=1e-5),
    "rotary": rotary(base=5e5, is_interleaved=True),
}


def _afmoe_windows(config: Config) -> tuple[int | None, ...]:
    """Windows of all layers but each so-many-th."""
    step = config.get("global_attn_every_n_layers") or 4
    found: tuple[int | None, ...] = windows(pattern=step, default=1024)(config)
    return found or (None,) * NUM_LAYERS(config)


def _ernie_dense_layers(config: Config) -> tuple[int, ...]:
    """Layers without experts: those outside a range, and within it all but each so-many-th."""
    start, step = (config.get(f"moe_layer_{name}", 1) for name in ("start_index", "interval"))
    end = config.get("moe_layer_end_index", -1)
    end = NUM_LAYERS(config) - 1 if end == -1 else end
    return tuple(i for i in range(NUM_LAYERS(config)) if (i + 1) % step or not start <= i <= end)


def _minimax_layers(config: Config) -> tuple[int, ...]:
    """Layers with lightning attention: those listed, else each second."""
    every = range(NUM_LAYERS(config))
    kinds = config.get("layer_types") or ["linear_attention" if i % 2 else "full_attention" for i in every]
    return tuple(i for i in every if kinds[i] == "linear_attention")


def _minimax_multipliers(config: Config) -> MultiplierSpec:
    def factor(name: str) -> float:
        return float(config.get(f"{name}_factor", 1.0))

    return MultiplierSpec(
        attention_residual=factor("full_attn_alpha"),
        attention_out=factor("full_attn_beta"),
        state_residual=factor("linear_attn_alpha"),
        state_out=factor("linear_attn_beta"),
        mlp_residual=factor("mlp_alpha"),
        mlp_out=factor("mlp_beta"),
    )


ROWS: dict[str, ArchitectureRow] = {
    "Ernie4_5ForCausalLM": row(**_ERNIE),
    "Ernie4_5_MoeForCausalLM": row(
        **_ERNIE,
        has_head_bias=first("use_bias", default=False),
        experts=experts(
            num_experts=first("num_experts", "moe_num_experts"),
            num_chosen=first("num_experts_per_tok", "moe_k"),
            dense_layers=_ernie_dense_layers,
            is_normalized=True,
            scale=1.0,
            shared_size=lambda c: c.get("moe_num_shared_experts", 2) * c["moe_intermediate_size"],
        ),
        names={
            "router_correction": "layers.{i}.mlp.moe_statics.e_score_correction[0].bias"
            "|layers.{i}.mlp.gate.moe_statics.e_score_correction[0].bias",
            "ignored": (r"rotary_emb\.inv_freq$", r"(^|\.)mtp_"),
        },
    ),
    "MiniMaxForCausalLM": row(
        norm_eps=first("rms_norm_eps", default=1e-5),
        norm_placement=NormPlacement.WITHIN,
        rotary=rotary(base=1e6),
        multipliers=_minimax_multipliers,
        **states(_minimax_layers, lightning=lambda c: LightningSpec(num_heads=NUM_HEADS(c), head_dim=head_dim(c))),
        experts=experts(
            intermediate_size=first("intermediate_size"), is_normalized=True, scale=1.0, shared_size=0, dense_layers=()
        ),
        names={
            "router": "layers.{i}.block_sparse_moe.gate|layers.{i}.mlp.gate",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2|layers.{i}.mlp.experts.down_proj[{j}]",
            **mixer("layers.{i}.self_attn", **{"in": "qkv_proj"}, gate="output_gate", norm="norm", out="out_proj"),
            "ignored": (
                r"rotary_emb\.inv_freq$",
                r"self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$",
            ),
        },
        fixed={"sliding_window": None},
    ),
    "MiniMaxM2ForCausalLM": row(
        head_dim=first("head_dim", default=128),
        rotary=lambda c: rotary(
            base=5e6, part=c["rotary_dim"] / first("head_dim", default=128)(c) if c.get("rotary_dim") else 1.0
        )(c),
        qk_norm=QkNorm.WHOLE,
        experts=experts(score=ExpertScore.SIGMOID, is_normalized=True, scale=1.0),
        names={
            "router": "layers.{i}.block_sparse_moe.gate|layers.{i}.mlp.gate",
            "router_correction": "layers.{i}.block_sparse_moe.e_score_correction_bias"
            "|layers.{i}.mlp.e_score_correction_bias",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2|layers.{i}.mlp.experts.down_proj[{j}]",
        },
    ),
    "GptOssForCausalLM": row(
        **biases(first("attention_bias", default=True)),
        norm_eps=first("rms_norm_eps", default=1e-5),
        rotary=rotary(base=1.5e5),
        sliding_windows=windows(pattern=2, default=128),
        has_sinks=True,
        activation=Activation.QUICK_GELU,
        gate_limit=first("swiglu_limit", default=7.0),
        gate_shift=1.0,
        experts=experts(
            is_normalized=True,
            intermediate_size=first("intermediate_size"),
            dense_layers=(),
            scale=1.0,
            has_bias=True,
            has_router_bias=True,
        ),
        names={
            "router": "layers.{i}.mlp.router",
            "expert_gate": "",
            "expert_up": "",
            "expert_gate_up": "layers.{i}.mlp.experts.gate_up_proj[{j}]",
            "expert_down": "layers.{i}.mlp.experts.down_proj[{j}]",
            "is_stack_transposed": True,
            "is_stack_interleaved": True,
        },
        fixed={"swiglu_alpha": 1.702},
    ),
    "MellumForCausalLM": row(
        **ATTENTION_BIASES,
        qk_norm=QkNorm.HEAD,
        rotary=rotary(base=5e5, base_keys=(), scaling_keys=("rope_parameters",)),
        window_rotary=rotary(base_keys=(), scaling_keys=("rope_parameters",), layers="sliding_attention"),
        sliding_windows=windows(pattern=1, default=1024),
        experts=experts(dense_layers=dense_by_kind(0), is_normalized=first("norm_topk_prob", default=True)),
        names={"ignored": (r"rotary_emb\.inv_freq$", r"^mtp\.")},
    ),
    "AfmoeForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        norm_placement=NormPlacement.BOTH,
        embedding_scale=lambda c: c["hidden_size"] ** 0.5 if c.get("mup_enabled") else 1.0,
        qk_norm=QkNorm.HEAD,
        sliding_windows=_afmoe_windows,
        unrotated_layers=lambda c: tuple(i for i, window in enumerate(_afmoe_windows(c)) if window is None),
        has_output_gate=True,
        experts=experts(
            score=ExpertScore.SIGMOID,
            is_normalized=True,
            dense_layers=lambda c: tuple(i for i in range(NUM_LAYERS(c)) if i < c.get("num_dense_layers", 1)),
            scale=lambda c: float(c.get("route_scale", 1.0)),
            shared_size=lambda c: c.get("num_shared_experts", 2) * c["moe_intermediate_size"],
        ),
        names={
            "attention_post_norm": "layers.{i}.post_attention_layernorm",
            "mlp_norm": "layers.{i}.pre_mlp_layernorm",
            "mlp_post_norm": "layers.{i}.post_mlp_layernorm",
            "router": "layers.{i}.mlp.router.gate",
            "router_correction": "layers.{i}.mlp.expert_bias",
        },
    ),
    "SolarOpenForCausalLM": row(
        has_qkv_bias=ATTENTION_BIAS,
        norm_eps=first("rms_norm_eps", default=1e-5),
        intermediate_size=first("moe_intermediate_size"),  # of no layer
        rotary=rotary(base=1e6),
        experts=experts(
            **CORRECTED,
            dense_layers=(),
            shared_size=lambda c: c.get("n_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=OTHER_CORRECTION,
    ),
}
