"""Rows of Hunyuan."""

from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIASES
from funitel.model_server.registry.rules.experts import CORRECTED_NAMES, dense_by_kind, experts
from funitel.model_server.registry.rules.row import ArchitectureRow, Config, Rule, first, rotary, row
from funitel.model_server.registry.rules.scaling import scaled_once
from funitel.model_server.spec.model_spec import ExpertScore, QkNorm
from funitel.proto.errors import UnsupportedModel

_HUNYUAN: dict[str, Any] = ATTENTION_BIASES | {
    "norm_eps": first("rms_norm_eps", default=1e-5),
    "rotary": scaled_once,
    "qk_norm": QkNorm.HEAD,
    "is_qk_norm_last": True,
}
_HUNYUAN_NAMES = {"q_norm": "layers.{i}.self_attn.query_layernorm", "k_norm": "layers.{i}.self_attn.key_layernorm"}


def _of_all_layers(*keys: str, default: int) -> Rule:
    """A number that a config may give for each layer; all must have the same."""

    def read(config: Config) -> Any:
        value = first(*keys, default=default)(config)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise UnsupportedModel(f"{keys[0]} must be the same in all layers")
        return value[0]

    return read


ROWS: dict[str, ArchitectureRow] = {
    "HunYuanDenseV1ForCausalLM": row(**_HUNYUAN, names=_HUNYUAN_NAMES),
    "HunYuanMoEV1ForCausalLM": row(
        **_HUNYUAN,
        experts=experts(
            num_experts=_of_all_layers("num_experts", default=1),
            num_chosen=_of_all_layers("moe_topk", "num_experts_per_tok", default=1),
            intermediate_size=first("intermediate_size"),
            dense_layers=(),
            is_normalized=True,
            scale=1.0,
            shared_size=first("intermediate_size"),
        ),
        names=_HUNYUAN_NAMES
        | {
            "router": "layers.{i}.mlp.gate.wg",
            "shared_gate": "layers.{i}.mlp.shared_mlp.gate_proj",
            "shared_up": "layers.{i}.mlp.shared_mlp.up_proj",
            "shared_down": "layers.{i}.mlp.shared_mlp.down_proj",
        },
    ),
    "HYV3ForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
        rotary=rotary(base=11158840.0),
        qk_norm=QkNorm.HEAD,
        experts=experts(
            score=ExpertScore.SIGMOID,
            is_normalized=True,
            dense_layers=dense_by_kind(1),
            scale=lambda c: float(c.get("router_scaling_factor", 2.826)),
            shared_size=lambda c: c.get("num_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=CORRECTED_NAMES
        | {
            "router": "layers.{i}.mlp.gate|layers.{i}.mlp.router.gate",
            "router_correction": "layers.{i}.mlp.e_score_correction_bias|layers.{i}.mlp.expert_bias",
            "shared_gate": "layers.{i}.mlp.shared_experts.gate_proj|layers.{i}.mlp.shared_mlp.gate_proj",
            "shared_up": "layers.{i}.mlp.shared_experts.up_proj|layers.{i}.mlp.shared_mlp.up_proj",
            "shared_down": "layers.{i}.mlp.shared_experts.down_proj|layers.{i}.mlp.shared_mlp.down_proj",
        },
    ),
}
