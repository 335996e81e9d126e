"""Define a row of the table of decoders: fields of a ModelSpec, each a value or a way to read it off config.json.

Knows what families call the same thing, and no family.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from funitel.model_server.spec.model_spec import ROTARY_KINDS, Activation, ModelSpec, RotaryScaling, RotarySpec
from funitel.model_server.spec.tensor_names import TensorNames
from funitel.proto.errors import UnsupportedModel

Config = Mapping[str, Any]
Rule = Callable[[Config], Any]  # reads one field of a spec off a config

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "quick_gelu": Activation.QUICK_GELU,
    "relu2": Activation.RELU_SQUARED,
    "xielu": Activation.XIELU,
}
_ROTARY_ALIASES = {"su": "longrope", "dynamic_ntk": "dynamic"}
_MISSING = object()


@contextmanager
def reading_config(architecture: str) -> Iterator[None]:
    """While a spec is read off a `config.json`: a field that is missing or malformed is an UnsupportedModel."""
    try:
        yield
    except KeyError as error:
        raise UnsupportedModel(f"config.json of {architecture} lacks the field {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        raise UnsupportedModel(f"config.json of {architecture} has a value of the wrong kind: {error}") from error


def first(*keys: str, default: Any = _MISSING) -> Rule:
    """The value of the first key that is there and not null; KeyError naming all of them where none is."""

    def read(config: Config) -> Any:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if value is _MISSING:
            raise KeyError(" or ".join(keys))
        return value

    return read


def activation(*keys: str, default: str) -> Rule:
    """An activation by transformers' name for it."""
    name_of = first(*keys, default=default)

    def read(config: Config) -> Activation:
        name = name_of(config)
        if name not in _ACTIVATIONS:
            known = ", ".join(sorted(_ACTIVATIONS))
            raise UnsupportedModel(f"activation {name!r} is not supported; known: {known}")
        return _ACTIVATIONS[name]

    return read


def when(condition: Rule, then: Any, otherwise: Any) -> Rule:
    """One of two values, or of two rules."""

    def read(config: Config) -> Any:
        chosen = then if condition(config) else otherwise
        return chosen(config) if callable(chosen) else chosen

    return read


def within(part: str, key: str, *, default: Any = None) -> Rule:
    """A value of an object in the config."""
    return lambda config: (config.get(part) or {}).get(key, default)


def rotary(
    *,
    part: float = 1.0,
    base: float = 10000.0,
    base_keys: tuple[str, ...] = ("rope_theta", "rotary_emb_base"),
    scaling_keys: tuple[str, ...] = ("rope_parameters", "rope_scaling"),
    layers: str = "full_attention",
    is_interleaved: bool = False,
) -> Rule:
    """Rotary positions as transformers 4 and 5 write them.

    Args:
        part: share of a head that turns, where the config does not say.
        base: where the config does not say.
        base_keys: where the config says the base, if not with the scaling.
        scaling_keys: where the config says the scaling.
        layers: which kind of layer, where the config gives each kind its own.
        is_interleaved: whether neighbours turn together.
    """

    def read(config: Config) -> RotarySpec:
        given = first(*scaling_keys, default={})(config)
        given = given.get(layers, given)
        share = first("partial_rotary_factor", "rotary_pct", default=part)({**config, **given})
        is_spread = (given.get("rope_type") or given.get("type")) == "proportional"  # over all elements
        dims = head_dim(config) if is_spread else int(head_dim(config) * share)
        scaling = _scaling(config, given)
        return RotarySpec(
            base=float(given.get("rope_theta") or first(*base_keys, default=base)(config)),
            dims=dims if dims != head_dim(config) else None,
            is_interleaved=is_interleaved,
            scaling=replace(scaling, share=share) if is_spread else scaling,
        )

    return read


def _scaling(config: Config, given: Config) -> RotaryScaling:
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = _ROTARY_ALIASES.get(kind, kind)
    if kind not in ROTARY_KINDS:
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; known: {', '.join(ROTARY_KINDS)}")
    if kind == "default":
        return RotaryScaling()
    context = 8192 if kind == "linear" else CONTEXT(config)
    trained = int(first("original_max_position_embeddings", default=context)({**given, **config}))
    if kind == "dynamic":
        trained = context
    is_ratio = kind in ("longrope", "yarn") and given.get("factor") is None
    factor = context / trained if is_ratio else float(given.get("factor", 1.0))
    return RotaryScaling(
        kind=kind,
        factor=factor,
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_max_position=trained,
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        is_truncated=bool(given.get("truncate", True)),
        amplitude=_amplitude(kind, factor, trained, given),
        short_factors=tuple(map(float, given.get("short_factor", ()))),
        long_factors=tuple(map(float, given.get("long_factor", ()))),
    )


