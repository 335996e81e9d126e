"""Rules of mixtures of experts: how many, in which layers, and how they are chosen."""

from typing import Any

from funitel.model_server.registry.rules.row import NUM_LAYERS, Config, Rule, first, read_fields
from funitel.model_server.spec.model_spec import ExpertScore, ExpertsSpec


def _dense_layers(config: Config) -> tuple[int, ...]:
    """Layers without experts: the first few, those listed, or all but each so-many-th, as the config has it."""
    listed, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    num_first = config.get("first_k_dense_replace") or 0
    return tuple(i for i in range(NUM_LAYERS(config)) if i < num_first or i in listed or (i + 1) % step)


_EXPERTS: dict[str, Any] = {
    "num_experts": first("num_experts", "num_local_experts", "n_routed_experts"),
    "num_chosen": first("num_experts_per_tok"),
    "intermediate_size": first("moe_intermediate_size", "intermediate_size"),
    "dense_layers": _dense_layers,
    "is_normalized": first("norm_topk_prob", default=False),
    "scale": lambda c: float(c.get("routed_scaling_factor", 1.0)),
    "shared_size": lambda c: (c.get("n_shared_experts") or 0) * c.get("moe_intermediate_size", 0),
}


def dense_by_kind(num_first: int) -> Rule:
    """Layers without experts: those that `mlp_layer_types` names dense, else the first few."""

    def read(config: Config) -> tuple[int, ...]:
        kinds = config.get("mlp_layer_types")
        few = first("first_k_dense_replace", default=num_first)(config)
        return tuple(i for i in range(NUM_LAYERS(config)) if (kinds[i] == "dense" if kinds else i < few))

    return read


def experts(**fields: Any) -> Rule:
    """A mixture of experts. `fields` are those of an ExpertsSpec that are not what most configs call them."""
    return lambda config: ExpertsSpec(**read_fields(_EXPERTS | fields, config))


_MAX_FURTHER = 64  # layers that predict tokens beyond the next; models have one to three


def _further_layers(config: Config) -> range:
    """Those that predict tokens beyond the next: one at least, for not every config counts them."""
    count = max(first("num_nextn_predict_layers", "num_mtp_layers", default=1)(config), 1)
    if count > _MAX_FURTHER:
        raise ValueError(f"num_nextn_predict_layers must be at most {_MAX_FURTHER}, given {count}")
    return range(NUM_LAYERS(config), NUM_LAYERS(config) + count)


CORRECTED: dict[str, Any] = {
    "score": ExpertScore.SIGMOID,
    "is_normalized": first("norm_topk_prob", default=True),
    "num_groups": first("n_group", default=1),
    "num_chosen_groups": first("topk_group", default=1),
    "group_depth": 2,
}
"""Experts chosen by scores that a learnt vector corrects."""
CORRECTED_NAMES: dict[str, Any] = {
    "router_correction": "layers.{i}.mlp.gate.e_score_correction_bias",
    "ignored": lambda c: (r"rotary_emb\.inv_freq$", *(rf"(^|\.)layers\.{i}\." for i in _further_layers(c))),
}
"""Names with the learnt vector; layers that predict further tokens lie behind the last."""
OTHER_CORRECTION = {
    "router_correction": "layers.{i}.mlp.gate.e_score_correction_bias|layers.{i}.mlp.e_score_correction_bias"
}
"""The same vector where transformers keeps it beside the experts."""
