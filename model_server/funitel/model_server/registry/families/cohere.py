"""Rows of Cohere's Command."""

from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, TIED
from funitel.model_server.registry.rules.experts import dense_by_kind
from funitel.model_server.registry.rules.row import NUM_LAYERS, ArchitectureRow, Config, first, rotary, row, windows
from funitel.model_server.spec.model_spec import ExpertScore, ExpertsSpec, Norm, QkNorm

_COHERE: dict[str, Any] = {
    **TIED,
    **ATTENTION_BIASES,
    "norm": Norm.LAYER,
    "norm_eps": first("layer_norm_eps", default=1e-5),
    "is_parallel": True,
    "rotary": rotary(is_interleaved=True),
    "logit_scale": first("logit_scale", default=0.0625),
    "names": {"mlp_norm": ""},
}


def _cohere_moe_windows(config: Config) -> tuple[int | None, ...]:
    """Windows where the first layers, without experts, have a pattern of their own."""
    num_first = config.get("first_k_dense_replace") or 0
    steps = config.get("prefix_dense_sliding_window_pattern", 1), config.get("sliding_window_pattern", 4)
    counts = num_first, NUM_LAYERS(config) - num_first
    kinds = [
        "sliding_attention" if (i + 1) % step else "full_attention"
        for count, step in zip(counts, steps, strict=True)
        for i in range(count)
    ]
    found: tuple[int | None, ...] = windows(default=4096)({**config, "layer_types": config.get("layer_types") or kinds})
    return found


def _cohere_moe_unrotated(config: Config) -> tuple[int, ...]:
    """Layers without rotary positions: those without a window, but not the first, where these never have one."""
    dense = dense_by_kind(0)(config) if config.get("prefix_dense_sliding_window_pattern", 1) == 1 else ()
    found = _cohere_moe_windows(config) or (None,) * NUM_LAYERS(config)
    return tuple(i for i, window in enumerate(found) if window is None and i not in dense)


def _cohere_moe_experts(config: Config) -> ExpertsSpec:
    """Experts of which the shared ones count as much as all others together, unless the config has them summed."""
    num_shared = config.get("num_shared_experts", 0)
    is_mean = num_shared and config.get("shared_expert_combination_strategy", "average") == "average"
    score = ExpertScore(config.get("expert_selection_fn", "softmax"))
    return ExpertsSpec(
        num_experts=config["num_experts"],
        num_chosen=config["num_experts_per_tok"],
        intermediate_size=config["intermediate_size"],
        dense_layers=dense_by_kind(0)(config),
        score=score,
        is_normalized=score is ExpertScore.SOFTMAX or config.get("norm_topk_prob", True),
        scale=0.5 if is_mean else 1.0,
        shared_size=num_shared * config["intermediate_size"],
        shared_scale=0.5 if is_mean else 1.0,
    )


ROWS: dict[str, ArchitectureRow] = {
    "Cohere2MoeForCausalLM": row(
        **_COHERE
        | {
            "norm": lambda c: Norm.LAYER if c.get("rms_norm_eps") is None else Norm.RMS,
            "norm_eps": first("rms_norm_eps", "layer_norm_eps", default=1e-5),
        },
        intermediate_size=first("prefix_dense_intermediate_size", "intermediate_size"),
        sliding_windows=_cohere_moe_windows,
        unrotated_layers=_cohere_moe_unrotated,
        experts=_cohere_moe_experts,
    ),
    "CohereForCausalLM": row(**_COHERE, qk_norm=lambda c: QkNorm.EACH if c.get("use_qk_norm") else QkNorm.NONE),
    "Cohere2ForCausalLM": row(
        **_COHERE,
        sliding_windows=windows(pattern=4, default=4096),
        unrotated_layers=lambda c: tuple(
            i for i, window in enumerate(windows(pattern=4, default=4096)(c)) if window is None
        ),
    ),
}
