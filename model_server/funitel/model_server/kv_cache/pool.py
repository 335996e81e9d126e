"""The KV pool, paged: keys and values of every layer in blocks of `block_size` tokens, and its host tier."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.kv_cache.layout import BlockLayout, LayerPlace
from funitel.model_server.kv_cache.precision import KvCodes, KvDtype, is_float8, storage_dtype
from funitel.model_server.kv_cache.state_pool import StateLayout, StatePool
from funitel.model_server.kv_cache.zeroed import zeros
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import BlockCopy, StoredBlock

Slots = tuple[torch.Tensor, torch.Tensor]  # where tokens lie: block and offset in it, each [num_tokens] int64


class KVCache:
    """Keys and values by layer, each a view [num_blocks, block_size, num_kv_heads, cached_dim] of one pool.

    Layers may differ in heads and in elements, and several may have the same view (see `layout`). Layers that keep a
    state take no part in it; `state_pool` is where theirs are, if there are such layers.

    A block keeps all its layers together, so a step touches new memory for the blocks it is granted and no more: the
    first touch of a page costs 2.5 ms a MiB on some hosts. Block 0 is never a sequence's. The pool is zeroed: padding
    reads blocks that were never written, and 0 x NaN would poison the attention sum. With latent attention one vector
    of a token is both its key and its value. A pool of float8 takes numbers beyond its range as the largest it has.

    The fused CPU step uses the pool of the same size in its own way: the keys of a head lie [head_dim, block_size] and
    its values [block_size, head_dim], heads one after the other. Codes have no views: only that step reads them.

    A `companion` is the pool of what makes draft tokens: of as many blocks, each of which belongs to the sequence that
    the block of the same id belongs to here.
    """

    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    index_keys: Mapping[int, torch.Tensor]
    state_pool: StatePool | None = None
    companion: "KVCache | None" = None
    max_rows: int | None = None  # sequences that it has room for, where their number is bounded

    def __init__(
        self,
        spec: ModelSpec,
        heads: HeadSplit,
        num_blocks: int,
        block_size: int,
        dtype: KvDtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        layout = BlockLayout.of(spec, heads, block_size, dtype)
        self.pool = zeros((num_blocks, layout.num_elements), storage_dtype(dtype), device)
        if isinstance(dtype, KvCodes):
            self.keys = self.values = self.index_keys = {}
            return
        self.keys = {layer: self._view(place, 0) for layer, place in layout.places.items()}
        self.values = self.keys
        if spec.latent is None:
            self.values = {layer: self._view(place, 1) for layer, place in layout.places.items()}
        self.index_keys = {layer: self._view(place, 0) for layer, place in layout.index_places.items()}

    def _view(self, place: LayerPlace, part: int) -> torch.Tensor:
        """One part of a layer in every block, [num_blocks, block_size, num_kv_heads, dim]."""
        size = place.num_elements(self.block_size) // place.num_parts
        start = place.start + part * size
        shape = self.num_blocks, self.block_size, place.num_kv_heads, place.dim
        return self.pool[:, start : start + size].view(shape)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool on this rank, its companion's included."""
        own = self.pool.numel() * self.pool.element_size()
        return own if self.companion is None else own + self.companion.num_bytes

    def free(self) -> None:
        """Let go of the memory, with that of states and the companion; the pool must not be used again."""
        for each in self.with_companion():
            each.pool = each.pool.new_empty((0, 0))
            each.keys = each.values = each.index_keys = {}
            each.state_pool = None

    def with_companion(self) -> "list[KVCache]":
        """This pool, and its companion if it has one."""
        return [self] if self.companion is None else [self, self.companion]

    @staticmethod
    def bytes_per_block(spec: ModelSpec, heads: HeadSplit, block_size: int, dtype: KvDtype) -> int:
        """Memory one block takes on the rank that has `heads`."""
        return BlockLayout.of(spec, heads, block_size, dtype).num_elements * storage_dtype(dtype).itemsize

    def write(self, layer: int, slots: Slots, keys: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Store keys and values [num_tokens, num_kv_heads, cached_dim] at their slots; None: keys are values too."""
        _put(self.keys[layer], slots, keys)
        if values is not None:
            _put(self.values[layer], slots, values)

    def write_index(self, layer: int, slots: Slots, keys: torch.Tensor) -> None:
        """Store keys of a layer's indexer, [num_tokens, 1, index_dim]."""
        _put(self.index_keys[layer], slots, keys)

    def check_copy(self, source: int, target: int) -> None:
        """Raise InvalidRequest unless a sequence's block can be copied to another one."""
        if not (0 < source < self.num_blocks and 0 < target < self.num_blocks) or source == target:
            raise InvalidRequest(
                f"block {source} cannot be copied to block {target}: they must be two of the blocks "
                f"1..{self.num_blocks - 1} of the pool"
            )

    def copy(self, source: int, target: int) -> None:
        """Enqueue the copy of a block, all layers of it, behind what computes and before what is launched next."""
        for each in self.with_companion():
            each.pool[target].copy_(each.pool[source], non_blocking=True)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Make blocks zeros again: of scores that are no numbers, some may lie there.

        The companion's stay as they are: drafts may be wrong, and it knows what it has computed.
        """
        places = upload(np.array(blocks, dtype=np.int64), self.pool.device)
        words = self.pool.view(self.num_blocks, -1).view(torch.uint8)  # in every kind of numbers zeros are zero bytes
        if words.shape[1] % 8 == 0:
            words = words.view(torch.int64)
        words.index_fill_(0, places, 0)


def gather_blocks(cached: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Some blocks of a layer's keys or values, one after the other; float8 in the precision of what attends to it."""
    if not is_float8(cached.dtype):
        return cached.index_select(0, blocks)
    return cached.view(torch.uint8).index_select(0, blocks).view(cached.dtype).to(dtype)


def _put(cached: torch.Tensor, slots: Slots, numbers: torch.Tensor) -> None:
    """Store some tokens of a layer; torch puts float8 at places of their own as the bytes that they are."""
    if is_float8(cached.dtype):
        largest = torch.finfo(cached.dtype).max
        numbers = numbers.clamp(-largest, largest).to(cached.dtype).view(torch.uint8)
        cached = cached.view(torch.uint8)
    cached.index_put_(slots, numbers)


class Pools(Protocol):
    """How this rank's pool of a model is made."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def bytes_per_block(self) -> int:
        """Memory of a block on this rank."""

    @property
    def total_bytes_per_block(self) -> int:
        """Memory of a block of the whole model, not split."""

    @property
    def state_layout(self) -> StateLayout | None:
        """What the model keeps of a sequence besides, if it does."""

    @property
    def has_parted_blocks(self) -> bool:
        """Whether a block holds what its own tokens are, and nothing of its sequence as a whole."""

    def make(self, num_blocks: int) -> KVCache:
        """A pool of zeros, without states."""


@dataclass(frozen=True, slots=True)
class SpecPools:
    """The pools of a model that a spec describes."""

    spec: ModelSpec
    heads: HeadSplit
    block_size: int
    dtype: KvDtype
    device: torch.device
    state_layout: StateLayout | None = None
    has_parted_blocks: bool = True

    @property
    def bytes_per_block(self) -> int:
        """See Pools."""
        return KVCache.bytes_per_block(self.spec, self.heads, self.block_size, self.dtype)

    @property
    def total_bytes_per_block(self) -> int:
        """See Pools."""
        whole = HeadSplit.of(self.spec.num_heads, self.spec.num_kv_heads, 1, 0)
        return KVCache.bytes_per_block(self.spec, whole, self.block_size, self.dtype)

    def make(self, num_blocks: int) -> KVCache:
        """See Pools."""
        return KVCache(self.spec, self.heads, num_blocks, self.block_size, self.dtype, self.device)


class BlockSlots(Protocol):
    """Where blocks are kept that the pool has no room for."""

    is_disk: bool
    """Whether they are in a file."""

    def check(self, copies: Iterable[BlockCopy]) -> None:
        """Raise InvalidRequest for a copy that cannot be made."""

    def carry_out(self, copy: BlockCopy) -> bool:
        """Make a copy; whether its slot holds what it is thought to hold."""

    def stored(self) -> tuple[StoredBlock, ...]:
        """The slots with content."""


class HostBlocks:
    """Slots for blocks of one pool and of its companion, all layers of a block together as they lie there.

    Args:
        memory: [num_bytes] uint8, page-locked beside a GPU.
        num_slots: that have room in it.
        cache: the pool.
    """

    is_disk = False

    def __init__(self, memory: torch.Tensor, num_slots: int, cache: KVCache) -> None:
        self._num_slots = num_slots
        self._num_blocks = cache.num_blocks
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # slots, and the pool that they are for
        begin = 0
        for each in cache.with_companion():
            block = each.pool[0]
            end = begin + num_slots * block.numel() * block.element_size()
            self._parts.append((memory[begin:end].view(block.dtype).view(num_slots, *block.shape), each.pool))
            begin = end

    def check(self, copies: Iterable[BlockCopy]) -> None:
        """Raise InvalidRequest for a block or slot that is not there."""
        check_slots(copies, self._num_blocks, self._num_slots, "the host")

    def carry_out(self, copy: BlockCopy) -> bool:
        """Enqueue a copy behind what computes and before what is launched next; memory loses nothing."""
        for slots, pool in self._parts:
            there, here = slots[copy.slot], pool[copy.block]
            if copy.is_load:
                here.copy_(there, non_blocking=True)
            else:
                there.copy_(here, non_blocking=True)
        return True

    def stored(self) -> tuple[StoredBlock, ...]:
        """See BlockSlots: nothing outlives the process."""
        return ()


def check_slots(copies: Iterable[BlockCopy], num_blocks: int, num_slots: int, place: str) -> None:
    """Raise InvalidRequest for a copy with a block outside of the pool, or a slot outside of `place`."""
    for copy in copies:
        if not 0 < copy.block < num_blocks or copy.slot >= num_slots:
            raise InvalidRequest(
                f"block {copy.block} or slot {copy.slot} of a copy is outside the {num_blocks} blocks of the pool "
                f"and {num_slots} slots of {place}"
            )
