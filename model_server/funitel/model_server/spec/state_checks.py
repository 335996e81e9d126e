"""What is wrong with the layers of a spec that keep a state, each problem as field, value and limit."""

from collections.abc import Iterator

from funitel.model_server.spec.layer_spec import MultiplierSpec
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.state_layers import (
    STATE_KINDS,
    DeltaNetSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)

MAX_HEADS = 1 << 16
MAX_DIM = 1 << 13  # elements of a head's keys or values
MAX_WIDTH = 64  # tokens that a convolution reads
MAX_STATE_BYTES = 1 << 38  # of a sequence
_NUM_PARTS = 5  # of what Mamba 2 makes of hidden states


def state_problems(spec: ModelSpec) -> Iterator[str]:
    """Problems of the layers with a state, or none where there are no such layers."""
    given = [name for name in STATE_KINDS if getattr(spec, name) is not None]
    if not spec.state_layers:
        for name in ("mlp_layers", "is_state_beside"):
            if getattr(spec, name):
                yield f"{name} needs state_layers"
        if not spec.has_mlp:
            yield "has_mlp false needs state_layers"
        if given:
            yield f"state_layers must name the layers of {given[0]}, given none"
        return
    if len(given) != 1:
        yield f"state_layers need one of {', '.join(STATE_KINDS)}, given {', '.join(given) or 'none'}"
        return
    yield from _layer_problems(spec)
    kind, state = given[0], getattr(spec, given[0])
    problems = [f"{kind}.{problem}" for problem in _size_problems(spec, state)]
    yield from problems
    if not problems:
        yield from _byte_problems(spec, kind, state)
    yield from _name_problems(spec)


def _layer_problems(spec: ModelSpec) -> Iterator[str]:
    layers = spec.state_layers
    outside = next((i for i in layers if not 0 <= i < spec.num_layers), None)
    if outside is not None:
        yield f"state_layers must be within 0..{spec.num_layers - 1}, given {outside}"
    if len(set(layers)) < len(layers):
        yield "state_layers must name each layer once"
    odd = next((i for i in spec.mlp_layers if not 0 <= i < spec.num_layers or i in layers), None)
    if odd is not None:
        yield f"mlp_layers must be within 0..{spec.num_layers - 1} and none of state_layers, given {odd}"
    if spec.is_parallel:
        yield "state_layers need is_parallel false"
    if spec.is_state_beside and spec.mlp_layers:
        yield "is_state_beside needs mlp_layers empty"


def multiplier_problems(spec: ModelSpec, factors: MultiplierSpec) -> Iterator[str]:
    """Multipliers of what the model does not have."""
    for name in ("attention_in", "state_in"):
        if getattr(factors, name) != 1.0 and not spec.is_state_beside:
            yield f"multipliers.{name} needs is_state_beside true, given {getattr(factors, name)}"
    has_two_blocks = spec.has_mlp and not (spec.mlp_layers or spec.is_parallel or spec.laurel_rank or spec.altup)
    for name in ("attention_out", "state_out", "attention_residual", "state_residual", "mlp_residual"):
        is_alone = name.endswith("out") and spec.is_state_beside
        if getattr(factors, name) != 1.0 and not (is_alone or has_two_blocks):
            yield f"multipliers.{name} needs layers of a first block and an MLP behind it"
    for name in ("attention_residual", "state_residual"):
        if getattr(factors, name) != 1.0 and spec.is_state_beside:
            yield f"multipliers.{name} needs is_state_beside false, given {getattr(factors, name)}"
    for name in ("mlp_gate", "mlp_out"):
        if getattr(factors, name) != 1.0 and not spec.is_gated:
            yield f"multipliers.{name} needs is_gated true, given {getattr(factors, name)}"
    parts = factors.state_parts
    if parts and (spec.mamba2 is None or len(parts) != _NUM_PARTS):
        yield f"multipliers.state_parts must be empty or have {_NUM_PARTS} entries, of mamba2, given {len(parts)}"


