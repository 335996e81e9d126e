"""Rows of DeepSeek and the families with its latent attention or its experts."""

from typing import Any

from funitel.model_server.registry.rules.asked_windows import LATER_WINDOWS
from funitel.model_server.registry.rules.common import ATTENTION_BIASES, TIED
from funitel.model_server.registry.rules.experts import (
    CORRECTED,
    CORRECTED_NAMES,
    OTHER_CORRECTION,
    dense_by_kind,
    experts,
)
from funitel.model_server.registry.rules.latent import DEEPSEEK, latent, latent_rotary
from funitel.model_server.registry.rules.row import (
    HIDDEN_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    Rule,
    first,
    row,
)
from funitel.model_server.registry.rules.scaling import growing_queries
from funitel.model_server.registry.rules.states import mixer, states
from funitel.model_server.spec.model_spec import IndexerSpec, QkNorm, RotarySpec
from funitel.model_server.spec.state_layers import DeltaNetSpec


def _of_later_layers(config: Config) -> tuple[int | None, ...]:
    """Windows of dots1, which has them unasked."""
    found: tuple[int | None, ...] = LATER_WINDOWS({**config, "use_sliding_window": True})
    return found


def _indexer(*, num_heads: int, is_interleaved: bool, sharing: Rule) -> Rule:
    return lambda config: IndexerSpec(
        num_heads=config.get("index_n_heads", num_heads),
        head_dim=config.get("index_head_dim", 128),
        num_chosen=config.get("index_topk", 2048),
        is_interleaved=is_interleaved,
        sharing_layers=sharing(config),
    )


def _sharing_layers(config: Config) -> tuple[int, ...]:
    """Of GLM-5: layers that are listed as sharing, or in a pattern, or all but each so-many-th from an offset on."""
    count = NUM_LAYERS(config)
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        step, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - offset + 1, 0) % step else "full" for i in range(count)]
    return tuple(i for i, kind in enumerate(kinds[:count]) if kind in ("shared", "S"))


_SPARSE: dict[str, Any] = DEEPSEEK | {
    "has_mlp_bias": False,
    "experts": experts(**CORRECTED | {"dense_layers": dense_by_kind(3)}),
}

_KIMI_STATES = first("linear_attn_config", default={})


def _kimi_kinds(config: Config) -> list[str]:
    """Kinds of layers: as checkpoints list them, else as transformers does, else each fourth attends but the first."""
    states, every = _KIMI_STATES(config), range(NUM_LAYERS(config))
    if config.get("layer_types") is not None:
        return list(config["layer_types"])
    if "full_attn_layers" in states and "kda_layers" in states:
        return ["full_attention" if i + 1 in states["full_attn_layers"] else "linear_attention" for i in every]
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in every]


def _kimi_delta_net(config: Config) -> DeltaNetSpec:
    states = _KIMI_STATES(config)
    dim = states.get("head_dim", config["linear_head_dim"])
    heads = states.get("num_heads", config["linear_num_heads"])
    return DeltaNetSpec(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=states.get("short_conv_kernel_size", config["linear_conv_kernel_dim"]),
        rank=dim,
        has_sigmoid_gate=True,
    )


_KIMI_MLP = "layers.{i}.block_sparse_moe"


def _either(name: str) -> str:
    """A name below either of what checkpoints and transformers call the mixture."""
    return f"{_KIMI_MLP}.{name}|layers.{{i}}.mlp.{name}"


