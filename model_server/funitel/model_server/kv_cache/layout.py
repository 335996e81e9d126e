"""Where each layer's keys and values lie in a block of the KV pool, on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.kv_cache.precision import KvCodes, KvDtype
from funitel.model_server.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's keys and values begin in a block, and what a token has of each: [num_kv_heads, dim] elements.

    With one part the values are the keys. Elements of `codes` are bytes.
    """

    start: int  # elements
    num_parts: int
    num_kv_heads: int
    dim: int
    codes: KvCodes | None = None

    def num_elements(self, block_size: int) -> int:
        """Elements of the layer in a block."""
        if self.codes is not None:
            return self.num_kv_heads * self.codes.head_bytes(block_size, self.dim)
        return self.num_parts * block_size * self.num_kv_heads * self.dim


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The places of all layers that attend in a block, one after the other.

    A layer that has another's keys and values is where that is. `index_places` are those of the keys of indexers.
    """

    block_size: int
    places: Mapping[int, LayerPlace]
    index_places: Mapping[int, LayerPlace]
    num_elements: int

    @classmethod
    def of(cls, spec: ModelSpec, heads: HeadSplit, block_size: int, dtype: KvDtype) -> "BlockLayout":
        """The layout on the rank that has `heads` of layers that are as the model."""
        codes = dtype if isinstance(dtype, KvCodes) else None
        places: dict[int, LayerPlace] = {}
        index_places: dict[int, LayerPlace] = {}
        end, num_parts = 0, 1 if spec.latent is not None else 2
        for index in spec.attention_layers:
            source, own = spec.layer(index).kv_source, spec.at(index)
            if source is not None:
                places[index] = places[source]
                continue
            num_kv_heads = heads.num_kv_heads
            if own.num_kv_heads != spec.num_kv_heads:
                num_kv_heads = HeadSplit.of(spec.num_heads, own.num_kv_heads, heads.size, heads.rank).num_kv_heads
            places[index] = LayerPlace(end, num_parts, num_kv_heads, own.cached_dim, codes)
            end += places[index].num_elements(block_size)
            if spec.indexer is not None and spec.choice_source(index) == index:
                index_places[index] = LayerPlace(end, 1, 1, spec.indexer.head_dim)
                end += index_places[index].num_elements(block_size)
        # Prompts are counted in blocks, and found again by them, also where no layer has anything in one.
        return cls(block_size, places, index_places, max(end, 1))
