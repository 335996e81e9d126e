"""Rows of OLMo."""

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, SANDWICH_NAMES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import (
    HIDDEN_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    first,
    rotary,
    row,
    windows,
)
from funitel.model_server.registry.rules.states import layers_of, mixer, states
from funitel.model_server.spec.model_spec import Norm, NormPlacement, Position, QkNorm
from funitel.model_server.spec.state_layers import DeltaNetSpec


def _has_base(config: Config) -> bool:
    """Whether a config has rotary positions: published ones have a base of null."""
    given = first("rope_parameters", "rope_scaling", default={})(config)
    return {"rope_theta": config.get("rope_theta", 10000.0), **given}["rope_theta"] is not None


def _olmo_delta_net(config: Config) -> DeltaNetSpec:
    heads = first("linear_num_key_heads", default=NUM_HEADS(config))(config)
    dim = first("linear_key_head_dim", default=int(0.75 * HIDDEN_SIZE(config) / heads))(config)
    return DeltaNetSpec(
        num_key_heads=heads,
        num_value_heads=first("linear_num_value_heads", default=NUM_HEADS(config))(config),
        key_dim=dim,
        value_dim=first("linear_value_head_dim", default=2 * dim)(config),
        conv_width=config["linear_conv_kernel_dim"],
        beta_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )


def _is_olmo_state(config: Config, layer: int) -> bool:
    """Each fourth layer attends, and the last where that is none."""
    return layer % 4 != 3 and (NUM_LAYERS(config) > 3 or layer < NUM_LAYERS(config) - 1)


ROWS: dict[str, ArchitectureRow] = {
    "OlmoForCausalLM": row(
        norm=Norm.LAYER,
        norm_eps=1e-5,
        has_norm_weight=False,
        **ATTENTION_BIASES,
        qkv_clip=first("clip_qkv", default=None),
    ),
    "Olmo3ForCausalLM": row(
        norm_placement=NormPlacement.POST,
        norm_eps=first("rms_norm_eps", default=1e-5),
        **ATTENTION_BIASES,
        qk_norm=QkNorm.WHOLE,
        rotary=rotary(base=5e5),
        window_rotary=rotary(base=5e5, base_keys=(), scaling_keys=("rope_parameters",), layers="sliding_attention"),
        sliding_windows=windows(pattern=4, default=4096),
        names=SANDWICH_NAMES,
    ),
    "Olmo2ForCausalLM": row(
        norm_placement=NormPlacement.POST,
        norm_eps=first("rms_norm_eps", default=1e-5),
        **ATTENTION_BIASES,
        qk_norm=QkNorm.WHOLE,
        names=SANDWICH_NAMES,
    ),
    "OlmoeForCausalLM": row(
        **ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        qk_norm=QkNorm.WHOLE,
        experts=experts(),
        fixed={"clip_qkv": None},
    ),
    "FlexOlmoForCausalLM": row(
        **ATTENTION_BIASES,
        norm_placement=NormPlacement.POST,
        qk_norm=QkNorm.WHOLE,
        rotary=rotary(base=5e5),
        experts=experts(),
        names=SANDWICH_NAMES,
    ),
    "OlmoHybridForCausalLM": row(
        **ATTENTION_BIASES,
        norm_placement=NormPlacement.POST,
        state_norm_placement=NormPlacement.PRE,
        qk_norm=QkNorm.WHOLE,
        position=lambda c: Position.ROTARY if _has_base(c) else Position.NONE,
        **states(layers_of("linear_attention", _is_olmo_state), delta_net=_olmo_delta_net),
        names={
            "attention_norm": "layers.{i}.attention_layer_norm|layers.{i}.input_layernorm",
            "attention_post_norm": "layers.{i}.post_attention_layernorm|layers.{i}.feedforward_layer_norm",
            "mlp_norm": "layers.{i}.feedforward_layer_norm|layers.{i}.post_attention_layernorm",
            "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
            **mixer("layers.{i}.linear_attn", q="q_proj", k="k_proj", v="v_proj", gate="g_proj", beta="b_proj"),
            **mixer("layers.{i}.linear_attn", step="a_proj", conv="conv1d", decay="A_log", step_bias="dt_bias"),
            **mixer("layers.{i}.linear_attn", norm="o_norm", out="o_proj"),
            **mixer("layers.{i}.linear_attn", conv_q="q_conv1d", conv_k="k_conv1d", conv_v="v_conv1d"),
        },
    ),
}
