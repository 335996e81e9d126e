"""Arguments of the kernels of adapters: addresses and sizes of weights, and tiles of rows with the same adapter."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.layers.low_rank.weights import LowRankSite, LowRankWeights

MAX_PIECES = 3
TILE_ROWS, TILE_RANKS = 16, 16
# Of a record: address of a, its ranks; of each piece: address of b and four numbers. An even width keeps the records
# of each site at addresses of 16 bytes, for which kernels are compiled once.
_FIELDS, _FIELDS_OF_PIECE = 2, 5
WIDTH = -(-(_FIELDS + _FIELDS_OF_PIECE * MAX_PIECES) // 2) * 2


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Rows sorted by adapter, and the tiles that they are cut into.

    Attributes:
        rows: [n] int32, places among the rows of a step.
        tiles: [1 + num_tiles, 3] int32. The first line begins with the number of tiles in use. Each other line has the
            line of its adapter in the table of records, the first of its sorted rows, and the number of its rows.
        num_programs: programs side by side, each of which computes one tile after the other.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    num_programs: int


def tile_lines(counts: Iterable[tuple[int, int]]) -> np.ndarray:
    """The tiles of a `RowTiles`, [1 + num_tiles, 3] int32, for the records' line and the row count of each adapter."""
    lines, begin = [(0, 0, 0)], 0
    for record, count in counts:
        end = begin + count
        lines += [(record, first, min(TILE_ROWS, end - first)) for first in range(begin, end, TILE_ROWS)]
        begin = end
    tiles = np.array(lines, dtype=np.int32)
    tiles[0, 0] = len(lines) - 1
    return tiles


def is_simple(site: LowRankSite) -> bool:
    """Whether kernels compute an adapter's part of a site: no tables, whole matrices or weights packed for a CPU."""
    is_here = site.shrink is not None and not site.shrink.is_packed and site.whole is None
    return is_here and len(site.expand) <= MAX_PIECES


def records_of(weights: LowRankWeights, device: torch.device) -> torch.Tensor:
    """The records of an adapter, [num_sites, WIDTH] int64: zeros for sites that it lacks. Made once."""
    if weights.records is None:
        records = np.zeros((weights.num_sites, WIDTH), dtype=np.int64)
        for number, site in weights.sites.items():
            if not is_simple(site) or site.shrink is None:
                continue
            numbers = [site.shrink.weight.data_ptr(), site.shrink.weight.shape[0]]
            for outputs, ranks, matmul in site.expand:
                numbers += [matmul.weight.data_ptr(), outputs.start, outputs.stop - outputs.start]
                numbers += [ranks.start, ranks.stop - ranks.start]
            records[number, : len(numbers)] = numbers
        weights.records = upload(records, device)
    return weights.records


@dataclass(frozen=True, slots=True)
class SiteSize:
    """The largest weights of a site among some adapters, which launches have room for.

    Attributes:
        num_ranks: rows of `a`, rounded up to whole tiles.
        num_pieces: matrices `b`.
        num_outputs: rows of one `b`.
    """

    num_ranks: int
    num_pieces: int
    num_outputs: int

    @classmethod
    def of(cls, sites: Sequence[LowRankSite]) -> "SiteSize":
        """The size that holds each of `sites`, of which there is one at least."""
        num_ranks = max([site.shrink.weight.shape[0] for site in sites if site.shrink is not None])
        num_outputs = max([matmul.weight.shape[0] for site in sites for _, _, matmul in site.expand])
        num_pieces = max([len(site.expand) for site in sites])
        return cls(-(-num_ranks // TILE_RANKS) * TILE_RANKS, num_pieces, num_outputs)

    def joined(self, other: "SiteSize | None") -> "SiteSize":
        """The size that holds both."""
        if other is None:
            return self
        return SiteSize(
            max(self.num_ranks, other.num_ranks),
            max(self.num_pieces, other.num_pieces),
            max(self.num_outputs, other.num_outputs),
        )


class LargestSites:
    """The sizes of sites that hold every adapter placed so far. It may be called from any thread.

    `sizes` are those by the number of the site, without sites that no adapter has: another mapping after each growth.
    """

    def __init__(self) -> None:
        self.sizes: Mapping[int, SiteSize] = {}
        self._growing = threading.Lock()

    def include(self, weights: LowRankWeights) -> None:
        """Grow for an adapter, if kernels compute it and it is larger."""
        if not all(map(is_simple, weights.sites.values())):
            return
        with self._growing:
            grown = dict(self.sizes)
            for number, site in weights.sites.items():
                grown[number] = SiteSize.of([site]).joined(grown.get(number))
            if grown != self.sizes:
                self.sizes = grown
