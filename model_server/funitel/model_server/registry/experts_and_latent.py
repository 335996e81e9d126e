"""Read the fields of mixtures of experts and latent attention off config.json, for the rows of all families."""

import math
from dataclasses import replace
from typing import Any

from funitel.model_server.registry.row import NUM_LAYERS, Config, Rule, first, read_fields, rotary
from funitel.model_server.spec.model_spec import ExpertsSpec, LatentSpec, RotarySpec


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


def experts(**fields: Any) -> Rule:
    """A mixture of experts. `fields` are those of an ExpertsSpec that are not what most configs call them."""
    return lambda config: ExpertsSpec(**read_fields(_EXPERTS | fields, config))


def latent(config: Config) -> LatentSpec:
    """Latent attention."""
    ranks = config["kv_lora_rank"], config.get("q_lora_rank")
    return LatentSpec(rank=ranks[0], query_rank=ranks[1], value_dim=config["v_head_dim"])


def latent_rotary(config: Config) -> RotarySpec:
    """Rotary positions of the part of a head that has a size of its own."""
    dims = config["qk_rope_head_dim"]
    read = rotary(is_interleaved=config.get("rope_interleave", True))
    found: RotarySpec = read({**config, "head_dim": dims})
    return replace(found, dims=dims)


def latent_scale(config: Config) -> float | None:
    """What scores are multiplied by, where yarn stretches them as well. Source: YaRN, arXiv 2309.00071."""
    given = first("rope_parameters", "rope_scaling", default={})(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    every, factor = given.get("mscale_all_dim"), given.get("factor", 1.0)
    if kind == "default" or not every or factor <= 1:
        return None
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return float(size**-0.5 * (0.1 * every * math.log(factor) + 1) ** 2)
