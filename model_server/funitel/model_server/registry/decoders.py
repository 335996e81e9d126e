"""The table of decoders: Hugging Face architecture -> its differences from a Llama. A new family is a row here.

Source for every row: the field names of the family's `config.json` and the tensor names of its checkpoints.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from funitel.model_server.registry.gemma import GEMMA
from funitel.model_server.registry.row import (
    HIDDEN_SIZE,
    NUM_HEADS,
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    Rule,
    activation,
    first,
    head_dim,
    inner,
    read_fields,
    rotary,
    row,
    when,
    windows,
    within,
)
from funitel.model_server.registry.sparse import sparse_rows
from funitel.model_server.spec.model_spec import (
    Activation,
    ExpertScore,
    ExpertsSpec,
    LatentSpec,
    Norm,
    NormPlacement,
    Position,
    QkNorm,
    QkvLayout,
    QueryGrowthSpec,
    RotarySpec,
)
from funitel.proto.errors import UnsupportedModel


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


def _dense_by_kind(num_first: int) -> Rule:
    """Layers without experts: those that `mlp_layer_types` names dense, else the first few."""

    def read(config: Config) -> tuple[int, ...]:
        kinds = config.get("mlp_layer_types")
        few = first("first_k_dense_replace", default=num_first)(config)
        return tuple(i for i in range(NUM_LAYERS(config)) if (kinds[i] == "dense" if kinds else i < few))

    return read


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


_SCALING = first("rope_parameters", "rope_scaling", default={})


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


def growing_queries(config: Config) -> QueryGrowthSpec | None:
    """How queries grow with positions, where the rotary scaling says so."""
    given = _SCALING(config)
    rate = given.get("llama_4_scaling_beta")
    if rate is None:
        return None
    return QueryGrowthSpec(
        rate=float(rate), period=int(given.get("original_max_position_embeddings") or config["max_position_embeddings"])
    )


def latent_scale(config: Config) -> float | None:
    """What scores are multiplied by, where yarn stretches them as well. Source: YaRN, arXiv 2309.00071."""
    given = _SCALING(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    every, factor = given.get("mscale_all_dim"), given.get("factor", 1.0)
    if kind == "default" or not every or factor <= 1:
        return None
    size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return float(size**-0.5 * (0.1 * every * math.log(factor) + 1) ** 2)


# What several rows share.
_LAYER: dict[str, Any] = {"norm": Norm.LAYER, "has_norm_bias": True}
_BIASES: dict[str, Any] = {"has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True}
_MAX_FURTHER = 64  # layers that predict tokens beyond the next; models have one to three


def _biases(rule: Rule) -> dict[str, Any]:
    return dict.fromkeys(_BIASES, rule)


def _further_layers(config: Config) -> range:
    """Those that predict tokens beyond the next: one at least, for not every config counts them."""
    count = max(first("num_nextn_predict_layers", "num_mtp_layers", default=1)(config), 1)
    if count > _MAX_FURTHER:
        raise ValueError(f"num_nextn_predict_layers must be at most {_MAX_FURTHER}, given {count}")
    return range(NUM_LAYERS(config), NUM_LAYERS(config) + count)


_TIED: dict[str, Any] = {"is_tied": first("tie_word_embeddings", default=True)}
_ATTENTION_BIAS = first("attention_bias", default=False)
_ATTENTION_BIASES: dict[str, Any] = {"has_qkv_bias": _ATTENTION_BIAS, "has_out_bias": _ATTENTION_BIAS}
# Experts chosen by scores that a learnt vector corrects; layers that predict further tokens lie behind the last.
_CORRECTED: dict[str, Any] = {
    "score": ExpertScore.SIGMOID,
    "is_normalized": first("norm_topk_prob", default=True),
    "num_groups": first("n_group", default=1),
    "num_chosen_groups": first("topk_group", default=1),
    "group_depth": 2,
}
_CORRECTED_NAMES: dict[str, Any] = {
    "router_correction": "layers.{i}.mlp.gate.e_score_correction_bias",
    "ignored": lambda c: (r"rotary_emb\.inv_freq$", *(rf"(^|\.)layers\.{i}\." for i in _further_layers(c))),
}
_DEEPSEEK: dict[str, Any] = {
    "head_dim": lambda c: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
    "num_kv_heads": 1,
    "has_qkv_bias": _ATTENTION_BIAS,
    "has_out_bias": _ATTENTION_BIAS,
    "has_mlp_bias": first("mlp_bias", default=False),
    "attention_scale": latent_scale,
    "latent": latent,
    "rotary": latent_rotary,
}
_COHERE: dict[str, Any] = {
    **_TIED,
    **_ATTENTION_BIASES,
    "norm": Norm.LAYER,
    "norm_eps": first("layer_norm_eps", default=1e-5),
    "is_parallel": True,
    "rotary": rotary(is_interleaved=True),
    "logit_scale": first("logit_scale", default=0.0625),
    "names": {"mlp_norm": ""},
}
_GRANITE: dict[str, Any] = _ATTENTION_BIASES | {
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
_GPT2: dict[str, Any] = (
    _LAYER
    | _BIASES
    | _TIED
    | {
        "norm_eps": first("layer_norm_epsilon", default=1e-5),
        "intermediate_size": inner("n_inner"),
        "is_gated": False,
        "position": Position.LEARNED,
    }
)
_GPT2_NAMES = {
    "prefix": "transformer.",
    "embedding": "wte",
    "positions": "wpe",
    "attention_norm": "h.{i}.ln_1",
    "qkv": "h.{i}.attn.c_attn",
    "out": "h.{i}.attn.c_proj",
    "mlp_norm": "h.{i}.ln_2",
    "up": "h.{i}.mlp.c_fc",
    "down": "h.{i}.mlp.c_proj",
    "final_norm": "ln_f",
    "ignored": (r"\.attn\.(masked_)?bias$",),
}
_FALCON_NAMES = {
    "prefix": "transformer.",
    "embedding": "word_embeddings",
    "attention_norm": "h.{i}.input_layernorm",
    "qkv": "h.{i}.self_attention.query_key_value",
    "out": "h.{i}.self_attention.dense",
    "mlp_norm": "h.{i}.post_attention_layernorm",
    "up": "h.{i}.mlp.dense_h_to_4h",
    "down": "h.{i}.mlp.dense_4h_to_h",
    "final_norm": "ln_f",
}
_SANDWICH_NAMES = {
    "attention_post_norm": "layers.{i}.post_attention_layernorm",
    "mlp_norm": "layers.{i}.pre_feedforward_layernorm",
    "mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}
_GEMMA: dict[str, Any] = (
    _TIED
    | _ATTENTION_BIASES
    | {
        "head_dim": first("head_dim", default=256),
        "norm_offset": 1.0,
        "activation": activation("hidden_activation", default="gelu_pytorch_tanh"),
        "embedding_scale": lambda c: c["hidden_size"] ** 0.5,
    }
)
_GEMMA2: dict[str, Any] = _GEMMA | {
    "norm_placement": NormPlacement.BOTH,
    "attention_scale": lambda c: first("query_pre_attn_scalar", default=256)(c) ** -0.5,
    "attention_softcap": first("attn_logit_softcapping", default=None),
    "logit_softcap": first("final_logit_softcapping", default=None),
}


def _asked_windows(is_windowed: Callable[[Config, int], bool]) -> Rule:
    """Windows of families that have none unless asked: in layers that `layer_types` names, else where `is_windowed`."""

    def read(config: Config) -> tuple[int | None, ...]:
        if not config.get("use_sliding_window"):
            return ()
        layers = range(NUM_LAYERS(config))
        kinds = ["sliding_attention" if is_windowed(config, i) else "full_attention" for i in layers]
        found: tuple[int | None, ...] = windows()({**config, "layer_types": config.get("layer_types") or kinds})
        return found

    return read


_LATER_WINDOWS = _asked_windows(lambda c, i: i >= c["max_window_layers"])


def _of_later_layers(config: Config) -> tuple[int | None, ...]:
    """Windows of dots1, which has them unasked."""
    found: tuple[int | None, ...] = _LATER_WINDOWS({**config, "use_sliding_window": True})
    return found


def _unrotated_layers(config: Config) -> tuple[int, ...]:
    """Of SmolLM3: those that a list marks with 0, or each so-many-th."""
    layers, step = range(NUM_LAYERS(config)), first("no_rope_layer_interval", default=4)(config)
    is_rotated = first("no_rope_layers", default=[(i + 1) % step for i in layers])(config)
    return tuple(i for i in layers if not is_rotated[i])


def _neo_kinds(config: Config) -> list[str]:
    """Of GPT-Neo: "local" or "global" for each layer, as listed or by patterns and how often each comes."""
    patterns = first("attention_types", default=())(config)
    repeated = (kind for kinds, times in patterns for _ in range(times) for kind in kinds)
    return list(config.get("attention_layers") or islice(repeated, NUM_LAYERS(config) + 1))


_IS_WIDENED = lambda c: c.get("word_embed_proj_dim", c["hidden_size"]) != c["hidden_size"]  # noqa: E731
_IS_PRE_NORM = first("do_layer_norm_before", default=True)
_HAS_TWO_NORMS = lambda c: c.get("new_decoder_architecture") and c.get("num_ln_in_parallel_attn") in (None, 2)  # noqa: E731


def _listed_or_spaced(config: Config) -> list[Any]:
    """Of Llama 4: for each layer whether it has rotary positions, as listed or all but each so-many-th."""
    step = first("no_rope_layer_interval", default=4)(config)
    return list(config.get("no_rope_layers") or ((i + 1) % step for i in range(NUM_LAYERS(config))))


def _chunk_sizes(config: Config) -> tuple[int | None, ...]:
    """Of Llama 4: layers attend within chunks that `layer_types` says so of, or that have rotary positions."""
    size = config.get("attention_chunk_size", 8192)
    kinds = config.get("layer_types") or [
        "chunked_attention" if is_rotated else "full_attention" for is_rotated in _listed_or_spaced(config)
    ]
    found = tuple(size if kind == "chunked_attention" else None for kind in kinds[: NUM_LAYERS(config)])
    return found if any(found) else ()


def _spaced_experts(config: Config) -> tuple[int, ...]:
    """Of Llama 4: the layers without experts."""
    step = first("interleave_moe_layer_step", default=1)(config)
    every = range(NUM_LAYERS(config))
    listed = config.get("moe_layers")
    return tuple(i for i in every if i not in (every[step - 1 :: step] if listed is None else listed))


_EXAONE_WINDOWS = windows(pattern=4, default=4096)


def _exaone_unrotated(config: Config) -> tuple[int, ...]:
    """Layers without rotary positions: those without a window, in models that have windows."""
    if config.get("sliding_window", 4096) is None:
        return ()
    found = _EXAONE_WINDOWS(config) or (None,) * NUM_LAYERS(config)
    return tuple(i for i, window in enumerate(found) if window is None)


_EXAONE: dict[str, Any] = {
    "norm_eps": first("rms_norm_eps", default=1e-5),
    "qk_norm": QkNorm.HEAD,
    "sliding_windows": _EXAONE_WINDOWS,
    "unrotated_layers": _exaone_unrotated,
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


_GRANITE_SWA: dict[str, Any] = _GRANITE | {
    "sliding_windows": _granite_windows,
    "has_sinks": True,
    "rotary": _rotary_by_layer(is_windowed=False),
    "window_rotary": _rotary_by_layer(is_windowed=True),
    "unrotated_layers": lambda c: tuple(i for i, base in enumerate(c.get("layer_rope_theta") or ()) if not base),
}
_OTHER_CORRECTION = {
    "router_correction": "layers.{i}.mlp.gate.e_score_correction_bias|layers.{i}.mlp.e_score_correction_bias"
}
_ERNIE: dict[str, Any] = {
    **_TIED,
    **_biases(first("use_bias", default=False)),
    "norm_eps": first("rms_norm_eps", default=1e-5),
    "rotary": rotary(base=5e5, is_interleaved=True),
}
_HUNYUAN: dict[str, Any] = _ATTENTION_BIASES | {
    "norm_eps": first("rms_norm_eps", default=1e-5),
    "rotary": scaled_once,
    "qk_norm": QkNorm.HEAD,
    "is_qk_norm_last": True,
}
_HUNYUAN_NAMES = {"q_norm": "layers.{i}.self_attn.query_layernorm", "k_norm": "layers.{i}.self_attn.key_layernorm"}


_GRANITE_SHARED: dict[str, Any] = {
    "experts": experts(is_normalized=True, shared_size=first("shared_intermediate_size", default=0)),
    "names": _GRANITE_MOE_NAMES
    | {
        "shared_gate": "",
        "shared_up": "",
        "shared_gate_up": "layers.{i}.shared_mlp.input_linear",
        "shared_down": "layers.{i}.shared_mlp.output_linear",
    },
}


def _afmoe_windows(config: Config) -> tuple[int | None, ...]:
    """Windows of all layers but each so-many-th."""
    step = config.get("global_attn_every_n_layers") or 4
    found: tuple[int | None, ...] = windows(pattern=step, default=1024)(config)
    return found or (None,) * NUM_LAYERS(config)


def _ernie_dense_layers(config: Config) -> tuple[int, ...]:
    """Layers without experts: those outside a range, and within it all but each so-many-th."""
    start, step = (config.get(f"moe_layer_{name}", 1) for name in ("start_index", "interval"))
    end = config.get("moe_layer_end_index", -1)
    end = NUM_LAYERS(config) - 1 if end == -1 else end
    return tuple(i for i in range(NUM_LAYERS(config)) if (i + 1) % step or not start <= i <= end)


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
    dense = _dense_by_kind(0)(config) if config.get("prefix_dense_sliding_window_pattern", 1) == 1 else ()
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
        dense_layers=_dense_by_kind(0)(config),
        score=score,
        is_normalized=score is ExpertScore.SOFTMAX or config.get("norm_topk_prob", True),
        scale=0.5 if is_mean else 1.0,
        shared_size=num_shared * config["intermediate_size"],
        shared_scale=0.5 if is_mean else 1.0,
    )


FAMILIES: dict[str, ArchitectureRow] = {
    "LlamaForCausalLM": row(**_ATTENTION_BIASES, has_mlp_bias=first("mlp_bias", default=False)),
    "MistralForCausalLM": row(sliding_windows=windows(default=4096)),
    "MinistralForCausalLM": row(sliding_windows=windows(default=4096)),
    "Ministral3ForCausalLM": row(
        norm_eps=first("rms_norm_eps", default=1e-5), sliding_windows=windows(), query_growth=growing_queries
    ),
    "ArceeForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
        is_gated=False,
        activation=activation("hidden_act", default="relu2"),
    ),
    "Jais2ForCausalLM": row(
        **_LAYER,
        **_biases(first("attention_bias", default=True)) | {"has_mlp_bias": first("mlp_bias", default=True)},
        norm_eps=first("layer_norm_eps", default=1e-5),
        is_gated=False,
        activation=activation("hidden_act", default="relu2"),
    ),
    "ApertusForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        is_gated=False,
        activation=activation("hidden_act", default="xielu"),
        rotary=rotary(base=1.2e7),
        qk_norm=QkNorm.HEAD,
        names={
            "attention_norm": "layers.{i}.attention_layernorm",
            "mlp_norm": "layers.{i}.feedforward_layernorm",
            "ignored": (r"rotary_emb\.inv_freq$", r"\.act_fn\.(beta|eps)$"),
        },
    ),
    "SeedOssForCausalLM": row(
        has_qkv_bias=first("attention_bias", default=True),
        has_out_bias=first("attention_out_bias", default=False),
        has_mlp_bias=first("mlp_bias", default=False),
    ),
    "NemotronForCausalLM": row(
        **_LAYER,
        **_ATTENTION_BIASES,
        norm_eps=first("norm_eps", default=1e-5),
        norm_offset=1.0,
        has_mlp_bias=first("mlp_bias", default=False),
        is_gated=False,
        activation=activation("hidden_act", default="relu2"),
        rotary=rotary(part=0.5),
    ),
    "HeliumForCausalLM": row(
        has_qkv_bias=_ATTENTION_BIAS,
        has_mlp_bias=first("mlp_bias", default=False),
        norm_eps=first("rms_norm_eps", default=1e-8),
        rotary=rotary(base=1e5, is_interleaved=True),
    ),
    "Exaone4ForCausalLM": row(**_EXAONE, norm_placement=NormPlacement.POST, names=_SANDWICH_NAMES),
    "ExaoneMoeForCausalLM": row(
        **_EXAONE,
        experts=experts(
            **_CORRECTED,
            dense_layers=_dense_by_kind(1),
            scale=lambda c: float(c.get("routed_scaling_factor", 2.5)),
            shared_size=lambda c: c.get("num_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=_OTHER_CORRECTION | {"ignored": (r"rotary_emb\.inv_freq$", r"^mtp\.")},
    ),
    "Ernie4_5ForCausalLM": row(**_ERNIE),
    "Ernie4_5_MoeForCausalLM": row(
        **_ERNIE,
        has_head_bias=first("use_bias", default=False),
        experts=experts(
            num_experts=first("num_experts", "moe_num_experts"),
            num_chosen=first("num_experts_per_tok", "moe_k"),
            dense_layers=_ernie_dense_layers,
            is_normalized=True,
            scale=1.0,
            shared_size=lambda c: c.get("moe_num_shared_experts", 2) * c["moe_intermediate_size"],
        ),
        names={
            "router_correction": "layers.{i}.mlp.moe_statics.e_score_correction[0].bias"
            "|layers.{i}.mlp.gate.moe_statics.e_score_correction[0].bias",
            "ignored": (r"rotary_emb\.inv_freq$", r"(^|\.)mtp_"),
        },
    ),
    "Dots1ForCausalLM": row(
        **_ATTENTION_BIASES,
        qk_norm=QkNorm.HEAD,
        sliding_windows=_of_later_layers,
        experts=experts(**_CORRECTED | {"is_normalized": first("norm_topk_prob", default=False)}),
        names=_OTHER_CORRECTION,
    ),
    "PhimoeForCausalLM": row(
        **_LAYER,
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_head_bias=first("lm_head_bias", default=False),
        sliding_windows=windows(),
        rotary=scaled_twice,
        experts=experts(
            num_chosen=2,  # whatever the config says
            score=ExpertScore.SPARSEMIXER,
            is_normalized=False,
            scale=1.0,
            jitter=first("router_jitter_noise", default=0.01),
        ),
        names={
            "router": "layers.{i}.block_sparse_moe.gate|layers.{i}.mlp.router",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2|layers.{i}.mlp.experts.down_proj[{j}]",
        },
    ),
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
    "MiniMaxM2ForCausalLM": row(
        head_dim=first("head_dim", default=128),
        rotary=lambda c: rotary(
            base=5e6, part=c["rotary_dim"] / first("head_dim", default=128)(c) if c.get("rotary_dim") else 1.0
        )(c),
        qk_norm=QkNorm.WHOLE,
        experts=experts(score=ExpertScore.SIGMOID, is_normalized=True, scale=1.0),
        names={
            "router": "layers.{i}.block_sparse_moe.gate|layers.{i}.mlp.gate",
            "router_correction": "layers.{i}.block_sparse_moe.e_score_correction_bias"
            "|layers.{i}.mlp.e_score_correction_bias",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2|layers.{i}.mlp.experts.down_proj[{j}]",
        },
    ),
    "Glm4MoeLiteForCausalLM": row(
        **_DEEPSEEK,
        norm_eps=first("rms_norm_eps", default=1e-5),
        experts=experts(
            **_CORRECTED,
            dense_layers=_dense_by_kind(1),
            scale=lambda c: float(c.get("routed_scaling_factor", 1.8)),
            shared_size=lambda c: c.get("n_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=_CORRECTED_NAMES,
    ),
    "GptOssForCausalLM": row(
        **_biases(first("attention_bias", default=True)),
        norm_eps=first("rms_norm_eps", default=1e-5),
        rotary=rotary(base=1.5e5),
        sliding_windows=windows(pattern=2, default=128),
        has_sinks=True,
        activation=Activation.QUICK_GELU,
        gate_limit=first("swiglu_limit", default=7.0),
        gate_shift=1.0,
        experts=experts(
            is_normalized=True,
            intermediate_size=first("intermediate_size"),
            dense_layers=(),
            scale=1.0,
            has_bias=True,
            has_router_bias=True,
        ),
        names={
            "router": "layers.{i}.mlp.router",
            "expert_gate": "",
            "expert_up": "",
            "expert_gate_up": "layers.{i}.mlp.experts.gate_up_proj[{j}]",
            "expert_down": "layers.{i}.mlp.experts.down_proj[{j}]",
            "is_stack_transposed": True,
            "is_stack_interleaved": True,
        },
        fixed={"swiglu_alpha": 1.702},
    ),
    "Llama4ForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        intermediate_size=first("intermediate_size_mlp"),
        rotary=rotary(base=5e5, is_interleaved=True),
        unrotated_layers=lambda c: tuple(
            i for i, turns in enumerate(_listed_or_spaced(c)[: NUM_LAYERS(c)]) if not turns
        ),
        qk_norm=when(first("use_qk_norm", default=True), QkNorm.PLAIN, QkNorm.NONE),
        is_qk_norm_last=first("use_qk_norm", default=True),
        chunk_sizes=_chunk_sizes,
        query_growth=when(
            first("attn_temperature_tuning", default=True),
            lambda c: QueryGrowthSpec(
                rate=float(c.get("attn_scale", 0.1)),
                period=c.get("floor_scale", 8192),
                offset=1,
                is_unrotated_only=True,
            ),
            None,
        ),
        experts=experts(
            intermediate_size=first("intermediate_size"),
            dense_layers=_spaced_experts,
            score=ExpertScore.SIGMOID,
            is_normalized=False,
            scale=1.0,
            shared_size=first("intermediate_size"),
            is_input_scaled=True,
        ),
        names={
            "gate": "layers.{i}.feed_forward.gate_proj",
            "up": "layers.{i}.feed_forward.up_proj",
            "down": "layers.{i}.feed_forward.down_proj",
            "router": "layers.{i}.feed_forward.router",
            "expert_gate": "layers.{i}.feed_forward.experts.{j}.gate_proj",  # as quantisers leave them
            "expert_up": "layers.{i}.feed_forward.experts.{j}.up_proj",
            "expert_gate_up": "layers.{i}.feed_forward.experts.gate_up_proj[{j}]",
            "expert_down": "layers.{i}.feed_forward.experts.{j}.down_proj"
            "|layers.{i}.feed_forward.experts.down_proj[{j}]",
            "is_stack_transposed": True,
            "shared_gate": "layers.{i}.feed_forward.shared_expert.gate_proj",
            "shared_up": "layers.{i}.feed_forward.shared_expert.up_proj",
            "shared_down": "layers.{i}.feed_forward.shared_expert.down_proj",
        },
    ),
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
    "Qwen2ForCausalLM": row(has_qkv_bias=True, sliding_windows=_LATER_WINDOWS),
    "Qwen3ForCausalLM": row(
        **_ATTENTION_BIASES,
        head_dim=first("head_dim", default=128),
        qk_norm=QkNorm.HEAD,
        sliding_windows=_LATER_WINDOWS,
    ),
    "GemmaForCausalLM": row(
        **_GEMMA
        | {
            "activation": when(  # what its first checkpoints call gelu is the approximation
                lambda c: c.get("hidden_act") == "gelu",
                Activation.GELU_TANH,
                activation("hidden_act", default="gelu_pytorch_tanh"),
            )
        }
    ),
    "Gemma2ForCausalLM": row(**_GEMMA2, sliding_windows=windows(pattern=2, default=4096), names=_SANDWICH_NAMES),
    "VaultGemmaForCausalLM": row(
        **_GEMMA2 | {"norm_placement": NormPlacement.PRE},
        sliding_windows=windows(pattern=2, default=4096),
        names={"mlp_norm": "layers.{i}.pre_feedforward_layernorm"},
    ),
    "Gemma3ForCausalLM": row(
        **_GEMMA2,
        qk_norm=QkNorm.HEAD,
        rotary=rotary(base=1e6),
        window_rotary=rotary(
            base_keys=("rope_local_base_freq",), scaling_keys=("rope_parameters",), layers="sliding_attention"
        ),
        sliding_windows=windows(pattern=6, default=4096),
        names=_SANDWICH_NAMES,
    ),
    "PhiForCausalLM": row(
        **_LAYER,
        **_BIASES,
        has_head_bias=True,
        is_parallel=True,
        is_gated=False,
        activation=activation("hidden_act", default="gelu_new"),
        rotary=rotary(part=0.5),
        qk_norm=lambda c: QkNorm.HEAD if c.get("qk_layernorm") else QkNorm.NONE,
        has_qk_norm_bias=True,
        names={
            "out": "layers.{i}.self_attn.dense",
            "q_norm": "layers.{i}.self_attn.q_layernorm",
            "k_norm": "layers.{i}.self_attn.k_layernorm",
            "mlp_norm": "",
            "up": "layers.{i}.mlp.fc1",
            "down": "layers.{i}.mlp.fc2",
            "final_norm": "final_layernorm",
        },
    ),
    "Phi3ForCausalLM": row(
        sliding_windows=windows(),
        names={"qkv": "layers.{i}.self_attn.qkv_proj", "gate_up": "layers.{i}.mlp.gate_up_proj"},
    ),
    "GPT2LMHeadModel": row(
        **_GPT2,
        activation=activation("activation_function", default="gelu_new"),
        attention_scale=lambda c: None if c.get("scale_attn_weights", True) else 1.0,
        is_scaled_by_layer=first("scale_attn_by_inverse_layer_idx", default=False),
        names=_GPT2_NAMES | {"is_transposed": True},
    ),
    "GPTBigCodeForCausalLM": row(
        **_GPT2,
        activation=activation("activation_function", default="gelu_pytorch_tanh"),
        attention_scale=lambda c: None if c.get("scale_attn_weights", True) else 1.0,
        num_kv_heads=lambda c: 1 if c.get("multi_query", True) else NUM_HEADS(c),
        qkv_layout=QkvLayout.GROUPED,
        names=_GPT2_NAMES,
    ),
    "GPTJForCausalLM": row(
        **_LAYER,
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        has_mlp_bias=True,
        has_head_bias=True,
        is_parallel=True,
        is_gated=False,
        intermediate_size=inner("n_inner"),
        activation=activation("activation_function", default="gelu_new"),
        rotary=lambda c: rotary(part=first("rotary_dim", default=64)(c) / head_dim(c), is_interleaved=True)(c),
        names=_GPT2_NAMES
        | {
            "qkv": "",
            "q": "h.{i}.attn.q_proj",
            "k": "h.{i}.attn.k_proj",
            "v": "h.{i}.attn.v_proj",
            "out": "h.{i}.attn.out_proj",
            "mlp_norm": "",
            "up": "h.{i}.mlp.fc_in",
            "down": "h.{i}.mlp.fc_out",
        },
    ),
    "GPTNeoForCausalLM": row(
        **_LAYER,
        **_TIED,
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        has_out_bias=True,
        has_mlp_bias=True,
        is_gated=False,
        intermediate_size=inner("intermediate_size"),
        activation=activation("activation_function", default="gelu_new"),
        position=Position.LEARNED,
        attention_scale=1.0,
        sliding_windows=lambda c: tuple(
            c.get("window_size", 256) if kind == "local" else None for kind in _neo_kinds(c)
        ),
        names=_GPT2_NAMES
        | {
            "qkv": "",
            "q": "h.{i}.attn.attention.q_proj",
            "k": "h.{i}.attn.attention.k_proj",
            "v": "h.{i}.attn.attention.v_proj",
            "out": "h.{i}.attn.attention.out_proj",
            "ignored": (r"\.attention\.(masked_)?bias$",),
        },
    ),
    "GPTNeoXForCausalLM": row(
        **_LAYER,
        has_qkv_bias=first("attention_bias", default=True),
        has_out_bias=first("attention_bias", default=True),
        has_mlp_bias=True,
        is_parallel=first("use_parallel_residual", default=True),
        is_gated=False,
        activation=activation("hidden_act", default="gelu"),
        rotary=rotary(part=0.25),
        qkv_layout=QkvLayout.GROUPED,
        names={
            "prefix": "gpt_neox.",
            "embedding": "embed_in",
            "qkv": "layers.{i}.attention.query_key_value",
            "out": "layers.{i}.attention.dense",
            "up": "layers.{i}.mlp.dense_h_to_4h",
            "down": "layers.{i}.mlp.dense_4h_to_h",
            "final_norm": "final_layer_norm",
            "head": "embed_out",
            "ignored": (r"\.attention\.((masked_)?bias|rotary_emb\.inv_freq)$",),
        },
    ),
    "Starcoder2ForCausalLM": row(
        **_LAYER,
        **_TIED,
        **_biases(first("use_bias", default=True)),
        norm_eps=first("norm_epsilon", default=1e-5),
        is_gated=False,
        activation=activation("hidden_act", default="gelu_pytorch_tanh"),
        sliding_windows=windows(),
        names={"up": "layers.{i}.mlp.c_fc", "down": "layers.{i}.mlp.c_proj"},
    ),
    "OPTForCausalLM": row(
        norm=Norm.LAYER,
        **_TIED,
        **_biases(first("enable_bias", default=True)),
        has_norm_weight=first("layer_norm_elementwise_affine", default=True),
        has_norm_bias=first("layer_norm_elementwise_affine", default=True),
        norm_eps=1e-5,
        norm_placement=when(_IS_PRE_NORM, NormPlacement.PRE, NormPlacement.AFTER),
        intermediate_size=first("ffn_dim"),
        is_gated=False,
        activation=activation("activation_function", default="relu"),
        position=Position.LEARNED,
        position_offset=2,
        embedding_size=when(_IS_WIDENED, first("word_embed_proj_dim"), None),
        names={
            "prefix": "model.decoder.",
            "embedding_in": when(_IS_WIDENED, "project_in", ""),
            "embedding_out": when(_IS_WIDENED, "project_out", ""),
            "positions": "embed_positions",
            "attention_norm": "layers.{i}.self_attn_layer_norm",
            "attention_post_norm": "layers.{i}.self_attn_layer_norm",
            "out": "layers.{i}.self_attn.out_proj",
            "mlp_norm": "layers.{i}.final_layer_norm",
            "mlp_post_norm": "layers.{i}.final_layer_norm",
            "up": "layers.{i}.fc1",
            "down": "layers.{i}.fc2",
            "final_norm": when(_IS_PRE_NORM, "final_layer_norm", ""),
        },
        fixed={"_remove_final_layer_norm": False},
    ),
    "XGLMForCausalLM": row(
        **_LAYER,
        **_BIASES,
        **_TIED,
        norm_eps=1e-5,
        intermediate_size=first("ffn_dim"),
        is_gated=False,
        activation=activation("activation_function", default="gelu"),
        position=Position.SINUSOIDAL,
        position_offset=2,
        embedding_scale=lambda c: HIDDEN_SIZE(c) ** 0.5 if c.get("scale_embedding", True) else 1.0,
        names={
            "attention_norm": "layers.{i}.self_attn_layer_norm",
            "out": "layers.{i}.self_attn.out_proj",
            "mlp_norm": "layers.{i}.final_layer_norm",
            "up": "layers.{i}.fc1",
            "down": "layers.{i}.fc2",
            "final_norm": "layer_norm",
            "ignored": (r"embed_positions\.weights$",),
        },
    ),
    "BloomForCausalLM": row(
        **_LAYER,
        **_BIASES,
        **_TIED,
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        intermediate_size=inner(),
        max_position_embeddings=first("seq_length", default=2048),
        is_gated=False,
        activation=activation(default="gelu_new"),
        position=Position.ALIBI,
        qkv_layout=QkvLayout.GROUPED,
        names=_FALCON_NAMES | {"embedding_norm": "word_embeddings_layernorm"},
        fixed={"apply_residual_connection_post_layernorm": False},
    ),
    "FalconForCausalLM": row(
        **_LAYER,
        **_TIED,
        **_biases(first("bias", default=False)),
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        num_kv_heads=when(
            lambda c: c.get("new_decoder_architecture") or not c.get("multi_query", True),
            first("num_kv_heads", "n_head_kv", "num_attention_heads", "n_head"),
            1,
        ),
        intermediate_size=inner("ffn_hidden_size"),
        max_position_embeddings=first("max_position_embeddings", default=2048),
        is_parallel=lambda c: bool(c.get("new_decoder_architecture")) or c.get("parallel_attn", True),
        is_gated=False,
        activation=activation("activation", default="gelu"),
        position=when(first("alibi", default=False), Position.ALIBI, Position.ROTARY),
        alibi_scale=lambda c: head_dim(c) ** -0.5,
        qkv_layout=QkvLayout.GROUPED,
        names=_FALCON_NAMES
        | {
            "attention_norm": when(_HAS_TWO_NORMS, "h.{i}.ln_attn", "h.{i}.input_layernorm"),
            "mlp_norm": when(
                _HAS_TWO_NORMS,
                "h.{i}.ln_mlp",
                when(first("parallel_attn", default=True), "", "h.{i}.post_attention_layernorm"),
            ),
        },
    ),
    "MptForCausalLM": row(
        **_TIED,
        norm=Norm.LAYER,
        norm_eps=first("layer_norm_epsilon", default=1e-5),
        intermediate_size=lambda c: c.get("expansion_ratio", 4) * HIDDEN_SIZE(c),
        is_gated=False,
        activation=activation(default="gelu"),
        position=Position.ALIBI,
        alibi_bias_max=within("attn_config", "alibi_bias_max", default=8),
        attention_scale=within("attn_config", "softmax_scale"),
        qkv_clip=within("attn_config", "clip_qkv"),
        names={
            "prefix": "transformer.",
            "embedding": "wte",
            "attention_norm": "blocks.{i}.norm_1",
            "qkv": "blocks.{i}.attn.Wqkv",
            "out": "blocks.{i}.attn.out_proj",
            "mlp_norm": "blocks.{i}.norm_2",
            "up": "blocks.{i}.ffn.up_proj",
            "down": "blocks.{i}.ffn.down_proj",
            "final_norm": "norm_f",
        },
        fixed={"no_bias": True, "logit_scale": None},
    ),
    "StableLmForCausalLM": row(
        **_LAYER,
        norm_eps=first("layer_norm_eps", default=1e-5),
        has_qkv_bias=first("use_qkv_bias", default=False),
        is_parallel=first("use_parallel_residual", default=False),
        rotary=rotary(part=0.25),
        qk_norm=lambda c: QkNorm.EACH if c.get("qk_layernorm") else QkNorm.NONE,
        names={
            "q_norm": "layers.{i}.self_attn.q_layernorm.norms.{j}",
            "k_norm": "layers.{i}.self_attn.k_layernorm.norms.{j}",
            "mlp_norm": when(first("use_parallel_residual", default=False), "", "layers.{i}.post_attention_layernorm"),
        },
    ),
    "OlmoForCausalLM": row(
        norm=Norm.LAYER,
        norm_eps=1e-5,
        has_norm_weight=False,
        **_ATTENTION_BIASES,
        qkv_clip=first("clip_qkv", default=None),
    ),
    "Olmo3ForCausalLM": row(
        norm_placement=NormPlacement.POST,
        norm_eps=first("rms_norm_eps", default=1e-5),
        **_ATTENTION_BIASES,
        qk_norm=QkNorm.WHOLE,
        rotary=rotary(base=5e5),
        window_rotary=rotary(base=5e5, base_keys=(), scaling_keys=("rope_parameters",), layers="sliding_attention"),
        sliding_windows=windows(pattern=4, default=4096),
        names=_SANDWICH_NAMES,
    ),
    "Olmo2ForCausalLM": row(
        norm_placement=NormPlacement.POST,
        norm_eps=first("rms_norm_eps", default=1e-5),
        **_ATTENTION_BIASES,
        qk_norm=QkNorm.WHOLE,
        names=_SANDWICH_NAMES,
    ),
    "CohereForCausalLM": row(**_COHERE, qk_norm=lambda c: QkNorm.EACH if c.get("use_qk_norm") else QkNorm.NONE),
    "Cohere2ForCausalLM": row(
        **_COHERE,
        sliding_windows=windows(pattern=4, default=4096),
        unrotated_layers=lambda c: tuple(
            i for i, window in enumerate(windows(pattern=4, default=4096)(c)) if window is None
        ),
    ),
    "GraniteForCausalLM": row(**_GRANITE, has_mlp_bias=first("mlp_bias", default=False)),
    "SmolLM3ForCausalLM": row(
        **_TIED,
        **_ATTENTION_BIASES,
        has_mlp_bias=first("mlp_bias", default=False),
        unrotated_layers=_unrotated_layers,
        sliding_windows=_asked_windows(lambda c, i: i in _unrotated_layers(c)),
    ),
    "MiniCPMForCausalLM": row(
        **_TIED,
        **_ATTENTION_BIASES,
        embedding_scale=first("scale_emb", default=1.0),
        residual_scale=lambda c: c.get("scale_depth", math.sqrt(NUM_LAYERS(c))) / math.sqrt(NUM_LAYERS(c)),
        logit_scale=lambda c: c.get("dim_model_base", HIDDEN_SIZE(c)) / HIDDEN_SIZE(c),
    ),
    "InternLM3ForCausalLM": row(
        has_qkv_bias=first("qkv_bias", default=False),
        has_out_bias=first("bias", default=False),
        has_mlp_bias=first("bias", default=False),
    ),
    "IQuestCoderForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
        fixed={"clip_qkv": None, "use_sliding_window": False},
    ),
    "InternLM2ForCausalLM": row(
        has_qkv_bias=first("bias", default=False),
        has_out_bias=first("bias", default=False),
        qkv_layout=QkvLayout.GROUPED,
        names={
            "embedding": "tok_embeddings",
            "attention_norm": "layers.{i}.attention_norm",
            "qkv": "layers.{i}.attention.wqkv",
            "out": "layers.{i}.attention.wo",
            "mlp_norm": "layers.{i}.ffn_norm",
            "gate": "layers.{i}.feed_forward.w1",
            "up": "layers.{i}.feed_forward.w3",
            "down": "layers.{i}.feed_forward.w2",
            "head": "output",
        },
    ),
    "BaichuanForCausalLM": row(
        # The 13B models have no rotary positions, and no context but the tokenizer's; the second generation, told by
        # its vocabulary, normalises the head.
        position=lambda c: Position.ROTARY if "max_position_embeddings" in c else Position.ALIBI,
        is_head_normalized=lambda c: c["vocab_size"] == 125696,
        names={"qkv": "layers.{i}.self_attn.W_pack"},
    ),
    "ChatGLMModel": row(
        vocab_size=first("padded_vocab_size", "vocab_size"),
        num_kv_heads=lambda c: c["multi_query_group_num"] if c.get("multi_query_attention") else NUM_HEADS(c),
        intermediate_size=first("ffn_hidden_size"),
        max_position_embeddings=first("seq_length"),
        norm=lambda c: Norm.RMS if c.get("rmsnorm", True) else Norm.LAYER,
        has_norm_bias=lambda c: not c.get("rmsnorm", True),
        norm_eps=first("layernorm_epsilon", default=1e-5),
        has_qkv_bias=lambda c: bool(c.get("add_qkv_bias") or c.get("add_bias_linear")),
        has_out_bias=first("add_bias_linear", default=False),
        has_mlp_bias=first("add_bias_linear", default=False),
        rotary=lambda c: rotary(base=1e4 * c.get("rope_ratio", 1), part=0.5, is_interleaved=True)(c),
        names={
            "prefix": "transformer.",
            "embedding": "embedding.word_embeddings",
            "attention_norm": "encoder.layers.{i}.input_layernorm",
            "qkv": "encoder.layers.{i}.self_attention.query_key_value",
            "out": "encoder.layers.{i}.self_attention.dense",
            "mlp_norm": "encoder.layers.{i}.post_attention_layernorm",
            "gate_up": "encoder.layers.{i}.mlp.dense_h_to_4h",
            "down": "encoder.layers.{i}.mlp.dense_4h_to_h",
            "final_norm": "encoder.final_layernorm",
            "head": "transformer.output_layer",
            "ignored": (r"rotary_pos_emb\.inv_freq$",),
        },
        fixed={"apply_residual_connection_post_layernorm": False, "post_layer_norm": True, "original_rope": True},
    ),
    "GlmForCausalLM": row(
        has_qkv_bias=_ATTENTION_BIAS,
        rotary=rotary(part=0.5, is_interleaved=True),
        names={"gate_up": "layers.{i}.mlp.gate_up_proj"},
    ),
    "Glm4ForCausalLM": row(
        has_qkv_bias=_ATTENTION_BIAS,
        norm_placement=NormPlacement.BOTH,
        rotary=rotary(part=0.5, is_interleaved=True),
        names={
            "attention_post_norm": "layers.{i}.post_self_attn_layernorm",
            "mlp_post_norm": "layers.{i}.post_mlp_layernorm",
            "gate_up": "layers.{i}.mlp.gate_up_proj",
        },
    ),
    "MixtralForCausalLM": row(
        norm_eps=first("rms_norm_eps", default=1e-5),
        sliding_windows=windows(),
        experts=experts(is_normalized=True),
        names={
            "router": "layers.{i}.block_sparse_moe.gate|layers.{i}.mlp.gate",
            "expert_gate": "layers.{i}.block_sparse_moe.experts.{j}.w1",
            "expert_up": "layers.{i}.block_sparse_moe.experts.{j}.w3",
            "expert_down": "layers.{i}.block_sparse_moe.experts.{j}.w2|layers.{i}.mlp.experts.down_proj[{j}]",
        },
    ),
    "Qwen2MoeForCausalLM": row(
        has_qkv_bias=first("qkv_bias", default=True),
        sliding_windows=_asked_windows(lambda c, i: i % 2 == 0 and i < c["max_window_layers"]),
        experts=experts(shared_size=first("shared_expert_intermediate_size")),
        names={
            "shared_gate": "layers.{i}.mlp.shared_expert.gate_proj",
            "shared_up": "layers.{i}.mlp.shared_expert.up_proj",
            "shared_down": "layers.{i}.mlp.shared_expert.down_proj",
            "shared_share": "layers.{i}.mlp.shared_expert_gate",
        },
    ),
    "Qwen3MoeForCausalLM": row(
        **_ATTENTION_BIASES,
        qk_norm=QkNorm.HEAD,
        sliding_windows=when(first("use_sliding_window", default=False), windows(), ()),
        experts=experts(),
    ),
    "OlmoeForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        qk_norm=QkNorm.WHOLE,
        experts=experts(),
        fixed={"clip_qkv": None},
    ),
    "GraniteMoeForCausalLM": row(
        **_GRANITE,
        experts=experts(is_normalized=True),
        names=_GRANITE_MOE_NAMES,
    ),
    "GraniteMoeSharedForCausalLM": row(**_GRANITE, **_GRANITE_SHARED),
    "GraniteMoeSWAForCausalLM": row(**_GRANITE_SWA, **_GRANITE_SHARED),
    "GraniteSWAForCausalLM": row(
        **_TIED,
        **_GRANITE_SWA,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
    ),
    "FlexOlmoForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_placement=NormPlacement.POST,
        qk_norm=QkNorm.WHOLE,
        rotary=rotary(base=5e5),
        experts=experts(),
        names=_SANDWICH_NAMES,
    ),
    "MellumForCausalLM": row(
        **_ATTENTION_BIASES,
        qk_norm=QkNorm.HEAD,
        rotary=rotary(base=5e5, base_keys=(), scaling_keys=("rope_parameters",)),
        window_rotary=rotary(base_keys=(), scaling_keys=("rope_parameters",), layers="sliding_attention"),
        sliding_windows=windows(pattern=1, default=1024),
        experts=experts(dense_layers=_dense_by_kind(0), is_normalized=first("norm_topk_prob", default=True)),
        names={"ignored": (r"rotary_emb\.inv_freq$", r"^mtp\.")},
    ),
    "AfmoeForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        norm_placement=NormPlacement.BOTH,
        embedding_scale=lambda c: c["hidden_size"] ** 0.5 if c.get("mup_enabled") else 1.0,
        qk_norm=QkNorm.HEAD,
        sliding_windows=_afmoe_windows,
        unrotated_layers=lambda c: tuple(i for i, window in enumerate(_afmoe_windows(c)) if window is None),
        has_output_gate=True,
        experts=experts(
            score=ExpertScore.SIGMOID,
            is_normalized=True,
            dense_layers=lambda c: tuple(i for i in range(NUM_LAYERS(c)) if i < c.get("num_dense_layers", 1)),
            scale=lambda c: float(c.get("route_scale", 1.0)),
            shared_size=lambda c: c.get("num_shared_experts", 2) * c["moe_intermediate_size"],
        ),
        names={
            "attention_post_norm": "layers.{i}.post_attention_layernorm",
            "mlp_norm": "layers.{i}.pre_mlp_layernorm",
            "mlp_post_norm": "layers.{i}.post_mlp_layernorm",
            "router": "layers.{i}.mlp.router.gate",
            "router_correction": "layers.{i}.mlp.expert_bias",
        },
    ),
    "SolarOpenForCausalLM": row(
        has_qkv_bias=_ATTENTION_BIAS,
        norm_eps=first("rms_norm_eps", default=1e-5),
        intermediate_size=first("moe_intermediate_size"),  # of no layer
        rotary=rotary(base=1e6),
        experts=experts(
            **_CORRECTED,
            dense_layers=(),
            shared_size=lambda c: c.get("n_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=_OTHER_CORRECTION,
    ),
    "HYV3ForCausalLM": row(
        **_ATTENTION_BIASES,
        norm_eps=first("rms_norm_eps", default=1e-5),
        has_mlp_bias=first("mlp_bias", default=False),
        rotary=rotary(base=11158840.0),
        qk_norm=QkNorm.HEAD,
        experts=experts(
            score=ExpertScore.SIGMOID,
            is_normalized=True,
            dense_layers=_dense_by_kind(1),
            scale=lambda c: float(c.get("router_scaling_factor", 2.826)),
            shared_size=lambda c: c.get("num_shared_experts", 1) * c["moe_intermediate_size"],
        ),
        names=_CORRECTED_NAMES
        | {
            "router": "layers.{i}.mlp.gate|layers.{i}.mlp.router.gate",
            "router_correction": "layers.{i}.mlp.e_score_correction_bias|layers.{i}.mlp.expert_bias",
            "shared_gate": "layers.{i}.mlp.shared_experts.gate_proj|layers.{i}.mlp.shared_mlp.gate_proj",
            "shared_up": "layers.{i}.mlp.shared_experts.up_proj|layers.{i}.mlp.shared_mlp.up_proj",
            "shared_down": "layers.{i}.mlp.shared_experts.down_proj|layers.{i}.mlp.shared_mlp.down_proj",
        },
    ),
    "Mistral4ForCausalLM": row(
        **_DEEPSEEK,
        query_growth=growing_queries,
        experts=experts(
            is_normalized=first("norm_topk_prob", default=True),
            num_groups=first("n_group", default=1),
            num_chosen_groups=first("topk_group", default=1),
            group_depth=2,
        ),
    ),
    "MiniCPM3ForCausalLM": row(
        **_TIED,
        **_DEEPSEEK
        | {
            "latent": lambda c: latent({**c, "v_head_dim": c.get("v_head_dim") or HIDDEN_SIZE(c) // NUM_HEADS(c)}),
            "rotary": lambda c: latent_rotary({**c, "rope_interleave": False}),
        },
        norm_eps=first("rms_norm_eps", default=1e-5),
        embedding_scale=first("scale_emb", default=12),
        residual_scale=lambda c: (c.get("scale_depth", 1.4) or NUM_LAYERS(c) ** 0.5) / NUM_LAYERS(c) ** 0.5,
        logit_scale=lambda c: (c.get("dim_model_base", 256) or HIDDEN_SIZE(c)) / HIDDEN_SIZE(c),
    ),
    "DeepseekV2ForCausalLM": row(
        **_DEEPSEEK,
        experts=experts(
            is_normalized=False,
            num_groups=lambda c: c["n_group"] if c.get("topk_method") == "group_limited_greedy" else 1,
            num_chosen_groups=lambda c: c["topk_group"] if c.get("topk_method") == "group_limited_greedy" else 1,
        ),
        fixed={"scoring_func": "softmax", "moe_layer_freq": 1},
    ),
    "DeepseekV3ForCausalLM": row(
        **_DEEPSEEK,
        experts=experts(**_CORRECTED),
        names=_CORRECTED_NAMES,
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    "Glm4MoeForCausalLM": row(
        has_qkv_bias=_ATTENTION_BIAS,
        norm_eps=first("rms_norm_eps", default=1e-5),
        rotary=rotary(part=0.5),
        qk_norm=when(first("use_qk_norm", default=False), QkNorm.HEAD, QkNorm.NONE),
        experts=experts(**_CORRECTED),
        names=_CORRECTED_NAMES,
    ),
    "QWenLMHeadModel": row(
        has_qkv_bias=True,
        intermediate_size=lambda c: c["intermediate_size"] // 2,
        max_position_embeddings=first("seq_length"),
        rotary=rotary(),
        names={
            "prefix": "transformer.",
            "embedding": "wte",
            "attention_norm": "h.{i}.ln_1",
            "qkv": "h.{i}.attn.c_attn",
            "out": "h.{i}.attn.c_proj",
            "mlp_norm": "h.{i}.ln_2",
            "gate": "h.{i}.mlp.w2",
            "up": "h.{i}.mlp.w1",
            "down": "h.{i}.mlp.c_proj",
            "final_norm": "ln_f",
            "ignored": (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$"),
        },
        fixed={"no_bias": True},
    ),
}
FAMILIES["BaiChuanForCausalLM"] = FAMILIES["BaichuanForCausalLM"]
FAMILIES["ChatGLMForConditionalGeneration"] = FAMILIES["ChatGLMModel"]
FAMILIES |= GEMMA | sparse_rows(FAMILIES["DeepseekV3ForCausalLM"], _dense_by_kind(3))