def _size_problems(spec: ModelSpec, state: StateSpec) -> Iterator[str]:
    least = 2 if isinstance(state, ShortConvSpec) else 1  # it keeps nothing but inputs of the convolution
    if not least <= state.conv_width <= MAX_WIDTH:
        yield f"conv_width must be within {least}..{MAX_WIDTH}, given {state.conv_width}"
    if isinstance(state, ShortConvSpec):
        if state.channels != spec.hidden_size:
            yield f"channels must be the hidden size of {spec.hidden_size}, given {state.channels}"
        return
    sizes: dict[str, tuple[int, int]] = {}
    if isinstance(state, DeltaNetSpec):
        heads, groups = "num_value_heads", "num_key_heads"
        sizes = {"key_dim": (state.key_dim, MAX_DIM), "value_dim": (state.value_dim, MAX_DIM)}
        if state.rank is not None:
            sizes["rank"] = state.rank, MAX_DIM
        if state.beta_scale <= 0:
            yield f"beta_scale must be > 0, given {state.beta_scale}"
    elif isinstance(state, LightningSpec):
        heads, groups = "num_heads", "num_groups"
        sizes = {"head_dim": (state.head_dim, MAX_DIM)}
    elif isinstance(state, MambaSpec):
        heads, groups = "channels", "num_groups"
        sizes = {"state_dim": (state.state_dim, MAX_DIM), "step_rank": (state.step_rank, MAX_DIM)}
    elif isinstance(state, Mamba2Spec):
        heads, groups = "num_heads", "num_groups"
        sizes = {"head_dim": (state.head_dim, MAX_DIM), "state_dim": (state.state_dim, MAX_DIM)}
        if state.min_step < 0 or (state.max_step is not None and state.max_step < state.min_step):
            yield f"min_step and max_step must be 0 <= min <= max, given {state.min_step} and {state.max_step}"
    sizes |= {heads: (state.num_heads, MAX_HEADS), groups: (state.num_groups, MAX_HEADS)}
    for name, (size, most) in sizes.items():
        if not 1 <= size <= most:
            yield f"{name} must be within 1..{most}, given {size}"
    if state.num_groups > 0 and state.num_heads % state.num_groups:
        yield f"{heads} must be a multiple of {groups}, given {state.num_heads} and {state.num_groups}"


def _byte_problems(spec: ModelSpec, kind: str, state: StateSpec) -> Iterator[str]:
    keys, values = state.matrix
    channels = state.num_channels(state.num_heads, state.num_groups)
    elements = channels * (state.conv_width - 1) + state.num_heads * keys * values
    num_bytes = 4 * elements * len(spec.state_layers)
    if num_bytes > MAX_STATE_BYTES:
        yield f"{kind} needs {num_bytes} bytes for the states of a sequence, at most {MAX_STATE_BYTES} are allowed"


def _name_problems(spec: ModelSpec) -> Iterator[str]:
    names = spec.names
    needed = {"state_out"} | ({"state_conv"} if spec.lightning is None else {"state_in", "state_gate", "state_norm"})
    if spec.mamba2 is not None:
        needed |= {"state_in", "state_decay", "state_step_bias", "state_skip"}
        needed |= {"state_norm"} if spec.mamba2.has_norm else set()
    if spec.mamba is not None:
        needed |= {"state_in", "state_select", "state_step", "state_decay", "state_skip"}
        if spec.mamba.has_norms and spec.mamba.has_norm_weights:
            needed |= {"state_step_norm", "state_b_norm", "state_c_norm"}
    if spec.short_conv is not None:
        needed |= {"state_in"}
    if spec.delta_net is not None:
        needed |= {"state_decay", "state_step_bias", "state_norm"}
        if not names.state_qkvz:
            needed |= {"state_gate"} | (set() if names.state_in else {"state_q", "state_k", "state_v"})
        needed |= set() if names.state_ba else {"state_beta", "state_step"}
        if spec.delta_net.rank is not None:
            needed |= {"state_gate", "state_gate_down", "state_step", "state_step_down", "state_beta"}
            for name in ("state_qkvz", "state_ba"):
                if getattr(names, name):
                    yield f"names.{name} must be empty where delta_net has a rank"
    for name in sorted(needed):
        if not getattr(names, name):
            yield f"names.{name} must not be empty"
