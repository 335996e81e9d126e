"""Read, check and write model specs as JSON files; an error names the field, its value and its limit.

A file holds the fields of a ModelSpec, those left out having their defaults.
"""

import difflib
import json
import math
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from funitel.model_server.spec.layer_problems import problems_of_layers
from funitel.model_server.spec.model_spec import (
    NORMS_BEFORE,
    NORMS_BEHIND,
    ROTARY_KINDS,
    Activation,
    ExpertScore,
    ExpertsSpec,
    LatentSpec,
    ModelSpec,
    Norm,
    NormPlacement,
    Position,
    QkNorm,
    RotarySpec,
)
from funitel.model_server.spec.state_checks import multiplier_problems, state_problems
from funitel.model_server.spec.tensor_names import WITH_ALTERNATIVES
from funitel.proto.errors import SettingsError, UnsupportedModel

MAX_EXPERTS = 1 << 18  # of all layers
MAX_SIZE = 1 << 22  # elements of a latent or a head's values, hidden units of an expert


def latent_problems(spec: ModelSpec, latent: LatentSpec) -> Iterator[str]:
    """What is wrong with latent attention, each as field, value and limit."""
    sizes = {"rank": latent.rank, "value_dim": latent.value_dim, "query_rank": latent.query_rank}
    for name, size in sizes.items():
        if size is not None and not 1 <= size <= MAX_SIZE:
            yield f"latent.{name} must be within 1..{MAX_SIZE}, given {size}"
    if latent.norm_eps < 0:
        yield f"latent.norm_eps must be >= 0, given {latent.norm_eps}"
    if spec.num_kv_heads != 1:
        yield f"latent needs num_kv_heads 1, given {spec.num_kv_heads}"
    if spec.position is not Position.ROTARY:
        yield f"latent needs position rotary, given {spec.position}"
    if spec.rotary.dims is None or spec.rotary.dims >= spec.head_dim:
        yield f"latent needs rotary.dims below head_dim {spec.head_dim}, given {spec.rotary.dims}"
    if spec.window_rotary is not None:
        yield "latent needs window_rotary null"
    if spec.qk_norm is not QkNorm.NONE:
        yield f"latent needs qk_norm none, given {spec.qk_norm}"
    if spec.qkv_clip is not None:
        yield f"latent needs qkv_clip null, given {spec.qkv_clip}"
    for name in ("has_sinks", "has_output_gate", "has_value_norm"):
        if getattr(spec, name):
            yield f"latent needs {name} false"


def experts_problems(spec: ModelSpec, experts: ExpertsSpec) -> Iterator[str]:
    """What is wrong with a mixture of experts, each as field, value and limit."""
    sizes = {"intermediate_size": (1, experts.intermediate_size), "shared_size": (0, experts.shared_size)}
    for name, (least, size) in sizes.items():
        if not least <= size <= MAX_SIZE:
            yield f"experts.{name} must be within {least}..{MAX_SIZE}, given {size}"
    most = MAX_EXPERTS // max(spec.num_layers, 1)
    if not 1 <= experts.num_experts <= most:
        yield f"experts.num_experts must be within 1..{most} for {spec.num_layers} layers, given {experts.num_experts}"
    if not 1 <= experts.num_chosen <= experts.num_experts:
        yield f"experts.num_chosen must be within 1..{experts.num_experts} (num_experts), given {experts.num_chosen}"
    for name in ("scale", "shared_scale"):
        if getattr(experts, name) <= 0:
            yield f"experts.{name} must be > 0, given {getattr(experts, name)}"
    if experts.jitter < 0:
        yield f"experts.jitter must be >= 0, given {experts.jitter}"
    if experts.score is ExpertScore.SPARSEMIXER and (experts.num_groups > 1 or spec.names.router_correction):
        yield "experts.score sparsemixer needs num_groups 1 and no names.router_correction"
    if experts.is_beside_mlp and (experts.dense_layers or spec.norm_placement is not NormPlacement.BOTH):
        yield "experts.is_beside_mlp needs dense_layers empty and norm_placement both"
    outside = next((i for i in experts.dense_layers if not 0 <= i < spec.num_layers), None)
    if outside is not None:
        yield f"experts.dense_layers must be within 0..{spec.num_layers - 1}, given {outside}"
    for name in ("expert_gate", "expert_up", "expert_gate_up", "expert_down"):
        value = getattr(spec.names, name)
        if value and not all("{j}" in each for each in value.split("|")):
            yield f"names.{name} must hold {{j}}, given {value!r}"
    yield from _group_problems(experts)


