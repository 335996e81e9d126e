"""Rows of decoders of which some layers keep a state.

Source for every row: the family's class in transformers, its configuration and the tensor names of its checkpoints.
"""

import math
from collections.abc import Callable
from typing import Any

from funitel.model_server.registry.families.granite import GRANITE, GRANITE_SHARED
from funitel.model_server.registry.rules.common import ATTENTION_BIASES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import (
    HIDDEN_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    Rule,
    activation,
    first,
    rotary,
    row,
    when,
)
from funitel.model_server.spec.model_spec import Activation, ExpertScore, NormPlacement, Position, QkNorm
from funitel.model_server.spec.state_layers import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from funitel.proto.errors import UnsupportedModel

_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def _layers_of(kind: str, usual: Callable[[Config, int], bool]) -> Rule:
    """Layers that `layer_types` names `kind`, or without that list the `usual` ones."""

    def read(config: Config) -> tuple[int, ...]:
        every = range(NUM_LAYERS(config))
        given = config.get("layer_types") or config.get("layers_block_type")
        kinds = [_OLD_KINDS.get(each, each) for each in given or ()]
        found = tuple(i for i in every if (kinds[i] == kind if kinds else usual(config, i)))
        if len(found) == len(every):
            raise UnsupportedModel("no layer attends: the pool is for keys and values")
        return found

    return read


def _spaced(period: int) -> Callable[[Config, int], bool]:
    """All but each so-many-th."""
    return lambda config, i: bool((i + 1) % first("full_attention_interval", default=period)(config))


def _states(layers: Rule, **kind: Rule) -> dict[str, Any]:
    """Fields of layers with a state, of a `kind` where there are any."""
    (name, read), *_ = kind.items()
    return {"state_layers": layers, name: lambda config: read(config) if layers(config) else None}


def _mixer(stem: str, **names: str) -> dict[str, str]:
    """Names of tensors of layers with a state, each `state_NAME` below `stem`."""
    return {f"state_{name}": f"{stem}.{own}" for name, own in names.items()}


def _delta_net(config: Config) -> DeltaNetSpec:
    return DeltaNetSpec(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_width=config["linear_conv_kernel_dim"],
    )


# Qwen3-Next and 3.5: gates of attention lie with the queries, norms but those of gated heads are stored less 1.
_QWEN: dict[str, Any] = ATTENTION_BIASES | {
    "norm_offset": 1.0,
    "qk_norm": QkNorm.HEAD,
    "has_output_gate": True,
    "rotary": rotary(part=0.25),
    **_states(_layers_of("linear_attention", _spaced(4)), delta_net=_delta_net),
}
_QWEN_NAMES: dict[str, Any] = {
    "is_gate_in_q": True,
    "ignored": (r"rotary_emb\.inv_freq$", r"^mtp\."),
    **_mixer("layers.{i}.linear_attn", conv="conv1d", decay="A_log", step_bias="dt_bias", norm="norm", out="out_proj"),
}
_QWEN_PACKED = _mixer("layers.{i}.linear_attn", qkvz="in_proj_qkvz", ba="in_proj_ba")
_QWEN_APART = _mixer(
    "layers.{i}.linear_attn", **{"in": "in_proj_qkv"}, gate="in_proj_z", beta="in_proj_b", step="in_proj_a"
)
_QWEN_SHARED = {
    "shared_gate": "layers.{i}.mlp.shared_expert.gate_proj",
    "shared_up": "layers.{i}.mlp.shared_expert.up_proj",
    "shared_down": "layers.{i}.mlp.shared_expert.down_proj",
    "shared_share": "layers.{i}.mlp.shared_expert_gate",
}
_SHARED_UNITS = first("shared_expert_intermediate_size")


def _short_conv(config: Config) -> ShortConvSpec:
    return ShortConvSpec(
        channels=HIDDEN_SIZE(config), conv_width=config["conv_L_cache"], has_bias=config.get("conv_bias", False)
    )