def _amplitude(kind: str, factor: float, trained: int, given: Config) -> float:
    """What multiplies cosines and sines. Source: YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if kind == "longrope" and factor > 1:
        return math.sqrt(1 + math.log(factor) / math.log(trained))
    if kind == "yarn" and factor > 1:
        scale, every = given.get("mscale"), given.get("mscale_all_dim")
        if scale and every:
            return float((0.1 * scale * math.log(factor) + 1) / (0.1 * every * math.log(factor) + 1))
        return 0.1 * math.log(factor) + 1
    return 1.0


def windows(*, pattern: int | None = None, default: int | None = None) -> Rule:
    """Sliding windows by layer: of those the config names sliding, of all but each `pattern`-th, or of all."""

    def read(config: Config) -> tuple[int | None, ...]:
        window = config.get("sliding_window", default)
        num_layers = NUM_LAYERS(config)
        kinds = config.get("layer_types")
        if not window or config.get("use_sliding_window") is False:
            return ()
        if kinds is None:
            period = config.get("sliding_window_pattern", pattern)
            kinds = ["full_attention" if period and (i + 1) % period == 0 else "sliding" for i in range(num_layers)]
        by_layer = tuple(None if kind == "full_attention" else window for kind in kinds)
        return by_layer if any(by_layer) else ()

    return read


HIDDEN_SIZE = first("n_embed", "hidden_size", "n_embd", "d_model")
NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NUM_LAYERS = first(*NUM_LAYERS_KEYS)
NUM_HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
NUM_HEADS = first(*NUM_HEADS_KEYS)
CONTEXT = first("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


def head_dim(config: Config) -> int:
    """Elements of a head."""
    return int(first("head_dim", "kv_channels", default=0)(config) or HIDDEN_SIZE(config) // NUM_HEADS(config))


def inner(*keys: str) -> Rule:
    """Hidden units of an MLP, four times the hidden size where the config does not say."""
    return lambda config: first(*keys, default=4 * HIDDEN_SIZE(config))(config)


_SHARED: dict[str, Any] = {
    "architecture": lambda c: c["architectures"][0],
    "vocab_size": first("vocab_size"),
    "hidden_size": HIDDEN_SIZE,
    "num_layers": NUM_LAYERS,
    "num_heads": NUM_HEADS,
    "num_kv_heads": lambda c: c.get("num_key_value_heads") or NUM_HEADS(c),
    "head_dim": head_dim,
    "intermediate_size": first("intermediate_size"),
    "max_position_embeddings": CONTEXT,
    "norm_eps": first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", default=1e-6),
    "activation": activation("hidden_act", default="silu"),
    "rotary": rotary(),
    "is_tied": first("tie_word_embeddings", default=False),
}


@dataclass(frozen=True)
class ArchitectureRow:
    """One architecture: what differs from a Llama.

    `fields` are those of a ModelSpec and `names` those of its TensorNames, each a value or a rule. `fixed` are values
    that the config must have, if any: others change what the model computes in a way no spec can say.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, config: Config) -> ModelSpec:
        """The spec of a checkpoint. Raises: UnsupportedModel, and what reading a malformed config raises."""
        for key, value in self.fixed.items():
            if config.get(key, value) != value:
                raise UnsupportedModel(f"config.json says {key}={config[key]!r}, only {value!r} is supported")
        names = TensorNames(**read_fields(self.names, config))
        return ModelSpec(**read_fields(_SHARED | dict(self.fields), config), names=names)


def read_fields(rules: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The fields of something, each a value or a rule, as a config has them."""
    return {name: _read(name, rule, config) if callable(rule) else rule for name, rule in rules.items()}


def _read(name: str, rule: Rule, config: Config) -> Any:
    try:
        return rule(config)
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        raise ValueError(f"{name}: {error}") from error


def row(
    *, names: Mapping[str, Any] | None = None, fixed: Mapping[str, Any] | None = None, **fields: Any
) -> ArchitectureRow:
    """A row, its fields as keywords."""
    return ArchitectureRow(fields, names or {}, fixed or {})
