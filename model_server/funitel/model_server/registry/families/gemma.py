"""Rows of Gemma."""

from dataclasses import replace
from typing import Any

from funitel.model_server.registry.rules.common import ATTENTION_BIASES, SANDWICH_NAMES, TIED
from funitel.model_server.registry.rules.row import (
    NUM_LAYERS,
    ArchitectureRow,
    Config,
    Rule,
    activation,
    first,
    rotary,
    row,
    when,
    windows,
)
from funitel.model_server.spec.layer_spec import AltUpSpec, LayerEmbeddingSpec, LayerSpec
from funitel.model_server.spec.model_spec import Activation, ExpertsSpec, NormPlacement, QkNorm, RotarySpec
from funitel.proto.errors import UnsupportedModel

_GEMMA: dict[str, Any] = (
    TIED
    | ATTENTION_BIASES
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

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _kinds(step: int, *, ends_full: bool) -> Rule:
    """What each layer is: as listed, or all but each so-many-th slide; the last of some models never does."""

    def read(config: Config) -> list[str]:
        count = NUM_LAYERS(config)
        kinds = list(config.get("layer_types") or [_SLIDING if (i + 1) % step else _FULL for i in range(count)])
        return [*kinds[: count - 1], _FULL] if ends_full else kinds

    return read


def _windows(kinds: Rule, default: int) -> Rule:
    return lambda config: windows(default=default)({**config, "layer_types": kinds(config)})


def _sources(config: Config, kinds: list[str], num_shared: int) -> list[int | None]:
    """The layer that each has keys and values of: for the last layers the last one before them of their kind."""
    first_shared = len(kinds) - num_shared
    last = {kind: i for i, kind in enumerate(kinds[:first_shared])}
    if num_shared and set(kinds) != set(last):
        raise UnsupportedModel(f"num_kv_shared_layers {num_shared} leaves no layer of some kind with keys and values")
    return [None if i < first_shared else last[kind] for i, kind in enumerate(kinds)]


def _unread_tensors(config: Config, num_shared: int) -> tuple[str, ...]:
    """Checkpoints may have keys and values of layers that have another's."""
    count = NUM_LAYERS(config)
    shared = "|".join(str(i) for i in range(count - num_shared, count))
    of_shared = (rf"(^|\.)layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",) if shared else ()
    return (r"rotary_emb\.inv_freq$", *of_shared)


# Gemma 3n and 4: layers that differ in heads and share keys and values, and embeddings for each layer.
_LAYERED: dict[str, Any] = {
    **TIED,
    **ATTENTION_BIASES,
    "head_dim": first("head_dim", default=256),
    "norm_placement": NormPlacement.BOTH,
    "qk_norm": QkNorm.HEAD,
    "has_value_norm": True,
    "attention_scale": 1.0,
    "activation": activation("hidden_activation", default="gelu_pytorch_tanh"),
    "embedding_scale": lambda c: c["hidden_size"] ** 0.5,
}


def _layer_embeddings(config: Config) -> LayerEmbeddingSpec | None:
    size = config.get("hidden_size_per_layer_input", 256)
    vocab_size = first("vocab_size_per_layer_input", default=262144)(config)
    media_token = min(first("pad_token_id", default=0)(config), vocab_size - 1)
    return LayerEmbeddingSpec(size=size, vocab_size=vocab_size, media_token=media_token) if size else None


# Gemma 4
_GEMMA4_KINDS = _kinds(6, ends_full=True)
_GEMMA4_NUM_SHARED = first("num_kv_shared_layers", default=0)
_HAS_EXPERTS = first("enable_moe_block", default=False)
_GEMMA4_ROPE = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _sizes_of_layer(config: Config, index: int, kind: str) -> dict[str, Any]:
    """Fields that a layer has in place of the model's: as listed, or those of layers that do not slide."""
    listed = config.get("per_layer_config")
    if listed is not None:
        found: dict[str, Any] = {int(key): value for key, value in listed.items()}.get(index) or {}
        return found
    if kind != _FULL:
        return {}
    num_kv_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return {"head_dim": config.get("global_head_dim", 512), "num_key_value_heads": num_kv_heads}


def _gemma4_layers(config: Config) -> tuple[LayerSpec, ...]:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("config.json says use_bidirectional_attention='all', only text read forward is served")
    kinds = _GEMMA4_KINDS(config)
    sources = _sources(config, kinds, _GEMMA4_NUM_SHARED(config))
    is_doubled, has_key_values = config.get("use_double_wide_mlp"), bool(config.get("attention_k_eq_v"))
    layers = []
    for i, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
        sizes = _sizes_of_layer(config, i, kind)
        is_shared = source is not None
        layers.append(
            LayerSpec(
                head_dim=sizes.get("head_dim"),
                num_kv_heads=sizes.get("num_key_value_heads"),
                intermediate_size=2 * config["intermediate_size"] if is_doubled and is_shared else None,
                kv_source=source,
                has_key_values=has_key_values and kind == _FULL and not is_shared,
            )
        )
    return tuple(layers) if set(layers) != {LayerSpec()} else ()


def _gemma4_rotary(config: Config) -> RotarySpec:
    """Of layers that do not slide: their heads have a size of their own."""
    kinds = _GEMMA4_KINDS(config)
    last = len(kinds) - 1
    dim = _sizes_of_layer(config, last, kinds[last]).get("head_dim") or config["head_dim"]
    given = {"rope_parameters": config.get("rope_parameters") or _GEMMA4_ROPE, "head_dim": dim}
    found: RotarySpec = rotary(base=1e6, base_keys=(), scaling_keys=("rope_parameters",))({**config, **given})
    return replace(found, dims=found.dims or dim)


def _gemma4_window_rotary(config: Config) -> RotarySpec:
    given = {"rope_parameters": config.get("rope_parameters") or _GEMMA4_ROPE}
    found: RotarySpec = rotary(base_keys=(), scaling_keys=("rope_parameters",), layers=_SLIDING)({**config, **given})
    return found


def _gemma4_experts(config: Config) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=config["num_experts"],
        num_chosen=config["top_k_experts"],
        intermediate_size=config["moe_intermediate_size"],
        is_normalized=True,
        is_beside_mlp=True,
    )


