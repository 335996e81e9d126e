"""Rules of layers that keep a state: which they are, and what Mamba 2 is in most configs."""

import math
from collections.abc import Callable
from typing import Any

from funitel.model_server.registry.rules.row import HIDDEN_SIZE, NUM_LAYERS, Config, Rule, first
from funitel.model_server.spec.state_layers import Mamba2Spec
from funitel.proto.errors import UnsupportedModel

OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def layers_of(kind: str, usual: Callable[[Config, int], bool]) -> Rule:
    """Layers that `layer_types` names `kind`, or without that list the `usual` ones."""

    def read(config: Config) -> tuple[int, ...]:
        every = range(NUM_LAYERS(config))
        given = config.get("layer_types") or config.get("layers_block_type")
        kinds = [OLD_KINDS.get(each, each) for each in given or ()]
        found = tuple(i for i in every if (kinds[i] == kind if kinds else usual(config, i)))
        return found

    return read


def spaced(period: int) -> Callable[[Config, int], bool]:
    """All but each so-many-th."""
    return lambda config, i: bool((i + 1) % first("full_attention_interval", default=period)(config))


def states(layers: Rule, **kind: Rule) -> dict[str, Any]:
    """Fields of layers with a state, of a `kind` where there are any."""
    (name, read), *_ = kind.items()
    return {"state_layers": layers, name: lambda config: read(config) if layers(config) else None}


def mixer(stem: str, **names: str) -> dict[str, str]:
    """Names of tensors of layers with a state, each `state_NAME` below `stem`."""
    return {f"state_{name}": f"{stem}.{own}" for name, own in names.items()}


def number(value: Any) -> float:
    """A number as transformers writes it: what JSON has no literal for as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def mamba2(config: Config, size: int | None = None, source: str = "mamba_expand * hidden_size") -> Mamba2Spec:
    """Mamba 2 with `size` elements of all heads, which come from `source`; None: so many times the hidden size."""
    heads, inner = config["mamba_n_heads"], config["mamba_expand"] * HIDDEN_SIZE(config) if size is None else size
    dim = config.get("mamba_d_head", "auto")
    limit = config.get("time_step_limit") or (0.0, math.inf)
    if (inner // heads if dim == "auto" else dim) * heads != inner:
        raise UnsupportedModel(f"mamba_n_heads {heads} of mamba_d_head {dim} must be {inner}, {source}")
    return Mamba2Spec(
        num_heads=heads,
        head_dim=inner // heads,
        state_dim=config["mamba_d_state"],
        num_groups=config["mamba_n_groups"],
        conv_width=config["mamba_d_conv"],
        has_conv_bias=config.get("mamba_conv_bias", True),
        has_bias=config.get("mamba_proj_bias", False),
        min_step=number(limit[0]),
        max_step=None if math.isinf(number(limit[1])) else number(limit[1]),
    )


MAMBA2_NAMES = mixer(
    "layers.{i}.mamba",
    **{"in": "in_proj"},
    conv="conv1d",
    decay="A_log",
    step_bias="dt_bias",
    skip="D",
    norm="norm",
    out="out_proj",
)
"""Names of the tensors of Mamba 2, in most checkpoints."""
