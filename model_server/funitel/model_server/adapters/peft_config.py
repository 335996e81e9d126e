"""Read adapter_config.json of a PEFT folder; refuse by name what is not plain LoRA."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.files.integrity import read_json
from funitel.proto.errors import InvalidRequest

CONFIG = "adapter_config.json"
MAX_PATTERN = 1000
"""Characters of a regular expression in a configuration."""
ALL_LINEAR = "all-linear"

# Fields that change what is computed, with the values that change nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "ensure_weight_tying": (None, False),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # of init_lora_weights: the adapter is one for another base
_TASKS = (None, "CAUSAL_LM")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What adapter_config.json says of a LoRA adapter.

    Patterns are regular expressions of ends of module names, as in PEFT. `layers` are the layers that have adapters;
    None: all.
    """

    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str
    saved: tuple[str, ...]
    layers: frozenset[int] | None

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        pattern = _pattern_of(self.rank_pattern, module)
        return self.rank if pattern is None else self.rank_pattern[pattern]

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""
        rank, pattern = self.rank_of(module), _pattern_of(self.alpha_pattern, module)
        alpha = self.alpha if pattern is None else self.alpha_pattern[pattern]
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def has_target(self, module: str) -> bool:
        """Whether a module is among the targets."""
        if self.layers is not None:
            number = re.search(r"\.(\d+)\.", module)
            if number is None or int(number[1]) not in self.layers:
                return False
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or re.fullmatch(self.targets, module) is not None
        return _is_named(module, self.targets)

    def is_saved(self, module: str) -> bool:
        """Whether a module is saved whole."""
        return _is_named(module, self.saved)


def read_config(folder: Path, max_rank: int) -> LoraConfig:
    """Read the configuration of the adapter in `folder`.

    Raises:
        InvalidRequest: a field cannot be used, or a rank is above `max_rank`; the message names the field.
        WeightsError: there is no such file, or it is no JSON object.
    """
    values = read_json(folder / CONFIG)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise InvalidRequest(f"peft_type {_shown(kind)} is not supported: adapters must be LORA")
    _check_supported(values)
    config = LoraConfig(
        rank=_rank("r", values.get("r", 8), max_rank),
        alpha=_number("lora_alpha", values.get("lora_alpha", 8)),
        is_rank_stabilised=_flag("use_rslora", values.get("use_rslora")),
        rank_pattern={
            key: _rank(f"rank_pattern {key}", value, max_rank) for key, value in _patterns(values, "rank_pattern")
        },
        alpha_pattern={
            key: _number(f"alpha_pattern {key}", value) for key, value in _patterns(values, "alpha_pattern")
        },
        targets=_targets(values.get("target_modules")),
        saved=_names("modules_to_save", values.get("modules_to_save")),
        layers=_layers(values.get("layers_to_transform")),
    )
    return config


def _check_supported(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name.startswith("use_") and name != "use_rslora" and value:
            raise InvalidRequest(f"{name} is not supported: adapters must be plain LoRA, or have use_rslora")
        if value not in _REFUSED.get(name, (value,)):
            raise InvalidRequest(f"{name} {_shown(value)} is not supported by this shard")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InvalidRequest(f"init_lora_weights {start} is not supported: it changes the base; save it as plain LoRA")
    if values.get("task_type") not in _TASKS:
        raise InvalidRequest(
            f"task_type {_shown(values['task_type'])} is not supported: adapters must be for CAUSAL_LM"
        )


def _rank(name: str, value: Any, max_rank: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name} must be an integer > 0, given {_shown(value)}")
    if value > max_rank:
        raise InvalidRequest(f"{name} is {value}, above --max-lora-rank {max_rank}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise InvalidRequest(f"{name} must be a finite number, given {_shown(value)}")


def _flag(name: str, value: Any) -> bool:
    if not (value is None or isinstance(value, bool)):
        raise InvalidRequest(f"{name} must be true or false, given {_shown(value)}")
    return bool(value)


def _patterns(values: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise InvalidRequest(f"{name} must be an object, given {_shown(found)}")
    for pattern in found:
        _check_pattern(name, pattern, _end_of_name(pattern))
    return list(found.items())


def _check_pattern(name: str, pattern: str, used: str) -> None:
    """Refuse a pattern that is no regular expression as it is `used`."""
    if len(pattern) > MAX_PATTERN:
        raise InvalidRequest(f"{name} has a pattern of {len(pattern)} characters, at most {MAX_PATTERN} are read")
    try:
        re.compile(used)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidRequest(f"{name} {_shown(pattern)} is no regular expression: {error}") from None


def _targets(value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str):
        pattern = value if value != ALL_LINEAR else ""
        _check_pattern("target_modules", pattern, pattern)
        return value
    return _names("target_modules", value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest(f"{name} must be a list of names, given {_shown(value)}")
    return tuple(value)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in layers):
        raise InvalidRequest(f"layers_to_transform must be layer numbers, given {_shown(value)}")
    return frozenset(layers)


def _pattern_of(patterns: Iterable[str], module: str) -> str | None:
    """The first pattern that an end of a module's name has."""
    return next((pattern for pattern in patterns if re.fullmatch(_end_of_name(pattern), module)), None)


def _end_of_name(pattern: str) -> str:
    """A pattern of ends of module names as one of whole names, as PEFT has it."""
    return rf"(.*\.)?({pattern})"


def _is_named(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _shown(value: Any) -> str:
    return repr(value)[:100]