_GEMMA4: dict[str, Any] = _LAYERED | {
    "rotary": _gemma4_rotary,
    "window_rotary": _gemma4_window_rotary,
    "logit_softcap": first("final_logit_softcapping", default=None),
    "layers": _gemma4_layers,
    "has_layer_scale": True,
}
_GEMMA4_NAMES = SANDWICH_NAMES | {"ignored": lambda c: _unread_tensors(c, _GEMMA4_NUM_SHARED(c))}


# Gemma 3n
_GEMMA3N_KINDS = _kinds(5, ends_full=False)
_GEMMA3N_NUM_SHARED = first("num_kv_shared_layers", default=15)


def _of_each_layer(value: Any, config: Config) -> list[Any]:
    count = NUM_LAYERS(config)
    found = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(found) != count:
        raise UnsupportedModel(f"a list for each of {count} layers is needed, given {len(found)} entries")
    return found


def _gemma3n_layers(config: Config) -> tuple[LayerSpec, ...]:
    count = NUM_LAYERS(config)
    sparse = config.get("activation_sparsity_pattern")
    if sparse is None:
        sparse = [0.95 if i < 10 < count else 0.0 for i in range(count)]
    sources = _sources(config, _GEMMA3N_KINDS(config), _GEMMA3N_NUM_SHARED(config))
    sizes = _of_each_layer(config["intermediate_size"], config)
    each = zip(sources, sizes, _of_each_layer(sparse, config), strict=True)
    return tuple(
        LayerSpec(kv_source=source, intermediate_size=size, gate_sparsity=float(share)) for source, size, share in each
    )


def _gemma3n_rotary(layers: str, base: float, base_key: str) -> Rule:
    def read(config: Config) -> RotarySpec:
        given = dict((config.get("rope_parameters") or {}).get(layers) or {})
        if layers == _FULL:
            given |= config.get("rope_scaling") or {}
        found: RotarySpec = rotary(base=base, base_keys=(base_key,))({**config, "rope_parameters": given})
        return found

    return read


ROWS: dict[str, ArchitectureRow] = {
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
    "Gemma2ForCausalLM": row(**_GEMMA2, sliding_windows=windows(pattern=2, default=4096), names=SANDWICH_NAMES),
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
        names=SANDWICH_NAMES,
    ),
    "Gemma3nForCausalLM": row(
        **_LAYERED,
        intermediate_size=lambda c: _of_each_layer(c["intermediate_size"], c)[0],
        sliding_windows=_windows(_GEMMA3N_KINDS, 512),
        rotary=_gemma3n_rotary(_FULL, 1e6, "rope_theta"),
        window_rotary=_gemma3n_rotary(_SLIDING, 1e4, "rope_local_base_freq"),
        logit_softcap=first("final_logit_softcapping", default=30.0),
        layers=_gemma3n_layers,
        layer_embeddings=_layer_embeddings,
        laurel_rank=first("laurel_rank", default=64),
        altup=lambda c: AltUpSpec(
            num_streams=c.get("altup_num_inputs", 4),
            active=c.get("altup_active_idx", 0),
            is_output_scaled=c.get("altup_correct_scale", True),
        ),
        names=SANDWICH_NAMES | {"ignored": lambda c: _unread_tensors(c, _GEMMA3N_NUM_SHARED(c))},
    ),
    "Gemma4UnifiedForCausalLM": row(**_GEMMA4, sliding_windows=_windows(_GEMMA4_KINDS, 1024), names=_GEMMA4_NAMES),
    "Gemma4ForCausalLM": row(
        **_GEMMA4,
        sliding_windows=_windows(_GEMMA4_KINDS, 512),
        layer_embeddings=_layer_embeddings,
        experts=when(_HAS_EXPERTS, _gemma4_experts, None),
        names=_GEMMA4_NAMES
        | {
            "mlp_norm": when(_HAS_EXPERTS, "", SANDWICH_NAMES["mlp_norm"]),
            "dense_norm": when(_HAS_EXPERTS, SANDWICH_NAMES["mlp_norm"], ""),
            "dense_post_norm": when(_HAS_EXPERTS, "layers.{i}.post_feedforward_layernorm_1", ""),
            "experts_norm": when(_HAS_EXPERTS, "layers.{i}.pre_feedforward_layernorm_2", ""),
            "experts_post_norm": when(_HAS_EXPERTS, "layers.{i}.post_feedforward_layernorm_2", ""),
            "router": "layers.{i}.router.proj",
            "router_scale": when(_HAS_EXPERTS, "layers.{i}.router.scale", ""),
            "expert_scale": when(_HAS_EXPERTS, "layers.{i}.router.per_expert_scale", ""),
            "expert_gate": "",
            "expert_up": "",
            "expert_gate_up": "layers.{i}.experts.gate_up_proj[{j}]",
            "expert_down": "layers.{i}.experts.down_proj[{j}]",
        },
    ),
}
