"""Rules of latent attention: what DeepSeek's models and those after them share."""

from dataclasses import replace
from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIAS
from funitel.model_server.registry.rules.row import Config, first, rotary
from funitel.model_server.registry.rules.scaling import latent_scale
from funitel.model_server.spec.model_spec import LatentSpec, RotarySpec


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


DEEPSEEK: dict[str, Any] = {
    "head_dim": lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
    "num_kv_heads": 1,
    "has_qkv_bias": ATTENTION_BIAS,
    "has_out_bias": ATTENTION_BIAS,
    "has_mlp_bias": first("mlp_bias", default=False),
    "attention_scale": latent_scale,
    "latent": latent,
    "rotary": latent_rotary,
}
"""Fields of a row with latent attention."""
