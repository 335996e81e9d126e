"""Triton kernels of adapters: the rows of all adapters of a step in one launch, in tiles of rows of one adapter each.

Rows are sorted by adapter. `_shrink` multiplies them by `a` of their adapter, `_expand` the result by `b`, which is
added to the outputs: one launch for each piece of a site. Where an adapter's matrices lie is read from its records.
Source: segmented gather matrix-vector product, Punica, arXiv 2310.18547.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import triton
import triton.language as tl

from funitel.model_server.adapters.peft_folder import AdapterTensors, LowRank
from funitel.model_server.adapters.registry import PlacedAdapter
from funitel.model_server.adapters.sites import Site
from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.device.probe_or_fall_back import check_probe
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.forward.batch import AdapterGroup
from funitel.model_server.layers.low_rank.ops import LowRankSite, LowRankWeights, TorchLowRankOps, place, weights_of

_IS_INTERPRETED = triton.knobs.runtime.interpret  # Triton's interpreter multiplies bfloat16 as the integers they lie in
_ROWS, _RANKS, _INPUTS, _OUTPUTS = 16, 16, 64, 64  # of a tile
_MAX_PIECES = 3
_WIDTH = 2 + 5 * _MAX_PIECES  # of a record: address of a, its ranks; of each piece: address of b and four numbers


@triton.jit
def _shrink(
    x,
    shrunk,
    records,
    rows,
    tiles,
    num_inputs,
    x_stride,
    record_stride,
    shrunk_stride,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """A tile of rows and ranks: shrunk = x @ a.T in float32. A tile is (adapter, first row, number of rows)."""
    tile = tiles + tl.program_id(0) * 3
    group, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    record = records + group * record_stride
    num_ranks = tl.load(record + 1)
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(1) * RANKS < num_ranks:
        a = tl.load(record).to(tl.pointer_type(x.dtype.element_ty))
        places = tl.arange(0, ROWS)
        tokens = tl.load(rows + first + places, mask=places < count, other=0)
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for begin in range(0, num_inputs, INPUTS):
            inputs = begin + tl.arange(0, INPUTS)
            is_in = inputs < num_inputs
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
            total += tl.dot(values, weights, input_precision="ieee")
        target = shrunk + (first + places)[:, None] * shrunk_stride + ranks[None, :]
        tl.store(target, total, mask=(places < count)[:, None] & (ranks < num_ranks)[None, :])


@triton.jit
def _expand(
    shrunk,
    y,
    records,
    rows,
    tiles,
    piece,
    y_stride,
    record_stride,
    shrunk_stride,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """A tile of rows and outputs of a piece: y += shrunk @ b.T."""
    tile = tiles + tl.program_id(0) * 3
    group, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    record = records + group * record_stride + 2 + 5 * piece
    first_output, num_outputs = tl.load(record + 1), tl.load(record + 2)
    first_rank, num_ranks = tl.load(record + 3), tl.load(record + 4)
    if tl.program_id(1) * OUTPUTS < num_outputs:
        b = tl.load(record).to(tl.pointer_type(y.dtype.element_ty))
        places = tl.arange(0, ROWS)
        tokens = tl.load(rows + first + places, mask=places < count, other=0)
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        for begin in range(0, num_ranks, RANKS):
            ranks = begin + tl.arange(0, RANKS)
            is_in = ranks < num_ranks
            values = tl.load(
                shrunk + (first + places)[:, None] * shrunk_stride + first_rank + ranks[None, :],
                mask=(places < count)[:, None] & is_in[None, :],
                other=0.0,
            )
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows sorted by adapter, and the tiles that they are cut into."""

    rows: torch.Tensor  # [n] int64
    tiles: torch.Tensor  # [num_tiles, 3] int32: adapter, first of the sorted rows, number of rows

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> "_Layout":
        """The layout of each adapter's rows."""
        tiles, begin = [], 0
        for group, own in enumerate(rows):
            end = begin + len(own)
            tiles += [(group, first, min(_ROWS, end - first)) for first in range(begin, end, _ROWS)]
            begin = end
        return cls(torch.cat(list(rows)), upload(np.array(tiles, dtype=np.int32).reshape(-1, 3), rows[0].device))