def _group_problems(experts: ExpertsSpec) -> Iterator[str]:
    num_groups, num_chosen = experts.num_groups, experts.num_chosen_groups
    if num_groups < 1 or experts.num_experts % num_groups:
        yield f"experts.num_groups must divide {experts.num_experts} experts, given {num_groups}"
        return
    size = experts.num_experts // num_groups
    if not 1 <= num_chosen <= num_groups:
        yield f"experts.num_chosen_groups must be within 1..{num_groups} (num_groups), given {num_chosen}"
    if num_groups > 1 and not 1 <= experts.group_depth <= size:
        yield f"experts.group_depth must be within 1..{size} (experts of a group), given {experts.group_depth}"
    if num_groups > 1 and num_chosen * size < experts.num_chosen:
        most = num_chosen * size
        yield f"experts.num_chosen must be at most the {most} of the chosen groups, given {experts.num_chosen}"


MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 1 << 12,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 13,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 31,
}
"""Largest value of each size, far above any model's."""
MAX_OFFSET = 1 << 16
MAX_SINUSOIDS = 1 << 17
"""Positions of a table of sinusoids, which takes memory for each, whatever the checkpoint's size."""


def check_spec(spec: ModelSpec) -> None:
    """Refuse a spec that no model can be. Raises: `UnsupportedModel` naming field, value and limit."""
    problem = next(_problems(spec), None)
    if problem is not None:
        raise UnsupportedModel(problem)


def _problems(spec: ModelSpec) -> Iterator[str]:
    for name, most in MOST.items():
        if not 1 <= getattr(spec, name) <= most:
            yield f"{name} must be within 1..{most}, given {getattr(spec, name)}"
    if spec.num_heads % spec.num_kv_heads:
        yield f"{spec.num_heads} query heads do not divide into {spec.num_kv_heads} key-value heads"
    if spec.embedding_size is not None and not 1 <= spec.embedding_size <= MOST["hidden_size"]:
        yield f"embedding_size must be within 1..{MOST['hidden_size']}, given {spec.embedding_size}"
    if not 0 <= spec.position_offset <= MAX_OFFSET:
        yield f"position_offset must be within 0..{MAX_OFFSET}, given {spec.position_offset}"
    for name in ("attention_scale", "attention_softcap", "logit_softcap", "qkv_clip", "gate_limit"):
        value = getattr(spec, name)
        if value is not None and value <= 0:
            yield f"{name} must be > 0, given {value}"
    if spec.norm_eps < 0:
        yield f"norm_eps must be >= 0, given {spec.norm_eps}"
    yield from _layer_problems(spec)
    yield from problems_of_layers(spec, MOST)
    yield from _norm_problems(spec)
    yield from _position_problems(spec)
    if spec.latent is not None:
        yield from latent_problems(spec, spec.latent)
    if spec.experts is not None:
        yield from experts_problems(spec, spec.experts)
    yield from state_problems(spec)
    if spec.multipliers is not None:
        yield from multiplier_problems(spec, spec.multipliers)
    yield from _name_problems(spec)


def _layer_problems(spec: ModelSpec) -> Iterator[str]:
    for name in ("sliding_windows", "chunk_sizes"):
        sizes = getattr(spec, name)
        if sizes and len(sizes) != spec.num_layers:
            yield f"{name} must have an entry for each of {spec.num_layers} layers, given {len(sizes)}"
        narrow = next((size for size in sizes if size is not None and size < 1), None)
        if narrow is not None:
            yield f"{name} must be null or >= 1, given {narrow}"
    outside = next((i for i in spec.unrotated_layers if not 0 <= i < spec.num_layers), None)
    if outside is not None:
        yield f"unrotated_layers must be within 0..{spec.num_layers - 1}, given {outside}"