ROWS: dict[str, ArchitectureRow] = {
    "Dots1ForCausalLM": row(
        **ATTENTION_BIASES,
        qk_norm=QkNorm.HEAD,
        sliding_windows=_of_later_layers,
        experts=experts(**CORRECTED | {"is_normalized": first("norm_topk_prob", default=False)}),
        names=OTHER_CORRECTION,
    ),
    "Mistral4ForCausalLM": row(
        **DEEPSEEK,
        query_growth=growing_queries,
        experts=experts(
            is_normalized=first("norm_topk_prob", default=True),
            num_groups=first("n_group", default=1),
            num_chosen_groups=first("topk_group", default=1),
            group_depth=2,
        ),
    ),
    "MiniCPM3ForCausalLM": row(
        **TIED,
        **DEEPSEEK
        | {
            "latent": lambda c: latent({**c, "v_head_dim": c.get("v_head_dim") or HIDDEN_SIZE(c) // NUM_HEADS(c)}),
            "rotary": lambda c: latent_rotary({**c, "rope_interleave": False}),
        },
        norm_eps=first("rms_norm_eps", default=1e-5),
        embedding_scale=first("scale_emb", default=12),
        residual_scale=lambda c: (c.get("scale_depth", 1.4) or NUM_LAYERS(c) ** 0.5) / NUM_LAYERS(c) ** 0.5,
        logit_scale=lambda c: (c.get("dim_model_base", 256) or HIDDEN_SIZE(c)) / HIDDEN_SIZE(c),
    ),
    "DeepseekV2ForCausalLM": row(
        **DEEPSEEK,
        experts=experts(
            is_normalized=False,
            num_groups=lambda c: c["n_group"] if c.get("topk_method") == "group_limited_greedy" else 1,
            num_chosen_groups=lambda c: c["topk_group"] if c.get("topk_method") == "group_limited_greedy" else 1,
        ),
        fixed={"scoring_func": "softmax", "moe_layer_freq": 1},
    ),
    "DeepseekV3ForCausalLM": row(
        **DEEPSEEK,
        experts=experts(**CORRECTED),
        names=CORRECTED_NAMES,
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    "DeepseekV32ForCausalLM": row(
        **_SPARSE,
        indexer=_indexer(num_heads=64, is_interleaved=False, sharing=lambda config: ()),
        names=CORRECTED_NAMES,
    ),
    "KimiLinearForCausalLM": row(
        **DEEPSEEK
        | {
            "has_mlp_bias": False,
            "attention_scale": None,
            "rotary": lambda c: RotarySpec(dims=c["qk_rope_head_dim"]),
            "unrotated_layers": lambda c: tuple(range(NUM_LAYERS(c))),
        },
        max_position_embeddings=first("model_max_length", "max_position_embeddings"),
        norm_eps=first("rms_norm_eps", default=1e-5),
        **states(
            lambda c: tuple(i for i, kind in enumerate(_kimi_kinds(c)) if kind == "linear_attention"),
            delta_net=_kimi_delta_net,
        ),
        experts=experts(
            **CORRECTED
            | {
                "num_chosen": first("num_experts_per_token", "num_experts_per_tok"),
                "is_normalized": first("moe_renormalize", "norm_topk_prob", default=True),
                "num_groups": first("num_expert_group", "n_group", default=1),
                "dense_layers": dense_by_kind(1),
                "shared_size": lambda c: (
                    first("num_shared_experts", "n_shared_experts")(c) * c["moe_intermediate_size"]
                ),
            }
        ),
        names={
            **{each: _either(f"{each}_proj") for each in ("gate", "up", "down")},
            "router": _either("gate"),
            "router_correction": _either("gate.e_score_correction_bias"),
            "expert_gate": f"{_KIMI_MLP}.experts.{{j}}.w1",
            "expert_up": f"{_KIMI_MLP}.experts.{{j}}.w3",
            "expert_gate_up": "layers.{i}.mlp.experts.gate_up_proj[{j}]",
            "expert_down": f"{_KIMI_MLP}.experts.{{j}}.w2|layers.{{i}}.mlp.experts.down_proj[{{j}}]",
            **{f"shared_{each}": _either(f"shared_experts.{each}_proj") for each in ("gate", "up", "down")},
            **mixer("layers.{i}.self_attn", q="q_proj", k="k_proj", v="v_proj", beta="b_proj", conv="conv1d"),
            **mixer("layers.{i}.self_attn", gate="g_b_proj", gate_down="g_a_proj", norm="o_norm", out="o_proj"),
            **mixer("layers.{i}.self_attn", step="f_b_proj", step_down="f_a_proj", decay="A_log", step_bias="dt_bias"),
            **mixer("layers.{i}.self_attn", conv_q="q_conv1d", conv_k="k_conv1d", conv_v="v_conv1d"),
        },
        fixed={"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
    ),
    "GlmMoeDsaForCausalLM": row(
        **_SPARSE,
        indexer=_indexer(num_heads=32, is_interleaved=True, sharing=_sharing_layers),
        names=CORRECTED_NAMES,
    ),
}