class TritonLowRankOps(TorchLowRankOps):
    """The products of adapters in kernels; embeddings, and heads saved whole, in torch."""

    def begin(self, groups: Sequence[AdapterGroup]) -> None:
        """See TorchLowRankOps."""
        super().begin(groups)
        self._tokens = _Layout.of([group.tokens for group in groups])
        self._logits: _Layout | None = None
        self._records: dict[int, torch.Tensor] = {}

    def end(self) -> None:
        """See TorchLowRankOps."""
        super().end()
        self._logits, self._records = None, {}

    def add(self, number: int, x: torch.Tensor, y: torch.Tensor, *, is_head: bool) -> torch.Tensor:
        """See TorchLowRankOps."""
        own = [weights_of(group).sites.get(number) for group in self.groups]
        found = [site for site in own if site is not None]
        if not found:
            return y
        if not all(map(_is_simple, found)):
            return super().add(number, x, y, is_head=is_head)
        if is_head and self._logits is None:
            self._logits = _Layout.of([group.logits for group in self.groups])
        layout = self._logits if is_head and self._logits is not None else self._tokens
        if len(layout.tiles):
            _add(x, y, layout, self._records_of(number), found)
        return y

    def _records_of(self, number: int) -> torch.Tensor:
        """What kernels are told of a site's weights: [adapters, _WIDTH] int64, zeros for an adapter without it."""
        if not self._records:
            for group in self.groups:
                weights = weights_of(group)
                if weights.records is None:
                    weights.records = _records(weights, group.tokens.device)
            numbers = sorted({number for group in self.groups for number in weights_of(group).sites})
            most = max(numbers) + 1
            all_records = [
                torch.nn.functional.pad(cast(torch.Tensor, weights_of(group).records), (0, 0, 0, most))[:most]
                for group in self.groups
            ]
            stacked = torch.stack(all_records)
            self._records = {number: stacked[:, number] for number in numbers}
        return self._records[number]


def _is_simple(site: LowRankSite) -> bool:
    """Whether kernels compute it."""
    is_here = site.shrink is not None and not site.shrink.is_packed and site.whole is None
    return is_here and len(site.expand) <= _MAX_PIECES


def _records(weights: LowRankWeights, device: torch.device) -> torch.Tensor:
    """The records of an adapter, by the number of the site."""
    records = np.zeros((max(weights.sites, default=-1) + 1, _WIDTH), dtype=np.int64)
    for number, site in weights.sites.items():
        if not _is_simple(site) or site.shrink is None:
            continue
        numbers = [site.shrink.weight.data_ptr(), site.shrink.weight.shape[0]]
        for outputs, ranks, matmul in site.expand:
            numbers += [matmul.weight.data_ptr(), outputs.start, outputs.stop - outputs.start]
            numbers += [ranks.start, ranks.stop - ranks.start]
        records[number, : len(numbers)] = numbers
    return upload(records, device)


def _add(
    x: torch.Tensor, y: torch.Tensor, layout: _Layout, records: torch.Tensor, sites: Sequence[LowRankSite]
) -> None:
    """y += what the adapters of rows add; `sites` are the weights of those that have any."""
    num_tiles = len(layout.tiles)
    num_ranks = max(site.shrink.weight.shape[0] for site in sites if site.shrink is not None)
    x = x.contiguous()
    shrunk = torch.empty((len(layout.rows), num_ranks), dtype=torch.float32, device=x.device)
    _shrink[(num_tiles, triton.cdiv(num_ranks, _RANKS))](
        x,
        shrunk,
        records,
        layout.rows,
        layout.tiles,
        x.shape[1],
        x.stride(0),
        records.stride(0),
        num_ranks,
        ROWS=_ROWS,
        RANKS=_RANKS,
        INPUTS=_INPUTS,
        IS_WIDE=_IS_INTERPRETED or x.dtype.itemsize > 2,
    )
    for piece in range(max(len(site.expand) for site in sites)):
        most = max(site.expand[piece][2].weight.shape[0] for site in sites if piece < len(site.expand))
        _expand[(num_tiles, triton.cdiv(most, _OUTPUTS))](
            shrunk,
            y,
            records,
            layout.rows,
            layout.tiles,
            piece,
            y.stride(0),
            records.stride(0),
            num_ranks,
            ROWS=_ROWS,
            RANKS=_RANKS,
            OUTPUTS=_OUTPUTS,
        )


def check_low_rank(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise ValueError unless the kernels give what torch gives."""
    generator = seeded_generator(0, device)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    site = Site((("q", 80, (0, 80)), ("k", 48, (16, 48))), 96)
    groups, begin = [], 0
    for i, (ranks, num_rows) in enumerate((((8, 20), 3), ((0, 5), 20))):
        low_ranks = {
            name: LowRank(drawn(rank, 96), drawn(outputs, rank), 0.5)
            for name, rank, outputs in zip("qk", ranks, (80, 48), strict=True)
            if rank
        }
        weights = place([site], AdapterTensors(low_ranks, {}), dtype, device)
        rows = torch.arange(begin, begin + num_rows, device=device)
        groups.append(AdapterGroup(PlacedAdapter(str(i), "", max(ranks), weights), rows, rows[:0]))
        begin += num_rows + 1
    x, y = drawn(begin, 96).to(dtype), drawn(begin, 112).to(dtype)
    results: list[Any] = []
    for ops in (TorchLowRankOps(), TritonLowRankOps()):
        ops.begin(groups)
        results.append(ops.add(0, x, y.clone(), is_head=False))
    check_probe(results[1], results[0])
