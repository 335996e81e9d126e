"""Triton kernels of adapters: the rows of all adapters of a step in one launch, in tiles of rows of one adapter each.

Rows are sorted by adapter. `_shrink` multiplies them by `a` of their adapter, `_expand` the result by `b`, which is
added to the outputs. Addresses of an adapter's matrices are read from its records.

A decoding step has few tiles, and many inputs for each. So inputs are cut into parts, and `_shrink` computes each part
in a program of its own; `_expand` adds the parts in order. Where tiles are many, one program of `_shrink` computes all
parts and adds them in the same order. So a row has the same bits in both cases, and in every company.
Source: segmented gather matrix-vector product, Punica, arXiv 2310.18547.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from funitel.model_server.adapters.peft_folder import AdapterTensors, LowRank
from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.adapters.sites import Site
from funitel.model_server.device.dependent_kernels import dependent, wait_for_previous
from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.device.probe_or_fall_back import check_probe
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.forward.batch import AdapterGroup, RowSpan
from funitel.model_server.layers.low_rank.ops import TorchLowRankOps
from funitel.model_server.layers.low_rank.recorded import RecordedLowRank
from funitel.model_server.layers.low_rank.records import (
    TILE_RANKS,
    TILE_ROWS,
    RowTiles,
    SiteSize,
    is_simple,
    records_of,
    tile_lines,
)
from funitel.model_server.layers.low_rank.weights import place, weights_of

_IS_INTERPRETED = triton.knobs.runtime.interpret  # Triton's interpreter multiplies bfloat16 as the integers they lie in
_INPUTS, _OUTPUTS = 128, 128  # of a tile
_MIN_PART, _MAX_PARTS = 512, 16  # inputs of a part at least, and parts of a row at most
_FEW_TILES = 32  # for which the parts are computed side by side


@triton.jit
def _shrink(
    x,
    shrunk,
    records,
    rows,
    tiles,
    num_inputs,
    part_size,
    parts_per_program,
    x_stride,
    record_stride,
    shrunk_stride,
    part_stride,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Parts of the inputs for tiles of rows and a tile of ranks: shrunk = x @ a.T in float32."""
    num_tiles = tl.load(tiles)
    first_part = tl.program_id(2) * parts_per_program
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    places = tl.arange(0, ROWS)
    wait_for_previous(IS_DEPENDENT)
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = tiles + (1 + index) * 3
        adapter, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        record = records + adapter.to(tl.int64) * record_stride
        num_ranks = tl.load(record + 1)
        if tl.program_id(1) * RANKS < num_ranks:
            a = tl.multiple_of(tl.load(record).to(tl.pointer_type(x.dtype.element_ty)), 16)
            tokens = tl.load(rows + first + places, mask=places < count, other=0).to(tl.int64)
            total = tl.zeros((ROWS, RANKS), tl.float32)
            for part in range(first_part, first_part + parts_per_program):
                own = tl.zeros((ROWS, RANKS), tl.float32)
                end = tl.minimum((part + 1) * part_size, num_inputs)
                for begin in range(part * part_size, end, INPUTS):
                    inputs = begin + tl.arange(0, INPUTS)
                    is_in = inputs < end
                    values = tl.load(
                        x + tokens[:, None] * x_stride + inputs[None, :],
                        mask=(places < count)[:, None] & is_in[None, :],
                        other=0.0,
                    )
                    weights = tl.load(
                        a + ranks[None, :].to(tl.int64) * num_inputs + inputs[:, None],
                        mask=(ranks < num_ranks)[None, :] & is_in[:, None],
                        other=0.0,
                    )
                    if IS_WIDE:
                        values, weights = values.to(tl.float32), weights.to(tl.float32)
                    own += tl.dot(values, weights, input_precision="ieee")
                total += own
            target = shrunk + tl.program_id(2) * part_stride + (first + places)[:, None] * shrunk_stride
            is_kept = (places < count)[:, None] & (ranks < num_ranks)[None, :]
            tl.store(target + ranks[None, :], total, mask=is_kept)


