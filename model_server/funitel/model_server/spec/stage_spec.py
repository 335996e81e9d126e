"""Describe a pipeline stage: the spec of a model of which a shard has some layers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.tensor_names import TensorNames

_OF_FIRST = ("embedding", "embedding_norm", "embedding_in", "positions", "altup_in") + (
    "layer_embedding",
    "layer_projection",
    "layer_projection_norm",
)
_OF_LAST = ("final_norm", "head", "embedding_out", "altup_out")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec(ModelSpec):
    """A model of which layers [first_layer, end_layer) are here.

    Layers keep their numbers. The first stage has the embedding, the last one the final norm and the head.
    """

    first_layer: int
    end_layer: int

    @property
    def held_layers(self) -> range:
        """See ModelSpec."""
        return range(self.first_layer, self.end_layer)

    def of_one_layer(self) -> "StageSpec":
        """See ModelSpec."""
        return replace(self, num_layers=1, state_layers=(), first_layer=0, end_layer=1)

    @classmethod
    def of(cls, spec: ModelSpec, layers: range) -> "StageSpec":
        """The stage of a model with these layers."""
        values: dict[str, Any] = {each.name: getattr(spec, each.name) for each in fields(ModelSpec)}
        stage = cls(**values, first_layer=layers.start, end_layer=layers.stop)
        others = [i for i in range(spec.num_layers) if i not in layers]
        ends = [] if stage.is_first else [name for name in _OF_FIRST if name != "embedding" or not stage.holds_table]
        ends += [] if stage.is_last else _OF_LAST
        patterns = (*_of_layers(spec.names, others), *_of_ends(spec.names, ends))
        return replace(stage, names=replace(spec.names, ignored=(*spec.names.ignored, *patterns)))


def with_experts(spec: ModelSpec, held: range) -> ModelSpec:
    """The spec of a rank that has these experts of a mixture whole, and none of the others' tensors."""
    assert spec.experts is not None, "there are experts"
    others = [str(expert) for expert in range(spec.experts.num_experts) if expert not in held]
    names = spec.names
    templates = {
        each
        for template in (names.expert_gate, names.expert_up, names.expert_gate_up, names.expert_down)
        for each in template.split("|")
        if "{j}" in each
    }
    patterns = [
        r"(^|\.)"
        + re.escape(template).replace(re.escape("{i}"), r"\d+").replace(re.escape("{j}"), f"({'|'.join(others)})")
        + r"(\.|$)"
        for template in sorted(templates)
    ]
    return replace(spec, names=replace(names, ignored=(*names.ignored, *(patterns if others else ()))))


def _of_layers(names: TensorNames, layers: Sequence[int]) -> Iterable[str]:
    """Patterns of the tensors of layers."""
    templates = (getattr(names, each.name) for each in fields(names))
    stems = {
        each.partition("{i}")[0]
        for template in templates
        if isinstance(template, str)
        for each in template.split("|")
        if "{i}" in each
    }
    if layers:
        numbers = "|".join(map(str, layers))
        yield from (rf"(^|\.){re.escape(stem)}({numbers})\." for stem in sorted(stems))


def _of_ends(names: TensorNames, ends: Iterable[str]) -> Iterable[str]:
    for name in ends:
        stem = re.escape(getattr(names, name)).replace(re.escape("{j}"), r"\d+")
        if stem:
            yield rf"(^|\.){stem}\.[^.]+$"
    # A head that is the embedding table is stored under either name.
    if "head" in ends:
        yield rf"(^|\.){re.escape(names.head)}\.[^.]+$"


def stages_of(spec: ModelSpec, num_stages: int, asked: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage: so many as `asked`, else as even as can be by what a step reads.

    Raises:
        ValueError: with the reason why the model cannot be parted so.
    """
    if asked is None:
        return _even_stages(spec, num_stages)
    if sum(asked) != spec.num_layers:
        raise ValueError(f"adds up to {sum(asked)} layers, the model has {spec.num_layers}")
    ends = [sum(asked[: place + 1]) for place in range(len(asked))]
    for cut in ends[:-1]:
        reason = uncut(spec, cut)
        if reason is not None:
            raise ValueError(f"has a stage that begins with layer {cut}: {reason}")
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def uncut(spec: ModelSpec, cut: int) -> str | None:
    """Why no stage can begin with a layer; None: one can."""
    if spec.indexer is not None and cut in spec.indexer.sharing_layers:
        return f"layer {cut} attends to the tokens that layer {cut - 1} chooses"
    for layer in range(cut, spec.num_layers):
        source = spec.layer(layer).kv_source
        if source is not None and source < cut:
            return f"layer {layer} has the keys and values of layer {source}"
    return None


def _even_stages(spec: ModelSpec, num_stages: int) -> list[range]:
    """Stages of which the largest is as small as can be."""
    if num_stages > spec.num_layers:
        raise ValueError(f"has {num_stages} stages, the model has {spec.num_layers} layers")
    sums = [0]
    for layer in range(spec.num_layers):
        sums.append(sums[-1] + layer_elements(spec, layer))
    head = spec.vocab_size * spec.table_size
    sums[-1] += head
    cuts = [cut for cut in range(1, spec.num_layers) if uncut(spec, cut) is None]
    # By the layer that a stage ends with: the largest stage up to there, and where the last one of them begins.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(num_stages):
        ends = [spec.num_layers] if stage == num_stages - 1 else cuts
        best = {
            end: min((max(size, sums[end] - sums[begin]), (*before, end)) for begin, (size, before) in reached)
            for end in ends
            if (reached := [item for item in best.items() if item[0] < end])
        }
    if spec.num_layers not in best:
        reason = next(filter(None, (uncut(spec, cut) for cut in range(1, spec.num_layers))), "")
        raise ValueError(f"has {num_stages} stages, into which the model cannot be cut: {reason}")
    ends_found = best[spec.num_layers][1]
    return [range(begin, end) for begin, end in zip([0, *ends_found], ends_found, strict=False)]


def layer_elements(spec: ModelSpec, layer: int) -> int:
    """About so many weights of a layer are read by a step of many tokens."""
    own, hidden = spec.at(layer), spec.hidden_size
    total = 0
    if spec.latent is not None:
        total += hidden * (own.cached_dim + own.num_heads * own.head_dim + own.num_heads * spec.latent.value_dim)
    elif layer not in spec.mlp_layers:  # one with a state has about as many
        total += 2 * hidden * own.head_dim * (own.num_heads + own.num_kv_heads)
    num_parts = 3 if spec.is_gated else 2
    experts = spec.experts_of(layer)
    units = own.intermediate_size
    if experts is not None:
        units = experts.num_experts * experts.intermediate_size + experts.shared_size
        units += own.intermediate_size if experts.is_beside_mlp else 0
    has_mlp = layer in spec.mlp_layers if spec.mlp_layers else spec.has_mlp
    return total + (num_parts * hidden * units if has_mlp else 0)
