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
from funitel.model_server.spec.model_spec import IndexerSpec, QkNorm


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
    "GlmMoeDsaForCausalLM": row(
        **_SPARSE,
        indexer=_indexer(num_heads=32, is_interleaved=True, sharing=_sharing_layers),
        names=CORRECTED_NAMES,
    ),
}
