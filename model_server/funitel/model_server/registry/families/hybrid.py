"""Rows of decoders of which some layers keep a state.

Source for every row: the family's class in transformers, its configuration and the tensor names of its checkpoints.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIASES
from funitel.model_server.registry.rules.experts import experts
from funitel.model_server.registry.rules.row import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    Rule,
    activation,
    first,
    head_dim,
    rotary,
    row,
    when,
)
from funitel.model_server.registry.rules.states import MAMBA2_NAMES, OLD_KINDS, layers_of, mamba2, mixer, number, states
from funitel.model_server.spec.layer_spec import MultiplierSpec
from funitel.model_server.spec.model_spec import Activation, ExpertScore, Position, QkNorm, RotarySpec
from funitel.model_server.spec.state_layers import Mamba2Spec, MambaSpec, ShortConvSpec
from funitel.proto.errors import UnsupportedModel


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
    **states(layers_of("conv", _IS_UNLISTED), short_conv=_short_conv),
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
    **mixer("layers.{i}.conv", **{"in": "in_proj"}, conv="conv", out="out_proj"),
}


def _bamba_layers(config: Config) -> tuple[int, ...]:
    return tuple(i for i in range(NUM_LAYERS(config)) if i not in (config.get("attn_layer_indices") or ()))


def _bamba_rotary(config: Config) -> Config:
    """Half of a head turns, whatever the config says."""
    return {**config, "partial_rotary_factor": 0.5}


def _falcon_mamba2(config: Config) -> Mamba2Spec:
    return replace(
        mamba2(config, config.get("mamba_d_ssm"), "mamba_d_ssm"),
        has_out_bias=first("projectors_bias", default=False)(config),
        has_norm=first("mamba_rms_norm", default=False)(config),
        is_norm_first=first("mamba_norm_before_gate", default=True)(config),
    )


def _falcon_multipliers(config: Config) -> MultiplierSpec:
    gate, out = map(float, first("mlp_multipliers", default=(1.0, 1.0))(config))
    factors = {
        name: float(first(f"{part}_multiplier", default=1.0)(config))
        for name, part in (
            ("attention_in",) * 2,
            ("attention_out",) * 2,
            ("state_in", "ssm_in"),
            ("state_out", "ssm_out"),
        )
    }
    parts = tuple(map(float, first("ssm_multipliers", default=(1.0,) * 5)(config)))
    return MultiplierSpec(state_parts=parts, mlp_gate=gate, mlp_out=out, **factors)


_NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_kinds(config: Config) -> list[str]:
    """The one block of each layer."""
    given = config.get("layers_block_type") or config.get("layer_types")
    if given is None:
        return [_NEMOTRON_KINDS[each] for each in config.get("hybrid_override_pattern", "ME*-")]
    return [OLD_KINDS.get(each, each) for each in given]


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
        min_step=number(first("mamba_dt_min", "time_step_min", default=0.001)(config)),
    )


_EVERY: Rule = lambda config: tuple(range(NUM_LAYERS(config)))  # noqa: E731
_UNBOUNDED = 1 << 17  # tokens of the longest sequence, where nothing of a model grows with it
_RANK_SHARE = 16  # hidden size to elements of the vector that steps come from
_STATE_ALONE: dict[str, Any] = {
    "intermediate_size": lambda c: c.get("expand", 2) * HIDDEN_SIZE(c),
    "max_position_embeddings": _UNBOUNDED,
    "norm_eps": first("layer_norm_epsilon", default=1e-5),
    "position": Position.NONE,
    "rotary": RotarySpec(),
    "has_mlp": False,
    "fixed": {"hidden_act": "silu"},
}
_STATE_ALONE_NAMES = {
    "prefix": "backbone.",
    "embedding": "embeddings",
    "attention_norm": "layers.{i}.norm",
    "final_norm": "norm_f",
}
_NEMOTRON_MIXER = {key: name.replace(".mamba.", ".mixer.") for key, name in MAMBA2_NAMES.items()}


def _mamba2_alone(config: Config) -> Mamba2Spec:
    heads, dim, inner = config["num_heads"], config["head_dim"], config.get("expand", 2) * HIDDEN_SIZE(config)
    limit = first("time_step_limit", default=(0.0, math.inf))(config)
    if heads * dim != inner:
        raise UnsupportedModel(f"num_heads {heads} of head_dim {dim} must be {inner}, expand * hidden_size")
    return Mamba2Spec(
        num_heads=heads,
        head_dim=dim,
        state_dim=config["state_size"],
        num_groups=config["n_groups"],
        conv_width=config["conv_kernel"],
        has_conv_bias=config.get("use_conv_bias", True),
        has_bias=config.get("use_bias", False),
        min_step=number(limit[0]),
        max_step=None if math.isinf(number(limit[1])) else number(limit[1]),
    )


def _step_rank(config: Config, key: str) -> Any:
    given = config.get(key, "auto")
    return -(-HIDDEN_SIZE(config) // _RANK_SHARE) if given == "auto" else given


_MAMBA_SIZE: Rule = lambda c: first("intermediate_size", default=c.get("expand", 2) * HIDDEN_SIZE(c))(c)  # noqa: E731


def _mamba(config: Config) -> MambaSpec:
    return MambaSpec(
        channels=_MAMBA_SIZE(config),
        state_dim=config["state_size"],
        conv_width=config["conv_kernel"],
        step_rank=_step_rank(config, "time_step_rank"),
        has_conv_bias=config.get("use_conv_bias", True),
        has_bias=config.get("use_bias", False),
    )


def _falcon_mamba(config: Config) -> MambaSpec:
    eps = config.get("mixer_rms_eps", 1e-6)
    return replace(_mamba(config), has_norms=True, has_norm_weights=False, norm_eps=eps)


def _jamba(config: Config) -> MambaSpec:
    return MambaSpec(
        channels=config["mamba_expand"] * HIDDEN_SIZE(config),
        state_dim=config["mamba_d_state"],
        conv_width=config["mamba_d_conv"],
        step_rank=_step_rank(config, "mamba_dt_rank"),
        has_conv_bias=config.get("mamba_conv_bias", True),
        has_bias=config.get("mamba_proj_bias", False),
        has_norms=True,
    )


def _periodic(part: str, *, is_other: bool) -> Rule:
    """Layers of which the config says by a period and an offset that they are of a kind, or all others."""

    def read(config: Config) -> tuple[int, ...]:
        period, offset = config[f"{part}_layer_period"], config[f"{part}_layer_offset"]
        return tuple(i for i in range(NUM_LAYERS(config)) if (i % period == offset) is not is_other)

    return read


def _mamba_names(stem: str) -> dict[str, str]:
    return {
        **mixer(stem, **{"in": "in_proj"}, conv="conv1d", select="x_proj", step="dt_proj", decay="A_log", skip="D"),
        **mixer(stem, out="out_proj", step_norm="dt_layernorm", b_norm="b_layernorm", c_norm="c_layernorm"),
    }


# Sizes of heads say no more than how many ranks there may be, for nothing attends.
_MAMBA: dict[str, Any] = _STATE_ALONE | {
    "intermediate_size": _MAMBA_SIZE,
    "num_heads": lambda c: max(1, HIDDEN_SIZE(c) // _RANK_SHARE),
    "num_kv_heads": lambda c: max(1, HIDDEN_SIZE(c) // _RANK_SHARE),
    "head_dim": _RANK_SHARE,
    "is_tied": first("tie_word_embeddings", default=True),
    "names": _STATE_ALONE_NAMES | _mamba_names("layers.{i}.mixer"),
}

ROWS: dict[str, ArchitectureRow] = {
    "Mamba2ForCausalLM": row(
        **_STATE_ALONE,
        num_heads=first("num_heads"),
        num_kv_heads=first("num_heads"),
        head_dim=first("head_dim"),
        **states(_EVERY, mamba2=_mamba2_alone),
        names=_STATE_ALONE_NAMES | _NEMOTRON_MIXER,
    ),
    "MambaForCausalLM": row(**_MAMBA, **states(_EVERY, mamba=_mamba)),
    "FalconMambaForCausalLM": row(**_MAMBA, **states(_EVERY, mamba=_falcon_mamba)),
    "JambaForCausalLM": row(
        position=Position.NONE,
        **states(_periodic("attn", is_other=True), mamba=_jamba),
        experts=when(
            lambda c: c["num_experts"] > 1,
            experts(
                intermediate_size=first("intermediate_size"),
                dense_layers=_periodic("expert", is_other=True),
                is_normalized=False,
                scale=1.0,
                shared_size=0,
            ),
            None,
        ),
        names={
            "mlp_norm": "layers.{i}.pre_ff_layernorm",
            **{each: f"layers.{{i}}.feed_forward.{each}_proj" for each in ("gate", "up", "down")},
            "router": "layers.{i}.feed_forward.router",
            "expert_gate": "layers.{i}.feed_forward.experts.{j}.gate_proj",
            "expert_up": "layers.{i}.feed_forward.experts.{j}.up_proj",
            "expert_gate_up": "layers.{i}.feed_forward.experts.gate_up_proj[{j}]",
            "expert_down": "layers.{i}.feed_forward.experts.{j}.down_proj"
            "|layers.{i}.feed_forward.experts.down_proj[{j}]",
            "final_norm": "final_layernorm",
            **_mamba_names("layers.{i}.mamba"),
        },
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
    "BambaForCausalLM": row(
        **ATTENTION_BIASES,
        has_mlp_bias=first("mlp_bias", default=False),
        norm_eps=first("rms_norm_eps", default=1e-5),
        rotary=lambda c: rotary(part=0.5)(_bamba_rotary(c)),
        **states(lambda c: _bamba_layers(c), mamba2=mamba2),
        names={
            "mlp_norm": "layers.{i}.pre_ff_layernorm",
            "gate": "layers.{i}.feed_forward.gate_proj",
            "up": "layers.{i}.feed_forward.up_proj",
            "down": "layers.{i}.feed_forward.down_proj",
            "final_norm": "final_layernorm",
            **MAMBA2_NAMES,
        },
    ),
    "FalconH1ForCausalLM": row(
        **ATTENTION_BIASES,
        has_mlp_bias=first("mlp_bias", default=False),
        norm_eps=first("rms_norm_eps", default=1e-5),
        embedding_scale=first("embedding_multiplier", default=1.0),
        logit_scale=first("lm_head_multiplier", default=1.0),
        attention_scale=lambda c: head_dim(c) ** -0.5 * first("key_multiplier", default=1.0)(c),
        multipliers=_falcon_multipliers,
        is_state_beside=True,
        **states(lambda c: tuple(range(NUM_LAYERS(c))), mamba2=_falcon_mamba2),
        names={
            "mlp_norm": "layers.{i}.pre_ff_layernorm",
            "gate": "layers.{i}.feed_forward.gate_proj",
            "up": "layers.{i}.feed_forward.up_proj",
            "down": "layers.{i}.feed_forward.down_proj",
            "final_norm": "final_layernorm",
            **MAMBA2_NAMES,
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
        **states(_nemotron_layers("linear_attention"), mamba2=_nemotron_mamba2),
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
            **_NEMOTRON_MIXER,
        },
    ),
}