def _norm_problems(spec: ModelSpec) -> Iterator[str]:
    if spec.is_parallel and spec.norm_placement is not NormPlacement.PRE:
        yield f"is_parallel needs norm_placement pre, given {spec.norm_placement}"
    if spec.norm_placement is NormPlacement.WITHIN:
        for name in ("mlp_layers", "laurel_rank", "altup", "state_norm_placement"):
            if getattr(spec, name):
                yield f"norm_placement within needs {name} empty"
    if spec.qk_norm is not QkNorm.NONE and spec.norm is Norm.NONE:
        yield f"qk_norm {spec.qk_norm} needs norm rms or layer, given {spec.norm}"
    if spec.qk_norm is QkNorm.WHOLE and spec.norm is not Norm.RMS:
        yield f"qk_norm whole needs norm rms, given {spec.norm}"
    if spec.activation is Activation.XIELU and spec.is_gated:
        yield "activation xielu needs is_gated false"
    if not spec.is_gated and (spec.gate_limit is not None or spec.gate_shift):
        yield "gate_limit and gate_shift need is_gated true"
    if spec.query_growth is not None and spec.query_growth.period < 1:
        yield f"query_growth.period must be >= 1, given {spec.query_growth.period}"
    if spec.query_growth is not None and spec.query_growth.offset < 0:
        yield f"query_growth.offset must be >= 0, given {spec.query_growth.offset}"


def _position_problems(spec: ModelSpec) -> Iterator[str]:
    if spec.position is Position.SINUSOIDAL and spec.hidden_size < 4:
        yield f"sinusoidal positions need a hidden_size of at least 4, given {spec.hidden_size}"
    if spec.position is Position.SINUSOIDAL and spec.max_position_embeddings > MAX_SINUSOIDS:
        yield (
            f"max_position_embeddings must be <= {MAX_SINUSOIDS} with sinusoidal positions, "
            f"given {spec.max_position_embeddings}"
        )
    if spec.position is not Position.ROTARY:
        return
    for name, rotary in (("rotary", spec.rotary), ("window_rotary", spec.window_rotary)):
        if rotary is not None:
            least = min((spec.at(i).head_dim for i in range(spec.num_layers) if spec.rotary_of(i) is rotary), default=0)
            yield from (
                f"{name}.{problem}" for problem in _rotary_problems(rotary, spec.head_dim, least or spec.head_dim)
            )


def _rotary_problems(rotary: RotarySpec, head_dim: int, least: int) -> Iterator[str]:
    """What is wrong, where `least` is the smallest head that turns."""
    dims, scaling = rotary.dims if rotary.dims is not None else head_dim, rotary.scaling
    if not 2 <= dims <= least or dims % 2:
        yield f"dims must be even and within 2..{least} (head_dim), given {dims}"
    if rotary.base <= 1:
        yield f"base must be > 1, given {rotary.base}"
    if scaling.kind not in ROTARY_KINDS:
        yield f"scaling.kind must be one of {', '.join(ROTARY_KINDS)}, given {scaling.kind}"
    yield from _section_problems(rotary, dims)
    if scaling.kind == "dynamic" and dims < 4:
        yield f"dims must be at least 4 for dynamic scaling, given {dims}"
    if not 0 < scaling.share <= 1:
        yield f"scaling.share must be above 0 and at most 1, given {scaling.share}"
    for name in ("factor", "original_max_position", "beta_fast", "beta_slow", "amplitude"):
        if getattr(scaling, name) <= 0:
            yield f"scaling.{name} must be > 0, given {getattr(scaling, name)}"
    if scaling.long_amplitude is not None and scaling.long_amplitude <= 0:
        yield f"scaling.long_amplitude must be > 0, given {scaling.long_amplitude}"
    if scaling.kind == "llama3" and scaling.low_freq_factor == scaling.high_freq_factor:
        yield f"scaling.high_freq_factor must differ from low_freq_factor, given {scaling.high_freq_factor} for both"
    for name in ("short_factors", "long_factors"):
        factors = getattr(scaling, name)
        if scaling.kind == "longrope" and len(factors) != dims // 2:
            yield f"scaling.{name} must have {dims // 2} entries, given {len(factors)}"
        if any(factor <= 0 for factor in factors):
            yield f"scaling.{name} must be > 0, given {min(factors)}"


