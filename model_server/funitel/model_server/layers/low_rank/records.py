"""Arguments of the kernels of adapters: addresses and sizes of weights, and tiles of rows with the same adapter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.adapters.sites import Site
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
    """Sizes of weights of a site that launches have room for.

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
        """The size that holds the weights of some adapters, one at least."""
        num_outputs = max([matmul.weight.shape[0] for site in sites for _, _, matmul in site.expand])
        return cls(max(map(padded_ranks, sites)), max([len(site.expand) for site in sites]), num_outputs)

    @classmethod
    def within(cls, site: Site, num_ranks: int) -> "SiteSize":
        """The size that holds every adapter of at most `num_ranks` padded ranks."""
        num_pieces = min(MAX_PIECES, len(site.parts))
        return cls(num_ranks, num_pieces, max([end - begin for _, _, (begin, end) in site.parts]))


def padded_ranks(site: LowRankSite) -> int:
    """Rows of `a`, rounded up to whole tiles; 0 where there is none."""
    return 0 if site.shrink is None else -(-site.shrink.weight.shape[0] // TILE_RANKS) * TILE_RANKS
