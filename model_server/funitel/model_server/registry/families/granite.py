"""Rows of Granite."""

from dataclasses import replace
from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, TIED
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import (
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    Rule,
    first,
    rotary,
    row,
    when,
    windows,
)
from funitel.model_server.registry.rules.states import MAMBA2_NAMES, layers_of, mamba2, states
from funitel.model_server.spec.model_spec import Position, RotarySpec
from funitel.proto.errors import UnsupportedModel

GRANITE: dict[str, Any] = ATTENTION_BIASES | {
    "embedding_scale": first("embedding_multiplier", default=1.0),
    "residual_scale": first("residual_multiplier", default=1.0),
    "attention_scale": first("attention_multiplier", default=1.0),
    "logit_scale": lambda c: 1 / c.get("logits_scaling", 1.0),
}
_GRANITE_MOE_NAMES = {
    "router": "layers.{i}.block_sparse_moe.router.layer|layers.{i}.block_sparse_moe.router",
    "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.gate_proj",  # only where it is made of a GGUF
    "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.up_proj",
    "expert_gate_up": "layers.{i}.block_sparse_moe.input_linear[{j}]"
    "|layers.{i}.block_sparse_moe.experts.gate_up_proj[{j}]",
    "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.down_proj"
    "|layers.{i}.block_sparse_moe.output_linear[{j}]"
    "|layers.{i}.block_sparse_moe.experts.down_proj[{j}]",
}
_GRANITE_WINDOWS = windows(default=128)


def _granite_windows(config: Config) -> tuple[int | None, ...]:
    """Windows of Granite's layers, but each fourth from the first on, unless the config lists them."""
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in range(NUM_LAYERS(config))]
    found: tuple[int | None, ...] = _GRANITE_WINDOWS({**config, "layer_types": config.get("layer_types") or kinds})
    return found


def _rotary_by_layer(*, is_windowed: bool) -> Rule:
    """Rotary positions of Granite's layers with windows, or of the others, where the config lists a base for each."""

    def read(config: Config) -> RotarySpec:
        found: RotarySpec = rotary()(config)
        bases, sizes = config.get("layer_rope_theta"), _granite_windows(config) or (None,) * NUM_LAYERS(config)
        mine = {base for base, size in zip(bases or (), sizes, strict=False) if base and bool(size) is is_windowed}
        if len(mine) > 1:
            raise UnsupportedModel("layer_rope_theta must be the same in all layers with a window, and in all others")
        return replace(found, base=float(mine.pop())) if mine else found

    return read


_GRANITE_SWA: dict[str, Any] = GRANITE | {
    "sliding_windows": _granite_windows,
    "has_sinks": True,
    "rotary": _rotary_by_layer(is_windowed=False),
    "window_rotary": _rotary_by_layer(is_windowed=True),
    "unrotated_layers": lambda c: tuple(i for i, base in enumerate(c.get("layer_rope_theta") or ()) if not base),
}
GRANITE_SHARED: dict[str, Any] = {
    "experts": experts(is_normalized=True, shared_size=first("shared_intermediate_size", default=0)),
    "names": _GRANITE_MOE_NAMES
    | {
        "shared_gate": "",
        "shared_up": "",
        "shared_gate_up": "layers.{i}.shared_mlp.input_linear",
        "shared_down": "layers.{i}.shared_mlp.output_linear",
    },
}

_HAS_EXPERTS = lambda c: first("num_local_experts", "n_routed_experts", default=0)(c) > 0  # noqa: E731
_GRANITE: dict[str, Any] = {
    **GRANITE,
    "intermediate_size": first("shared_intermediate_size"),
    "position": lambda c: Position.ROTARY if c.get("position_embedding_type") == "rope" else Position.NONE,
    "experts": when(_HAS_EXPERTS, GRANITE_SHARED["experts"], None),
    **states(layers_of("linear_attention", lambda config, i: True), mamba2=mamba2),
}
_GRANITE_NAMES: dict[str, Any] = {
    **GRANITE_SHARED["names"],
    "gate_up": "layers.{i}.shared_mlp.input_linear",
    "down": "layers.{i}.shared_mlp.output_linear",
    **MAMBA2_NAMES,
}


ROWS: dict[str, ArchitectureRow] = {
    "GraniteForCausalLM": row(**GRANITE, has_mlp_bias=first("mlp_bias", default=False)),
    "GraniteMoeForCausalLM": row(
        **GRANITE,
        experts=experts(is_normalized=True),
        names=_GRANITE_MOE_NAMES,
    ),
    "GraniteMoeSharedForCausalLM": row(**GRANITE, **GRANITE_SHARED),
    "GraniteMoeSWAForCausalLM": row(**_GRANITE_SWA, **GRANITE_SHARED),
    "GraniteSWAForCausalLM": row(
        **TIED,
        **_GRANITE_SWA,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
    ),
    "GraniteMoeHybridForCausalLM": row(**_GRANITE, names=_GRANITE_NAMES),
}
