"""Attention on a GPU: the Triton kernels behind `AttentionBackend`."""

from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.attention.triton_kernels import MAX_HEAD_DIM, Tiles, attend
from funitel.model_server.forward.batch import ForwardBatch, block_tables
from funitel.model_server.kv_cache.pool import KVCache

_MIN_KEYS = 256  # of a part: what a program reads to be worth its start
_MAX_PARTS = 32
_ALIGNMENT = 4  # int32 of 16 bytes, so that kernels are compiled once for pointers to whatever part of an upload


def max_queries(head_dim: int, dtype: torch.dtype) -> int:
    """Queries of a tile, heads of its group counted: their sums, and a turn's scores, stay in registers."""
    if dtype is torch.float32:
        return 32 if head_dim <= 128 else 16
    return 128 if head_dim <= 128 else 64


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The rows of one step: those that decode, each a tile, and the tiles of chunks."""

    decode: Tiles | None
    chunks: Tiles | None


class TritonAttention:
    """Two launches a layer at most: one over the rows that decode, one over the tiles of chunks.

    Args:
        block_size: tokens of a KV block.
        device: where tensors are.
        num_heads, num_kv_heads: of this rank.
        head_dim, dtype: of queries.
        num_processors: streaming multiprocessors that programs are to fill.
    """

    name = "triton"

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_processors: int,
    ) -> None:
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"heads of {head_dim} elements, at most {MAX_HEAD_DIM} are supported")
        self.block_size = block_size
        self.device = device
        self._num_kv_heads = num_kv_heads
        self._num_processors = num_processors
        self._tile_tokens = max(1, max_queries(head_dim, dtype) // (num_heads // num_kv_heads))

    def plan(self, batch: ForwardBatch) -> TritonPlan:
        """Lay out what the kernels read, in one upload."""
        rows, num_decode = batch.rows, batch.num_decode
        lengths = np.array([len(row.tokens) for row in rows])
        tables = block_tables(rows, self.block_size)
        chunks = [(i, at) for i in range(num_decode, len(rows)) for at in range(0, lengths[i], self._tile_tokens)]
        tile_rows, tile_firsts = np.array(chunks).reshape(-1, 2).T
        starts, sizes, contexts, table, decode_rows, decode_firsts, chunk_rows, chunk_firsts = self._upload(
            np.cumsum(lengths) - lengths,
            lengths,
            np.array([row.end for row in rows]),
            tables,
            np.arange(num_decode),
            np.zeros(num_decode),
            tile_rows,
            tile_firsts,
        )
        shared = (starts, sizes, contexts, table.view(tables.shape))
        parts = self._num_parts(num_decode, tables.shape[1])
        return TritonPlan(
            decode=Tiles(1, parts, decode_rows, decode_firsts, *shared) if num_decode else None,
            chunks=Tiles(self._tile_tokens, 1, chunk_rows, chunk_firsts, *shared) if chunks else None,
        )

    def plan_rows(self, contexts: torch.Tensor, tables: torch.Tensor) -> TritonPlan:
        """The plan of rows that all decode, in order, from tensors on the device; it holds when these are overwritten.

        Args:
            contexts: [num_rows] int32, tokens.
            tables: [num_rows, width] int32.
        """
        num_rows, width = tables.shape
        every = torch.arange(num_rows, dtype=torch.int32, device=self.device)
        parts = self._num_parts(num_rows, width)
        tiles = Tiles(1, parts, every, torch.zeros_like(every), every, torch.ones_like(every), contexts, tables)
        return TritonPlan(decode=tiles, chunks=None)

    def _num_parts(self, num_rows: int, width: int) -> int:
        """Into how many parts to cut the keys of rows that decode: a power of two, as each number is compiled."""
        longest = -(-width * self.block_size // _MIN_KEYS)
        wanted = 2 * self._num_processors // max(1, num_rows * self._num_kv_heads)
        parts = min(wanted, longest, _MAX_PARTS)
        return 1 << (parts.bit_length() - 1) if parts > 1 else 1

    def _upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """The arrays as int32 on the device, flat, in one copy."""
        sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        starts = np.cumsum([0, *sizes])
        staged = torch.zeros(int(starts[-1]), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        places = [slice(start, start + array.size) for start, array in zip(starts, arrays, strict=False)]
        for place, array in zip(places, arrays, strict=True):
            staged.numpy()[place] = array.ravel()
        there = staged.to(self.device, non_blocking=True)
        return [there[place] for place in places]

    def attend(
        self, query: torch.Tensor, cache: KVCache, layer: int, plan: TritonPlan, rule: AttentionRule
    ) -> torch.Tensor:
        """See AttentionBackend."""
        keys, values = cache.keys[layer], cache.values[layer]
        out = torch.empty_like(query)
        for tiles in (plan.decode, plan.chunks):
            if tiles is not None:
                attend(
                    query,
                    keys,
                    values,
                    out,
                    tiles,
                    scale=rule.scale,
                    window=rule.window,
                    softcap=rule.softcap,
                    slopes=rule.slopes,
                    sinks=rule.sinks,
                )
        return out