def _section_problems(rotary: RotarySpec, dims: int) -> Iterator[str]:
    sections = rotary.sections
    if not sections:
        if rotary.has_mixed_sections:
            yield "has_mixed_sections needs sections"
        return
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != dims // 2:
        yield f"sections must be three numbers >= 0 with the sum {dims // 2} (dims / 2), given {list(sections)}"
    elif rotary.has_mixed_sections:
        for axis in (1, 2):
            most, given = (dims // 2 - axis + 2) // 3, sections[axis]
            if given > most:
                yield f"sections[{axis}] must be at most {most} with has_mixed_sections, given {given}"


def _attention_names(spec: ModelSpec) -> set[str]:
    """Names that attention needs."""
    if spec.latent is None:
        return set() if spec.names.qkv else {"q", "k", "v"}
    queries = {"q"} if spec.latent.query_rank is None else {"q_down", "q_latent_norm", "q_up"}
    indexer = {"index_q", "index_k", "index_k_norm", "index_shares"} if spec.indexer else set()
    return queries | {"kv_down", "kv_latent_norm", "kv_up"} | indexer


def _mlp_names(spec: ModelSpec) -> set[str]:
    """Names that MLPs need: of the plain one, of experts one by one unless they are stacked, and of the shared one."""
    names, experts, needed = spec.names, spec.experts, set[str]()
    inputs = {"gate", "up"} if spec.is_gated else {"up"}
    if experts is not None and experts.is_beside_mlp:
        needed |= {"down", *inputs, "dense_norm", "dense_post_norm", "experts_norm", "experts_post_norm"}
    if any(spec.experts_of(i) is None for i in range(spec.num_layers)):
        needed |= {"down"} | (set() if spec.is_gated and names.gate_up else inputs)
    if experts is not None:
        needed |= {"router", "expert_down"}
        needed |= set() if spec.is_gated and names.expert_gate_up else {f"expert_{each}" for each in inputs}
        if experts.shared_size:
            is_packed = spec.is_gated and names.shared_gate_up
            needed |= {"shared_down"} | ({"shared_gate_up"} if is_packed else {f"shared_{each}" for each in inputs})
    return needed


def _name_problems(spec: ModelSpec) -> Iterator[str]:
    names, placement = spec.names, spec.norm_placement
    needed = {"embedding", "out"} | (set() if spec.is_tied else {"head"})
    needed |= {"positions"} if spec.position is Position.LEARNED else set()
    needed |= _attention_names(spec) | _mlp_names(spec)
    needed |= {"q_norm", "k_norm"} if spec.qk_norm not in (QkNorm.NONE, QkNorm.PLAIN) else set()
    needed |= {"sinks"} if spec.has_sinks else set()
    needed |= {"output_gate"} if spec.has_output_gate and not names.is_gate_in_q else set()
    needed |= {"activation"} if spec.activation is Activation.XIELU else set()
    if names.is_gate_in_q and not spec.has_output_gate:
        yield "names.is_gate_in_q needs has_output_gate true"
    if spec.norm is not Norm.NONE and placement in NORMS_BEFORE:
        is_beside = spec.experts is not None and spec.experts.is_beside_mlp
        needed |= {"attention_norm"} | (set() if spec.is_parallel or is_beside else {"mlp_norm"})
    if spec.norm is not Norm.NONE and placement in NORMS_BEHIND:
        needed |= {"attention_post_norm", "mlp_post_norm"}
    if spec.table_size != spec.hidden_size:
        needed |= {"embedding_in", "embedding_out"}
    for name in sorted(needed):
        if not getattr(names, name):
            yield f"names.{name} must not be empty"
    for each in fields(names):
        value = getattr(names, each.name)
        if not isinstance(value, str):
            continue
        if re.search("[{}]", re.sub(r"\{[ij]\}", "", value)):
            yield f"names.{each.name} may hold {{i}} and {{j}} and no other braces, given {value!r}"
        if "|" in value and each.name not in WITH_ALTERNATIVES:
            yield f"names.{each.name} must not list alternatives, given {value!r}"
    for pattern in names.ignored:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"names.ignored must hold regular expressions, given {pattern!r}: {error}"


MAX_FILE_BYTES = 1 << 20


def to_json(spec: object, *, is_whole: bool = False) -> str:
    """A spec, a dataclass of dataclasses, as JSON: the fields that differ from their defaults, or all of them."""
    return json.dumps(_plain(spec, is_whole), indent=2)


def _plain(value: Any, is_whole: bool) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        defaults = {each.name: _default(each) for each in fields(value)}
        return {n: _plain(v, is_whole) for n, v in given.items() if is_whole or v != defaults[n]}
    return [_plain(each, is_whole) for each in value] if isinstance(value, tuple) else value


def _default(each: Any) -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


def read_spec(path: Path) -> ModelSpec:
    """Read a spec that a user wrote.

    Raises:
        SettingsError: there is no such file, or what it says is wrong; the message names field, value and limit.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path} has {path.stat().st_size} bytes, a spec has at most {MAX_FILE_BYTES}")
        return from_json(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the spec {path}: {error}") from error


def from_json(text: str, source: str) -> ModelSpec:
    """Read a spec. `source` is what messages call it. Raises: `SettingsError`."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{source} is not JSON: {error}") from error
    try:
        spec: ModelSpec = _object(given, ModelSpec, "")
        check_spec(spec)
    except UnsupportedModel as error:
        raise SettingsError(f"{source}: {error.message}") from error
    return spec