def _lfm2_units(config: Config) -> int:
    """Hidden units of the MLP: two thirds of what the config says, times a factor, as a multiple."""
    size = first("block_ff_dim", "intermediate_size")(config)
    if not config.get("block_auto_adjust_ff_dim", True):
        return int(size)
    size, factor = int(2 * size / 3), config.get("block_ffn_dim_multiplier", 1.0)
    step = config.get("block_multiple_of", 256)
    return size if factor is None else step * -(-int(factor * size) // step)


_IS_UNLISTED: Callable[[Config, int], bool] = lambda c, i: i not in first("full_attn_idxs", default=range(i + 1))(c)  # noqa: E731
_LFM2: dict[str, Any] = {
    "activation": Activation.SILU,
    "norm_eps": first("norm_eps", default=1e-5),
    "is_tied": first("tie_embedding", "tie_word_embeddings", default=True),
    "rotary": rotary(base=1e6),
    "qk_norm": QkNorm.HEAD,
    **_states(_layers_of("conv", _IS_UNLISTED), short_conv=_short_conv),
}
_LFM2_NAMES: dict[str, Any] = {
    "attention_norm": "layers.{i}.operator_norm",
    "q_norm": "layers.{i}.self_attn.q_layernorm",
    "k_norm": "layers.{i}.self_attn.k_layernorm",
    "out": "layers.{i}.self_attn.out_proj",
    "mlp_norm": "layers.{i}.ffn_norm",
    "gate": "layers.{i}.feed_forward.w1",
    "up": "layers.{i}.feed_forward.w3",
    "down": "layers.{i}.feed_forward.w2",
    "final_norm": "embedding_norm",
    **_mixer("layers.{i}.conv", **{"in": "in_proj"}, conv="conv", out="out_proj"),
}


def _number(value: Any) -> float:
    """A number as transformers writes it: what JSON has no literal for as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _mamba2(config: Config) -> Mamba2Spec:
    heads, inner = config["mamba_n_heads"], config["mamba_expand"] * HIDDEN_SIZE(config)
    dim = config.get("mamba_d_head", "auto")
    limit = config.get("time_step_limit") or (0.0, math.inf)
    if (inner // heads if dim == "auto" else dim) * heads != inner:
        raise UnsupportedModel(
            f"mamba_n_heads {heads} of mamba_d_head {dim} must be {inner}, mamba_expand * hidden_size"
        )
    return Mamba2Spec(
        num_heads=heads,
        head_dim=inner // heads,
        state_dim=config["mamba_d_state"],
        num_groups=config["mamba_n_groups"],
        conv_width=config["mamba_d_conv"],
        has_conv_bias=config.get("mamba_conv_bias", True),
        has_bias=config.get("mamba_proj_bias", False),
        min_step=_number(limit[0]),
        max_step=None if math.isinf(_number(limit[1])) else _number(limit[1]),
    )


_MAMBA2_NAMES = _mixer(
    "layers.{i}.mamba",
    **{"in": "in_proj"},
    conv="conv1d",
    decay="A_log",
    step_bias="dt_bias",
    skip="D",
    norm="norm",
    out="out_proj",
)
_HAS_EXPERTS = lambda c: first("num_local_experts", "n_routed_experts", default=0)(c) > 0  # noqa: E731
_GRANITE: dict[str, Any] = {
    **GRANITE,
    "intermediate_size": first("shared_intermediate_size"),
    "position": lambda c: Position.ROTARY if c.get("position_embedding_type") == "rope" else Position.NONE,
    "experts": when(_HAS_EXPERTS, GRANITE_SHARED["experts"], None),
    **_states(_layers_of("linear_attention", lambda config, i: True), mamba2=_mamba2),
}
_GRANITE_NAMES: dict[str, Any] = {
    **GRANITE_SHARED["names"],
    "gate_up": "layers.{i}.shared_mlp.input_linear",
    "down": "layers.{i}.shared_mlp.output_linear",
    **_MAMBA2_NAMES,
}


def _bamba_layers(config: Config) -> tuple[int, ...]:
    found = tuple(i for i in range(NUM_LAYERS(config)) if i not in (config.get("attn_layer_indices") or ()))
    if len(found) == NUM_LAYERS(config):
        raise UnsupportedModel("no layer attends: the pool is for keys and values")
    return found


def _bamba_rotary(config: Config) -> Config:
    """Half of a head turns, whatever the config says."""
    return {**config, "partial_rotary_factor": 0.5}


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


_NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_kinds(config: Config) -> list[str]:
    """The one block of each layer."""
    given = config.get("layers_block_type") or config.get("layer_types")
    if given is None:
        return [_NEMOTRON_KINDS[each] for each in config.get("hybrid_override_pattern", "ME*-")]
    return [_OLD_KINDS.get(each, each) for each in given]


def _nemotron_layers(*kinds: str) -> Rule:
    return lambda config: tuple(i for i, kind in enumerate(_nemotron_kinds(config)) if kind in kinds)


def _nemotron_experts(config: Config) -> Any:
    if "moe" not in _nemotron_kinds(config):
        return None
    if config.get("moe_latent_size") is not None:
        raise UnsupportedModel(f"config.json says moe_latent_size={config['moe_latent_size']}, only null is supported")
    return experts(
        score=ExpertScore.SIGMOID,
        num_experts=first("n_routed_experts"),
        intermediate_size=first("moe_intermediate_size"),
        shared_size=first("moe_shared_expert_intermediate_size"),
        is_normalized=first("norm_topk_prob", default=True),
        num_groups=first("n_group", default=1),
        num_chosen_groups=first("topk_group", default=1),
        group_depth=2,
        dense_layers=lambda c: tuple(i for i, kind in enumerate(_nemotron_kinds(c)) if kind != "moe"),
    )(config)


def _nemotron_mamba2(config: Config) -> Mamba2Spec:
    return Mamba2Spec(
        num_heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        state_dim=config["ssm_state_size"],
        num_groups=first("mamba_n_groups", "n_groups")(config),
        conv_width=first("mamba_d_conv", "conv_kernel")(config),
        has_conv_bias=first("mamba_conv_bias", "use_conv_bias", default=True)(config),
        has_bias=config.get("use_bias", False),
        min_step=_number(first("mamba_dt_min", "time_step_min", default=0.001)(config)),
    )


ROWS: dict[str, ArchitectureRow] = {
    "Qwen3NextForCausalLM": row(
        **_QWEN,
        experts=experts(is_normalized=first("norm_topk_prob", default=True), shared_size=_SHARED_UNITS),
        names=_QWEN_NAMES | _QWEN_PACKED | _QWEN_SHARED,
    ),
    "Qwen3_5ForCausalLM": row(**_QWEN, names=_QWEN_NAMES | _QWEN_APART),
    "Qwen3_5MoeForCausalLM": row(
        **_QWEN,
        intermediate_size=first("intermediate_size", "moe_intermediate_size"),
        experts=experts(is_normalized=True, shared_size=_SHARED_UNITS),
        names=_QWEN_NAMES | _QWEN_APART | _QWEN_SHARED,
    ),
    "Lfm2ForCausalLM": row(**_LFM2, intermediate_size=_lfm2_units, names=_LFM2_NAMES),
    "Lfm2MoeForCausalLM": row(
        **_LFM2,
        experts=experts(
            score=ExpertScore.SIGMOID,
            is_normalized=first("norm_topk_prob", default=True),
            dense_layers=lambda c: tuple(range(min(c["num_dense_layers"], NUM_LAYERS(c)))),
        ),
        names=_LFM2_NAMES
        | {
            "router": "layers.{i}.feed_forward.gate",
            "router_correction": when(
                first("use_expert_bias", default=True), "layers.{i}.feed_forward.expert_bias", ""
            ),
            "expert_gate": "layers.{i}.feed_forward.experts.{j}.w1",
            "expert_up": "layers.{i}.feed_forward.experts.{j}.w3",
            "expert_gate_up": "layers.{i}.feed_forward.experts.gate_up_proj[{j}]",
            "expert_down": "layers.{i}.feed_forward.experts.{j}.w2|layers.{i}.feed_forward.experts.down_proj[{j}]",
        },
    ),
    "GraniteMoeHybridForCausalLM": row(**_GRANITE, names=_GRANITE_NAMES),
    "BambaForCausalLM": row(
        **ATTENTION_BIASES,
        has_mlp_bias=first("mlp_bias", default=False),
        norm_eps=first("rms_norm_eps", default=1e-5),
        rotary=lambda c: rotary(part=0.5)(_bamba_rotary(c)),
        **_states(lambda c: _bamba_layers(c), mamba2=_mamba2),
        names={
            "mlp_norm": "layers.{i}.pre_ff_layernorm",
            "gate": "layers.{i}.feed_forward.gate_proj",
            "up": "layers.{i}.feed_forward.up_proj",
            "down": "layers.{i}.feed_forward.down_proj",
            "final_norm": "final_layernorm",
            **_MAMBA2_NAMES,
        },
    ),
    "NemotronHForCausalLM": row(
        num_layers=lambda c: len(_nemotron_kinds(c)),
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
        activation=activation("mlp_hidden_act", default="relu2"),
        is_gated=False,
        position=Position.NONE,
        experts=_nemotron_experts,
        mlp_layers=_nemotron_layers("mlp", "moe"),
        **_states(_nemotron_layers("linear_attention"), mamba2=_nemotron_mamba2),
        names={
            "prefix": "backbone.",
            "embedding": "embeddings",
            "attention_norm": "layers.{i}.norm",
            "q": "layers.{i}.mixer.q_proj",
            "k": "layers.{i}.mixer.k_proj",
            "v": "layers.{i}.mixer.v_proj",
            "out": "layers.{i}.mixer.o_proj",
            "mlp_norm": "layers.{i}.norm",
            "up": "layers.{i}.mixer.up_proj",
            "down": "layers.{i}.mixer.down_proj",
            "final_norm": "norm_f",
            "router": "layers.{i}.mixer.gate",
            "router_correction": "layers.{i}.mixer.gate.e_score_correction_bias",
            "expert_gate": "",
            "expert_up": "layers.{i}.mixer.experts.{j}.up_proj|layers.{i}.mixer.experts.up_proj[{j}]",
            "expert_gate_up": "",
            "expert_down": "layers.{i}.mixer.experts.{j}.down_proj|layers.{i}.mixer.experts.down_proj[{j}]",
            "shared_up": "layers.{i}.mixer.shared_experts.up_proj",
            "shared_down": "layers.{i}.mixer.shared_experts.down_proj",
            "ignored": (r"rotary_emb\.inv_freq$", r"^mtp\."),
            **{key: name.replace(".mamba.", ".mixer.") for key, name in _MAMBA2_NAMES.items()},
        },
    ),
    "OlmoHybridForCausalLM": row(
        **ATTENTION_BIASES,
        norm_placement=NormPlacement.POST,
        state_norm_placement=NormPlacement.PRE,
        qk_norm=QkNorm.WHOLE,
        position=lambda c: Position.ROTARY if _has_base(c) else Position.NONE,
        **_states(_layers_of("linear_attention", _is_olmo_state), delta_net=_olmo_delta_net),
        names={
            "attention_norm": "layers.{i}.attention_layer_norm|layers.{i}.input_layernorm",
            "attention_post_norm": "layers.{i}.post_attention_layernorm|layers.{i}.feedforward_layer_norm",
            "mlp_norm": "layers.{i}.feedforward_layer_norm|layers.{i}.post_attention_layernorm",
            "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
            **_mixer("layers.{i}.linear_attn", q="q_proj", k="k_proj", v="v_proj", gate="g_proj", beta="b_proj"),
            **_mixer("layers.{i}.linear_attn", step="a_proj", conv="conv1d", decay="A_log", step_bias="dt_bias"),
            **_mixer("layers.{i}.linear_attn", norm="o_norm", out="o_proj"),
            **_mixer("layers.{i}.linear_attn", conv_q="q_conv1d", conv_k="k_conv1d", conv_v="v_conv1d"),
        },
    ),
}
