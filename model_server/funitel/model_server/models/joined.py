"""A model in parts within one process: layers after layers, each part on a device and in a precision of its own.

Every part is a pipeline stage by its spec: the first has the embedding, the last the final norm and the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from funitel.model_server.adapters.peft_folder import AdapterTensors, BaseModules
from funitel.model_server.adapters.registry import AdapterBase, PlacedAdapter
from funitel.model_server.forward.batch import Forward, ForwardBatch
from funitel.model_server.kv_cache.joined_pools import JoinedCache
from funitel.model_server.kv_cache.pool import KVCache


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """Some layers of a model, and the device that computes them."""

    decoder: Forward
    device: torch.device


@dataclass(slots=True)
class JoinedAdapter:
    """The weights of an adapter in every part, and their bytes together."""

    parts: tuple[PlacedAdapter, ...]
    num_bytes: int


class JoinedForward:
    """The parts of a model as one forward; batches come and logits go in the host's memory."""

    def __init__(self, parts: Sequence[JoinedPart]) -> None:
        self.parts = tuple(parts)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """See Forward; the parts take hidden states from one another."""
        assert isinstance(cache, JoinedCache)
        batches: dict[torch.device, ForwardBatch] = {}
        logits: torch.Tensor | None = None
        for number, (part, pool) in enumerate(zip(self.parts, cache.parts, strict=True)):
            if batch.adapters or part.device not in batches:
                batches[part.device] = batch.on(part.device, partial(_adapter_in, number))
            logits = part.decoder(batches[part.device], pool)
        return None if logits is None else logits.to(batch.input_ids.device)


def _adapter_in(part: int, adapter: PlacedAdapter) -> PlacedAdapter:
    assert isinstance(adapter.weights, JoinedAdapter)
    return adapter.weights.parts[part]


def join_adapters(bases: Sequence[AdapterBase]) -> AdapterBase:
    """What takes the adapters of a model in parts, of what takes those of each part."""
    modules = BaseModules(
        {name: shape for base in bases for name, shape in base.modules.shapes.items()},
        frozenset(name for base in bases for name in base.modules.tables),
        frozenset(name for base in bases for name in base.modules.heads),
        bases[0].modules.prefix,
    )
    parts = [base.within(modules) for base in bases]

    def place(adapter: AdapterTensors) -> JoinedAdapter:
        placed = tuple([PlacedAdapter("", "", adapter.max_rank, part.place(adapter)) for part in parts])
        return JoinedAdapter(placed, sum(each.weights.num_bytes for each in placed))

    return AdapterBase(modules, place, lambda rank: sum(base.max_bytes(rank) for base in bases))
