"""Paged attention as Triton kernels: tiles of queries against keys and values read through block tables.

One kernel serves prompts and decoding. A program takes a tile of queries that share a KV head (the query heads of a
group stand in as queries of one head) and walks over the keys they see with a running softmax. A row that decodes has
so few queries that its keys are cut into parts, each a program of its own, and `_merge_parts` puts these together
(split KV, as in FlashDecoding: https://pytorch.org/blog/flash-decoding). Sums are float32 whatever the inputs are.

No launch depends on what the step's tensors hold, only on their shapes: a CUDA graph may replay it.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.device.dependent_kernels import dependent, wait_for_previous
from funitel.model_server.forward.batch import ForwardBatch, block_tables
from funitel.model_server.kv_cache.pool import KVCache

MAX_HEAD_DIM = 256  # of queries: a tile's sums must stay in registers
_IS_INTERPRETED = triton.knobs.runtime.interpret  # Triton's interpreter multiplies bfloat16 as the integers they lie in
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Which queries a launch attends.

    A tile is `tokens` consecutive tokens of one row, fewer at the row's end. All int32: `rows` [num_tiles] the row of a
    tile, `firsts` [num_tiles] its first token among the row's own; `starts` [num_rows] where a row begins among the
    step's tokens, `lengths` [num_rows] its tokens, `contexts` [num_rows] its context after the step, `tables`
    [num_rows, width] its blocks. A tile of a row of length 0 does nothing. `visible_ends` [num_tokens] are how many
    tokens of its sequence each token sees in layers that see spans whole; None: up to itself.
    """

    tokens: int
    num_parts: int  # into which the keys of a tile are cut
    rows: torch.Tensor
    firsts: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    visible_ends: torch.Tensor | None = None


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    sees_spans: bool = False,
) -> None:
    """Attend the queries of `tiles`; the arguments from `scale` on are those of an `AttentionRule`.

    Args:
        query: [num_tokens, num_heads, head_dim], the last two contiguous.
        keys, values: [num_blocks, block_size, num_kv_heads, head_dim], the last contiguous; of the type of the queries
            or one that is cast to it, such as float8.
        out: [num_tokens, num_heads, head_dim], as the queries lie; written where a tile has tokens.
        tiles: which queries, and through which blocks they see keys and values.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    num_tiles = tiles.rows.shape[0]
    num_queries = max(16, triton.next_power_of_2(tiles.tokens * group))  # of a tile; tl.dot takes no fewer than 16
    is_cut = tiles.num_parts > 1
    loop = _loop_of(num_queries, head_dim, query.dtype, is_cut=is_cut, has_softcap=softcap is not None)
    ends = tiles.visible_ends if sees_spans else None
    # One part writes its answer; of several each leaves its sums, its largest score, and the sum of its weights.
    sums = out
    extents = query.new_empty((1,), dtype=torch.float32)
    if is_cut:
        shape = (num_tiles * tiles.tokens, num_heads, tiles.num_parts)
        sums = query.new_empty((*shape, head_dim), dtype=torch.float32)
        extents = query.new_empty((*shape, 2), dtype=torch.float32)
    _attend_tile[(num_tiles, num_kv_heads, tiles.num_parts)](
        query,
        keys,
        values,
        sums,
        extents,
        tiles.rows,
        tiles.firsts,
        tiles.starts,
        tiles.lengths,
        tiles.contexts,
        tiles.tables,
        tiles.tables.stride(0),
        query if slopes is None else slopes,
        query if sinks is None else sinks,
        query if ends is None else ends,
        scale,
        0.0 if softcap is None else softcap,
        0 if window is None else window,
        query.stride(0),
        out.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        num_heads,
        NUM_PARTS=tiles.num_parts,
        TILE_TOKENS=tiles.tokens,
        GROUP=group,
        NUM_QUERIES=num_queries,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=keys.shape[1],
        NUM_KEYS=loop.num_keys,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SLOPES=slopes is not None,
        HAS_SINKS=sinks is not None,
        HAS_SPANS=ends is not None,
        IN_FLOAT32=query.dtype is torch.float32 or _IS_INTERPRETED,
        num_warps=loop.num_warps,
        num_stages=loop.num_stages,
        **dependent(),
    )
    if is_cut:
        _merge_parts[(num_tiles * tiles.tokens, num_heads)](
            sums,
            extents,
            out,
            tiles.rows,
            tiles.firsts,
            tiles.starts,
            tiles.lengths,
            out.stride(0),
            num_heads,
            TILE_TOKENS=tiles.tokens,
            NUM_PARTS=tiles.num_parts,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            **dependent(),
        )


@dataclass(frozen=True, slots=True)
class _Loop:
    """How a program walks over its keys: so many a turn, by so many warps, loads of so many turns under way."""

    num_keys: int
    num_warps: int
    num_stages: int


def _loop_of(num_queries: int, head_dim: int, dtype: torch.dtype, *, is_cut: bool, has_softcap: bool) -> _Loop:
    """The loop of a tile.

    Keys and values of the turns under way are in shared memory, and scores in registers: as many as an A100 and an
    H100 have, as are the queries of `max_queries`. Measured 2026-11 on an H200, heads of 128 elements in bfloat16: 256
    rows of 1,024 tokens read 4.18 TB/s with whole keys (4 warps of 64 keys: 3.71); 4 rows of 8,192 read 3.26 TB/s with
    cut keys (64 keys: 2.85); 8,192 queries compute 325 TFLOP/s (64 queries and 4 warps a tile: 307).
    """
    if dtype is torch.float32:
        return _Loop(32 if head_dim <= 64 else 16, 4, 3)
    if head_dim > 128 or has_softcap:
        return _Loop(64 if head_dim <= 128 and not has_softcap else 32, 4 if num_queries < 64 else 8, 3)
    if num_queries > 16:
        return _Loop(64, 4 if num_queries < 64 else 8, 2)
    return _Loop(128, 4, 2) if is_cut else _Loop(64, 2, 4)


@triton.jit(do_not_specialize=["table_stride"])  # else a longer row may wait for the compiler
def _attend_tile(
    query,
    keys,
    values,
    sums,
    extents,
    rows,
    firsts,
    starts,
    lengths,
    contexts,
    tables,
    table_stride,
    slopes,
    sinks,
    visible_ends,
    scale,
    softcap,
    window,
    query_stride,
    out_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    num_heads,
    NUM_PARTS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One tile of queries, one KV head, one part of the keys."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first = tl.load(rows + tile), tl.load(firsts + tile)  # of the step, so written long before
    length, context = tl.load(lengths + row), tl.load(contexts + row)
    wait_for_previous(IS_DEPENDENT)
    if first >= length:
        return

    # Queries: the heads of a group side by side, for each token of the tile.
    lanes = tl.arange(0, NUM_QUERIES)
    token = first + lanes // GROUP
    head = kv_head * GROUP + lanes % GROUP
    dims = tl.arange(0, PADDED_DIM)
    is_query = (lanes < TILE_TOKENS * GROUP) & (token < length)
    is_element = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    place = (tl.load(starts + row) + token).to(tl.int64)
    q = tl.load(
        query + place[:, None] * query_stride + head[:, None] * HEAD_DIM + dims[None, :], mask=is_element, other=0.0
    )
    if IN_FLOAT32:
        q = q.to(tl.float32)
    position = context - length + token

    # Keys this part looks at: those that any query of the tile sees, cut into equal parts of whole turns.
    last = tl.minimum(first + TILE_TOKENS, length) - 1
    end = context - length + last + 1
    visible = position
    if HAS_SPANS:
        visible = tl.load(visible_ends + place, mask=is_query, other=0) - 1
        end = tl.max(visible, 0) + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context - length + first - window + 1, 0) // NUM_KEYS * NUM_KEYS
    if NUM_PARTS > 1:
        num_turns = tl.cdiv(tl.cdiv(end - begin, NUM_KEYS), NUM_PARTS)
        begin += part * num_turns * NUM_KEYS
        end = tl.minimum(end, begin + num_turns * NUM_KEYS)

    largest = tl.full([NUM_QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([NUM_QUERIES], tl.float32)
    if HAS_SINKS:
        if part == 0:
            largest = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * _LOG2_E
            weight += 1.0
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_query, other=0.0).to(tl.float32)
    total = tl.zeros([NUM_QUERIES, PADDED_DIM], tl.float32)

    whole = begin  # from here on not every query of the tile sees every key of a turn
    if not HAS_WINDOW:
        whole = tl.maximum(begin, tl.minimum(end, context - length + first + 1) // NUM_KEYS * NUM_KEYS)
    table = tables + row * table_stride
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    slope_of = slope if HAS_SLOPES else 0.0
    for at in range(begin, whole, NUM_KEYS):
        largest, weight, total = _attend_keys(
            at, end, q, position, visible, largest, weight, total, keys, values, table, slope_of, scale, softcap,
            window, key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, NUM_KEYS, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, IN_FLOAT32, False,
        )  # fmt: skip
    for at in range(whole, end, NUM_KEYS):
        largest, weight, total = _attend_keys(
            at, end, q, position, visible, largest, weight, total, keys, values, table, slope_of, scale, softcap,
            window, key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, NUM_KEYS, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, IN_FLOAT32, True,
        )  # fmt: skip

    if NUM_PARTS == 1:
        places = place[:, None] * out_stride + head[:, None] * HEAD_DIM + dims[None, :]
        weight = tl.where(is_query, weight, 1.0)  # lanes without a query may have seen no key
        tl.store(sums + places, (total / weight[:, None]).to(sums.dtype.element_ty), mask=is_element)
    else:
        line = ((tile * TILE_TOKENS + lanes // GROUP).to(tl.int64) * num_heads + head) * NUM_PARTS + part
        tl.store(sums + line[:, None] * HEAD_DIM + dims[None, :], total, mask=is_element)
        tl.store(extents + line * 2, largest, mask=is_query)
        tl.store(extents + line * 2 + 1, weight, mask=is_query)


@triton.jit
def _attend_keys(
    at,
    end,
    q,
    position,
    visible,
    largest,
    weight,
    total,
    keys,
    values,
    table,
    slope,
    scale,
    softcap,
    window,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """One turn of a tile: its running softmax after the keys from `at` on. Unmasked, every query sees all of them."""
    dims = tl.arange(0, PADDED_DIM)
    seen = at + tl.arange(0, NUM_KEYS)
    is_key = seen < end
    if IS_MASKED:
        block = tl.load(table + seen // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    else:
        block = tl.load(table + seen // BLOCK_SIZE).to(tl.int64)
    slot = seen % BLOCK_SIZE
    key_places = keys + (block * key_block_stride + slot * key_slot_stride)[None, :] + dims[:, None]
    value_places = values + (block * value_block_stride + slot * value_slot_stride)[:, None] + dims[None, :]
    if IS_MASKED:
        k = tl.load(key_places, mask=is_key[None, :] & (dims < HEAD_DIM)[:, None], other=0.0).to(q.dtype)
    elif HEAD_DIM == PADDED_DIM:
        k = tl.load(key_places).to(q.dtype)
    else:
        k = tl.load(key_places, mask=(dims < HEAD_DIM)[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee" if IN_FLOAT32 else None) * scale
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
    if HAS_SLOPES or IS_MASKED:
        distance = seen[None, :] - position[:, None]
    if HAS_SLOPES:
        scores += slope[:, None] * distance
    scores *= _LOG2_E
    if IS_MASKED:
        is_seen = is_key[None, :] & (seen[None, :] <= visible[:, None])
        if HAS_WINDOW:
            is_seen &= distance > -window
        scores = tl.where(is_seen, scores, float("-inf"))

    larger = tl.maximum(largest, tl.max(scores, 1))
    level = larger
    if IS_MASKED:
        level = tl.where(larger == float("-inf"), 0.0, larger)  # of a query that has seen no key yet
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(largest - level)
    weight = weight * shrink + tl.sum(weights, 1)
    if IS_MASKED:
        v = tl.load(value_places, mask=is_key[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(q.dtype)
    elif HEAD_DIM == PADDED_DIM:
        v = tl.load(value_places).to(q.dtype)
    else:
        v = tl.load(value_places, mask=(dims < HEAD_DIM)[None, :], other=0.0).to(q.dtype)
    total = total * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee" if IN_FLOAT32 else None)
    return larger, weight, total


@triton.jit
def _merge_parts(
    sums,
    extents,
    out,
    rows,
    firsts,
    starts,
    lengths,
    out_stride,
    num_heads,
    TILE_TOKENS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One head of one token: its parts as one, each weighed by what its largest score is to the largest of all."""
    wait_for_previous(IS_DEPENDENT)
    line, head = tl.program_id(0), tl.program_id(1)
    tile = line // TILE_TOKENS
    row = tl.load(rows + tile)
    token = tl.load(firsts + tile) + line % TILE_TOKENS
    if token >= tl.load(lengths + row):
        return
    place = (tl.load(starts + row) + token).to(tl.int64)
    base = (line.to(tl.int64) * num_heads + head) * NUM_PARTS
    dims = tl.arange(0, PADDED_DIM)
    parts = base + tl.arange(0, NUM_PARTS)
    largest = tl.load(extents + parts * 2)
    share = tl.exp2(largest - tl.max(largest, 0))
    weight = tl.sum(share * tl.load(extents + parts * 2 + 1), 0)
    each = tl.load(sums + parts[:, None] * HEAD_DIM + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
    total = tl.sum(share[:, None] * each, 0)
    places = out + place * out_stride + head * HEAD_DIM + dims
    tl.store(places, (total / weight).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


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
        visible = batch.host_visible_ends
        starts, sizes, contexts, table, decode_rows, decode_firsts, chunk_rows, chunk_firsts, ends = self._upload(
            np.cumsum(lengths) - lengths,
            lengths,
            np.array([row.end for row in rows]),
            tables,
            np.arange(num_decode),
            np.zeros(num_decode),
            tile_rows,
            tile_firsts,
            np.zeros(0) if visible is None else visible,
        )
        shared = (starts, sizes, contexts, table.view(tables.shape))
        parts = self._num_parts(num_decode, tables.shape[1])
        return TritonPlan(
            decode=Tiles(1, parts, decode_rows, decode_firsts, *shared) if num_decode else None,
            chunks=Tiles(self._tile_tokens, 1, chunk_rows, chunk_firsts, *shared, None if visible is None else ends)
            if chunks
            else None,
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
                    sees_spans=rule.sees_spans,
                )
        return out
