"""The table: Hugging Face architecture -> ModelSpec. A new dense family is a row here, never an `if` elsewhere.

Source for every mapping: the field names of the family's `config.json`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from funitel.model_server.spec import Activation, ModelSpec, Norm, Position, RotaryScaling, TensorNames
from funitel.proto.errors import UnsupportedModel

Config = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; known: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _rotary(config: Config) -> tuple[float, RotaryScaling]:
    """Read the rotary base and scaling; transformers 5 keeps both in `rope_parameters`, 4 in two fields."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; known: default, linear, llama3")
    return base, RotaryScaling(
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings", 8192)),
    )


def _llama_like(config: Config, **differences: Any) -> ModelSpec:
    """The common ground of Llama, Mistral, Qwen2 and Qwen3: RMS norm, rotary, gated MLP, grouped heads."""
    base, scaling = _rotary(config)
    num_heads = config["num_attention_heads"]
    common: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
        "intermediate_size": config["intermediate_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": _activation(config.get("hidden_act", "silu")),
        "rotary_base": base,
        "rotary_scaling": scaling,
        "is_tied": config.get("tie_word_embeddings", False),
    }
    return ModelSpec(**(common | differences))


def _llama(config: Config) -> ModelSpec:
    bias = config.get("attention_bias", False)
    return _llama_like(config, has_qkv_bias=bias, has_out_bias=bias, has_mlp_bias=config.get("mlp_bias", False))


def _mistral(config: Config) -> ModelSpec:
    window = config.get("sliding_window", 4096)  # the family's default; an explicit null means none
    return _llama_like(config, sliding_windows=(window,) * config["num_hidden_layers"] if window else ())


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    if not config.get("use_sliding_window") or not config.get("sliding_window"):
        return ()
    first = config.get("max_window_layers", 0)
    return tuple(config["sliding_window"] if i >= first else None for i in range(config["num_hidden_layers"]))


def _qwen2(config: Config) -> ModelSpec:
    return _llama_like(config, has_qkv_bias=True, sliding_windows=_qwen_windows(config))


def _qwen3(config: Config) -> ModelSpec:
    bias = config.get("attention_bias", False)
    return _llama_like(
        config,
        head_dim=config.get("head_dim") or 128,
        has_qkv_bias=bias,
        has_out_bias=bias,
        has_qk_norm=True,
        sliding_windows=_qwen_windows(config),
    )


def _gpt2(config: Config) -> ModelSpec:
    if config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True):
        raise UnsupportedModel("GPT-2 with unusual attention scaling is not supported")
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=config["vocab_size"],
        hidden_size=config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        num_kv_heads=config["n_head"],
        head_dim=config["n_embd"] // config["n_head"],
        intermediate_size=config.get("n_inner") or 4 * config["n_embd"],
        max_position_embeddings=config["n_positions"],
        norm=Norm.LAYER,
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        activation=_activation(config.get("activation_function", "gelu_new")),
        is_gated=False,
        position=Position.LEARNED,
        has_qkv_bias=True,
        has_out_bias=True,
        has_mlp_bias=True,
        is_tied=config.get("tie_word_embeddings", True),
        names=TensorNames(
            prefix="transformer.",
            embedding="wte",
            positions="wpe",
            attention_norm="h.{i}.ln_1",
            qkv="h.{i}.attn.c_attn",
            out="h.{i}.attn.c_proj",
            mlp_norm="h.{i}.ln_2",
            up="h.{i}.mlp.c_fc",
            down="h.{i}.mlp.c_proj",
            final_norm="ln_f",
            is_transposed=True,
            ignored=(r"\.attn\.(masked_)?bias$",),
        ),
    )


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GPT2LMHeadModel": _gpt2,
}


def spec_of(config: Config) -> ModelSpec:
    """Derive the spec of a checkpoint from its `config.json`.

    Raises:
        UnsupportedModel: the architecture, or a choice it makes, is in no row of the table, or a field is missing.
    """
    architectures = config.get("architectures") or []
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None:
        raise UnsupportedModel(
            f"architecture {', '.join(architectures) or 'not named in config.json'} is not supported; "
            f"known: {', '.join(sorted(FAMILIES))}"
        )
    try:
        spec = family(config)
    except KeyError as error:
        raise UnsupportedModel(f"config.json of {architectures[0]} lacks the field {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UnsupportedModel(f"config.json of {architectures[0]} has a value of the wrong kind: {error}") from error
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"config.json of {architectures[0]}: {spec.num_heads} query heads do not divide into "
            f"{spec.num_kv_heads} key-value heads"
        )
    return spec
