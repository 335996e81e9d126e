"""Rules that read more of a config's rotary scaling than `rotary` does."""

import math
from dataclasses import replace

from funitel.model_server.registry.rules.row import Config, first, head_dim, rotary
from funitel.model_server.spec.model_spec import QueryGrowthSpec, RotarySpec

_SCALING = first("rope_parameters", "rope_scaling", default={})


def growing_queries(config: Config) -> QueryGrowthSpec | None:
    """How queries grow with positions, where the rotary scaling says so."""
    given = _SCALING(config)
    rate = given.get("llama_4_scaling_beta")
    if rate is None:
        return None
    return QueryGrowthSpec(
        rate=float(rate), period=int(given.get("original_max_position_embeddings") or config["max_position_embeddings"])
    )


def scaled_once(config: Config) -> RotarySpec:
    """Rotary positions of which a fixed factor stretches the base, where the config gives one (Hunyuan's NTK)."""
    given = _SCALING(config)
    kind, alpha = given.get("rope_type") or given.get("type"), given.get("alpha")
    if kind != "dynamic" or not alpha:
        found: RotarySpec = rotary()(config)
        return found
    found = rotary()({**config, "rope_parameters": {**given, "rope_type": "default"}})
    dims = head_dim(config)
    return replace(found, base=found.base * alpha ** (dims / (dims - 2)))


def scaled_twice(config: Config) -> RotarySpec:
    """Rotary positions with one amplitude within the trained context and one beyond it (Phi-MoE)."""
    found: RotarySpec = rotary(base=1e6)(config)
    given = _SCALING(config)
    if found.scaling.kind == "default":
        return found
    short, long = float(given["short_mscale"]), float(given["long_mscale"])
    return replace(found, scaling=replace(found.scaling, amplitude=short, long_amplitude=long))


def latent_scale(config: Config) -> float | None:
    """What scores are multiplied by, where yarn stretches them as well. Source: YaRN, arXiv 2309.00071."""
    given = _SCALING(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    every, factor = given.get("mscale_all_dim"), given.get("factor", 1.0)
    if kind == "default" or not every or factor <= 1:
        return None
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return float(size**-0.5 * (0.1 * every * math.log(factor) + 1) ** 2)
