"""A transformers model split over ranks by the plan that its own code has, which transformers carries out.

Heads are shared out evenly. Where ranks outnumber key-value heads, each rank computes all of those, which are few, and
goes on with the one that its queries look at.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import transformers

from funitel.model_server.models.transformers_fallback.pool import CacheLayout
from funitel.proto.errors import SettingsError

# Kinds of transformers' rules that divide the weights of a module, by dimension; a packed one in both halves.
_DIVIDED = {
    "colwise": -2,
    "colwise_rep": -2,
    "colwise_gather_output": -2,
    "packed_colwise": -2,
    "rowwise": -1,
    "rowwise_rep": -1,
    "rowwise_split_input": -1,
    "packed_rowwise": -1,
    "embedding_rowwise": -2,
    "embedding_colwise": -1,
}
# Those that leave weights whole and see to what goes in or comes out.
_WHOLE = {
    "all_reduce",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is split over `size` ranks.

    `rules` are kinds by name of module or parameter, `*` for numbers. `shared` are the rules of projections to
    `num_kv_heads` heads of which several ranks use the same.
    """

    size: int
    rules: Mapping[str, str]
    divides_heads: bool
    num_heads: int
    num_kv_heads: int
    shared: frozenset[str]

    @classmethod
    def of(cls, model: Any, size: int) -> "Split":
        """The split of `model`, which may be on the meta device.

        Raises:
            SettingsError: transformers has no plan for it, or not for so many ranks, or one that is not supported.
        """
        name = type(model).__name__
        refusal = f"--num-shard {size}: {name} runs through transformers {transformers.__version__}, "
        rules = dict(getattr(model, "tp_plan", None) or {})
        if not any("*" in rule for rule in rules):
            raise SettingsError(
                f"{refusal}which has no plan to split its layers; give --num-replicas to run more of it"
            )
        unknown = sorted(set(rules.values()) - _DIVIDED.keys() - _WHOLE)
        if unknown:
            raise SettingsError(f"{refusal}and its plan to split it has the kind {unknown[0]!r}, not supported here")
        config = model.config.get_text_config(decoder=True)
        num_heads = getattr(config, "num_attention_heads", None)
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        projections = dict(_projections(model, rules))
        if not projections or not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
            return cls(size, rules, bool(projections), 1, 1, frozenset())
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            raise SettingsError(
                f"{refusal}which shares heads out evenly: {num_heads} query heads and {num_kv_heads} key-value heads "
                f"do not go to {size} ranks"
            )
        shared: frozenset[str] = frozenset()
        if num_kv_heads < size:
            shared = frozenset(rule for rule, heads in projections.items() if heads == num_kv_heads)
            if not shared:
                raise SettingsError(
                    f"{refusal}where more ranks than its {num_kv_heads} key-value heads need keys and values "
                    "computed by layers of their own"
                )
        return cls(size, rules, True, num_heads, num_kv_heads, shared)

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of transformers' `from_pretrained`."""
        # DTensor: half a second to import, and in recent versions of transformers only
        from funitel.model_server.models.transformers_fallback.shared_heads import distributed_config

        return {"distributed_config": distributed_config(self.size, self.shared, self.num_kv_heads)}

    def regroup(self, model: Any) -> None:
        """Tell attention modules how many of a rank's queries look at each of its key-value heads."""
        if self.shared:
            for module in model.modules():
                if hasattr(module, "num_key_value_groups"):
                    module.num_key_value_groups = self.num_heads // self.size

    def kept_of(self, whole: CacheLayout) -> CacheLayout:
        """What a rank keeps of a sequence, of all that the model keeps."""
        if not self.divides_heads:
            return whole
        layers = (replace(each, num_kv_heads=max(1, each.num_kv_heads // self.size)) for each in whole.layers)
        return replace(whole, layers=tuple(layers))

    def elements_of(self, name: str, shape: tuple[int, ...], rank: int) -> int:
        """Elements that a rank holds of a parameter."""
        kind = self._kind(name)
        whole = prod(shape)
        if kind not in _DIVIDED or (len(shape) == 1 and _DIVIDED[kind] == -1):  # those add their bias to the sum
            return whole
        length = shape[max(_DIVIDED[kind], -len(shape))]
        parts = 2 if kind.startswith("packed_") else 1
        each = -(-length // (parts * self.size))
        mine = parts * max(0, min(each, length // parts - rank * each))
        return whole // length * mine if length else 0

    def _kind(self, name: str) -> str:
        rule = _rule(name)
        if rule in self.shared or rule.rpartition(".")[0] in self.shared:
            return ""
        return self.rules.get(rule) or self.rules.get(rule.rpartition(".")[0], "")


def check_device(device: torch.device, size: int) -> None:
    """Raise SettingsError where transformers cannot split a model over `size` ranks with such a device each."""
    if not hasattr(transformers.PreTrainedModel, "is_distributed_loading_by_transformers"):
        raise SettingsError(
            f"--num-shard {size}: transformers {transformers.__version__} does not split models while it loads them"
        )
    found = torch.accelerator.current_accelerator()
    theirs = "cpu" if found is None else found.type
    if theirs != device.type:
        raise SettingsError(
            f"--num-shard {size} on {device.type}: transformers splits models over this machine's {theirs} devices; "
            "hide those, or use them"
        )


def _rule(name: str) -> str:
    """A name as plans have it."""
    return _NUMBER.sub(".*", name)


def _projections(model: Any, rules: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """The rules that share an attention module's heads out, with the number of heads each projects to."""
    for name, module in model.named_modules():
        if not isinstance(head_dim := getattr(module, "head_dim", None), int):
            continue
        for child_name, child in module.named_children():
            rule = _rule(f"{name}.{child_name}")
            if rules.get(rule) == "colwise" and hasattr(child, "out_features"):
                yield rule, child.out_features // head_dim


@dataclass(slots=True)
class WeightCount:
    """See `Footprint`."""

    held_bytes: int = 0
    sharded_bytes: int = 0
    total_sharded_bytes: int = 0

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> "WeightCount":
        """What a rank holds of a model's parameters and buffers, each of which may come several times."""
        count = cls()
        for tensor in {_local(each).data_ptr(): each for each in tensors}.values():
            held = _local(tensor).numel() * tensor.element_size()
            count.held_bytes += held
            if not all(place.is_replicate() for place in getattr(tensor, "placements", ())):
                count.sharded_bytes += held
                count.total_sharded_bytes += tensor.numel() * tensor.element_size()
        return count


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lies on this rank: DTensor, half a second to import, is only where a model is split."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