@triton.jit
def _expand(
    x,
    shrunk,
    y,
    records,
    rows,
    tiles,
    num_parts,
    y_stride,
    record_stride,
    shrunk_stride,
    part_stride,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Tiles of rows and a tile of outputs of a piece: y += shrunk @ b.T, where shrunk is the sum of its parts.

    Weights have the precision of `x`, which is not read.
    """
    num_tiles = tl.load(tiles)
    places = tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    wait_for_previous(IS_DEPENDENT)
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = tiles + (1 + index) * 3
        adapter, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        record = records + adapter.to(tl.int64) * record_stride + 2 + 5 * tl.program_id(2)
        first_output, num_outputs = tl.load(record + 1), tl.load(record + 2)
        first_rank, num_ranks = tl.load(record + 3), tl.load(record + 4)
        if tl.program_id(1) * OUTPUTS < num_outputs:
            b = tl.multiple_of(tl.load(record).to(tl.pointer_type(x.dtype.element_ty)), 16)
            tokens = tl.load(rows + first + places, mask=places < count, other=0).to(tl.int64)
            total = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for begin in range(0, num_ranks, RANKS):
                ranks = begin + tl.arange(0, RANKS)
                is_in = ranks < num_ranks
                is_own = (places < count)[:, None] & is_in[None, :]
                source = shrunk + (first + places)[:, None] * shrunk_stride + first_rank + ranks[None, :]
                values = tl.load(source, mask=is_own, other=0.0)
                for part in range(1, num_parts):
                    values += tl.load(source + part * part_stride, mask=is_own, other=0.0)
                weights = tl.load(
                    b + outputs[None, :].to(tl.int64) * num_ranks + ranks[:, None],
                    mask=(outputs < num_outputs)[None, :] & is_in[:, None],
                    other=0.0,
                )
                total += tl.dot(values, weights.to(tl.float32), input_precision="ieee")
            target = y + tokens[:, None] * y_stride + first_output + outputs[None, :]
            is_out = (places < count)[:, None] & (outputs < num_outputs)[None, :]
            before = tl.load(target, mask=is_out, other=0.0).to(tl.float32)
            tl.store(target, (before + total).to(y.dtype.element_ty), mask=is_out)


def _tiles_of(rows: Sequence[Sequence[int]], device: torch.device) -> RowTiles:
    """The tiles of the rows of each adapter."""
    tiles = tile_lines(enumerate(map(len, rows)))
    places = np.array([place for own in rows for place in own], dtype=np.int32)
    return RowTiles(upload(places, device), upload(tiles, device), len(tiles) - 1)


class TritonLowRankOps(TorchLowRankOps):
    """The products of adapters in kernels; embeddings, and heads saved whole, in torch."""

    is_recordable = True

    def recorded(self, sites: Sequence[Site], num_rows: int, device: torch.device) -> RecordedLowRank:
        """See TorchLowRankOps."""
        return RecordedLowRank(_add, sites, num_rows, device)

    def begin(self, groups: Sequence[AdapterGroup]) -> None:
        """See TorchLowRankOps."""
        super().begin(groups)
        self._tokens = _tiles_of([group.token_places for group in groups], groups[0].device)
        self._logits: RowTiles | None = None
        self._records: torch.Tensor | None = None

    def end(self) -> None:
        """See TorchLowRankOps."""
        super().end()
        self._logits = self._records = None

    def add(self, number: int, x: torch.Tensor, y: torch.Tensor, *, is_head: bool) -> torch.Tensor:
        """See TorchLowRankOps."""
        own = [weights_of(group.adapter).sites.get(number) for group in self.groups]
        found = [site for site in own if site is not None]
        if not found:
            return y
        if not all(map(is_simple, found)):
            return super().add(number, x, y, is_head=is_head)
        if is_head and self._logits is None:
            self._logits = _tiles_of([group.logit_places for group in self.groups], self.groups[0].device)
        layout = self._logits if is_head and self._logits is not None else self._tokens
        if layout.num_programs:
            _add(x, y, layout, self._all_records()[:, number], SiteSize.of(found))
        return y

    def _all_records(self) -> torch.Tensor:
        """The records of the step's adapters, [adapters, sites, WIDTH] int64."""
        if self._records is None:
            self._records = torch.stack([records_of(weights_of(group.adapter), group.device) for group in self.groups])
        return self._records


def _add(x: torch.Tensor, y: torch.Tensor, layout: RowTiles, records: torch.Tensor, size: SiteSize) -> None:
    """y += what the adapters of rows add.

    Args:
        x: [rows, inputs], in the precision of the weights.
        y: [rows, outputs], in the same precision or float32.
        layout: which rows have which adapter.
        records: of the site, [adapters, WIDTH] int64.
        size: that holds the weights of these adapters.
    """
    x = x.contiguous()
    num_inputs, num_rows = x.shape[1], len(layout.rows)
    num_parts = min(_MAX_PARTS, triton.cdiv(num_inputs, _MIN_PART))  # by inputs alone: sums have the same order always
    part_size = triton.cdiv(triton.cdiv(num_inputs, num_parts), _INPUTS) * _INPUTS
    num_stored = num_parts if layout.num_programs <= _FEW_TILES else 1
    shrunk = torch.empty((num_stored, num_rows, size.num_ranks), dtype=torch.float32, device=x.device)
    _shrink[(layout.num_programs, size.num_ranks // TILE_RANKS, num_stored)](
        x,
        shrunk,
        records,
        layout.rows,
        layout.tiles,
        num_inputs,
        part_size,
        num_parts // num_stored,
        x.stride(0),
        records.stride(0),
        shrunk.stride(1),
        shrunk.stride(0),
        ROWS=TILE_ROWS,
        RANKS=TILE_RANKS,
        INPUTS=_INPUTS,
        IS_WIDE=_IS_INTERPRETED or x.dtype.itemsize > 2,
        **dependent(),
    )
    _expand[(layout.num_programs, triton.cdiv(size.num_outputs, _OUTPUTS), size.num_pieces)](
        x,
        shrunk,
        y,
        records,
        layout.rows,
        layout.tiles,
        num_stored,
        y.stride(0),
        records.stride(0),
        shrunk.stride(1),
        shrunk.stride(0),
        ROWS=TILE_ROWS,
        RANKS=TILE_RANKS,
        OUTPUTS=_OUTPUTS,
        **dependent(),
    )


def check_low_rank(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise ValueError unless the kernels give what torch gives, also by the tables of recorded steps."""
    generator = seeded_generator(0, device)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    site = Site((("q", 80, (0, 80)), ("k", 48, (16, 48))), 1200)
    groups, spans, begin = [], [], 0
    for i, (ranks, num_rows) in enumerate((((8, 20), 3), ((0, 5), 20))):
        low_ranks = {
            name: LowRank(drawn(rank, 1200), drawn(outputs, rank), 0.5)
            for name, rank, outputs in zip("qk", ranks, (80, 48), strict=True)
            if rank
        }
        weights = place([site], AdapterTensors(low_ranks, {}), dtype, device)
        adapter, rows = PlacedAdapter(str(i), "", max(ranks), weights), range(begin, begin + num_rows)
        groups.append(AdapterGroup(adapter, rows, (), device))
        row = RowSpan([0], 0, np.zeros(1, np.int32))
        spans += [replace(row, adapter=adapter)] * num_rows + [row]
        begin += num_rows + 1
    x, y = drawn(begin, 1200).to(dtype), drawn(begin, 112).to(dtype)
    results: list[Any] = []
    for each in (TorchLowRankOps(), TritonLowRankOps()):
        each.begin(groups)
        results.append(each.add(0, x, y.clone(), is_head=False))
    recorded = RecordedLowRank(_add, [site], begin, device)
    recorded.admit(spans)
    staged = np.zeros(recorded.num_numbers(begin), dtype=np.int32)
    recorded.fill(staged, spans, begin)
    recorded.take_over(upload(staged, device))
    results.append(recorded.add(0, x, y.clone(), is_head=False))
    for found in results[1:]:
        check_probe(found, results[0])