def check_types(spec: ModelSpec) -> None:
    """Refuse fields of the wrong type or without bounds, wherever the spec came from. Raises: `UnsupportedModel`."""
    _object(_plain(spec, is_whole=True), ModelSpec, "")
    check_spec(spec)


def _object(given: Any, cls: type[Any], path: str) -> Any:
    if not isinstance(given, dict):
        raise UnsupportedModel(f"{path or 'the spec'} must be an object, given {_shown(given)}")
    known = {each.name: each for each in fields(cls)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UnsupportedModel(f"unknown field {_joined(path, name)}: {hint}")
    for name, each in known.items():
        if name not in given and _default(each) is MISSING:
            raise UnsupportedModel(f"the field {_joined(path, name)} is missing")
    hints = get_type_hints(cls)
    return cls(**{name: _value(value, hints[name], _joined(path, name)) for name, value in given.items()})


def _value(given: Any, hint: Any, path: str) -> Any:
    """A JSON value as what the field's annotation says."""
    if get_origin(hint) in (types.UnionType, Union):
        if given is None:
            return None
        return _value(given, next(each for each in get_args(hint) if each is not type(None)), path)
    if get_origin(hint) is tuple:
        if not isinstance(given, list):
            raise UnsupportedModel(f"{path} must be a list, given {_shown(given)}")
        return tuple(_value(item, get_args(hint)[0], f"{path}[{i}]") for i, item in enumerate(given))
    if isinstance(hint, type) and is_dataclass(hint):
        return _object(given, hint, path)
    if issubclass(hint, StrEnum):
        choices = [str(choice) for choice in hint]
        if given not in choices:
            raise UnsupportedModel(f"{path} must be one of {', '.join(choices)}, given {_shown(given)}")
        return hint(given)
    if hint is float and type(given) is int and abs(given) <= sys.float_info.max:
        given = float(given)
    if type(given) is not hint or (hint is float and not math.isfinite(given)):
        kind = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}[hint]
        raise UnsupportedModel(f"{path} must be {kind}, given {_shown(given)}")
    return given


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
