"""Adapters in recorded steps, such as CUDA graphs: launches with the same arguments in every step, over fixed memory.

A table has the records of an adapter in each of its slots. Before a step is replayed, the records of its adapters are
copied to slots unless they are there, and its rows and tiles are written. A tile names the slot of its adapter, so a
replay reads the weights of the step's own adapters.

Launches have room for the adapters of all steps so far. They grow with the steps and not with the loading of adapters,
which ranks may do between different steps: every rank has to record the same steps, since recording computes.
"""

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from funitel.model_server.adapters.sites import Site
from funitel.model_server.forward.batch import RowSpan
from funitel.model_server.layers.low_rank.records import (
    WIDTH,
    RowTiles,
    SiteSize,
    is_simple,
    padded_ranks,
    records_of,
    tile_lines,
)
from funitel.model_server.layers.low_rank.weights import LowRankWeights, weights_of

AddRows = Callable[[torch.Tensor, torch.Tensor, RowTiles, torch.Tensor, SiteSize], None]
"""Adds to y [rows, outputs] for x [rows, inputs] what the adapters of its rows add, by a site's records and size."""

MAX_PROGRAMS = 16  # side by side over tiles: a step has as many tiles as rows at most, and far fewer as a rule
_ALIGNMENT = 4  # int32 of 16 bytes: kernels are compiled for pointers that are aligned so, and for others again


class RecordedLowRank:
    """Computes the adapters of recorded steps; each row of such a step has one token, and logits.

    Args:
        add_rows: launches the kernels of a site.
        sites: of the decoder.
        num_rows: of the largest step.
        device: of the decoder.
    """

    def __init__(self, add_rows: AddRows, sites: Sequence[Site], num_rows: int, device: torch.device) -> None:
        self.version = 0  # another number after each change of the launches
        self._add_rows = add_rows
        self._sites = sites
        self._sizes: dict[int, SiteSize] = {}  # of sites that an adapter has had
        # A step has as many adapters as rows at most, so the table never has to grow, which would move it.
        self._table = torch.zeros((num_rows, len(sites), WIDTH), dtype=torch.int64, device=device)
        self._slots: WeakKeyDictionary[LowRankWeights, int] = WeakKeyDictionary()  # least recently used first
        self._numbers = torch.zeros(self.num_numbers(num_rows), dtype=torch.int32, device=device)

    @staticmethod
    def num_numbers(num_rows: int) -> int:
        """How many int32 of a step of so many rows are uploaded."""
        return _first_tile(num_rows) + 3 * (1 + num_rows)

    def admit(self, rows: Sequence[RowSpan]) -> bool:
        """Whether kernels compute all adapters of a step. `version` is that of the launches of this step afterwards."""
        adapters = {weights_of(row.adapter) for row in rows if row.adapter is not None}
        new = [weights for weights in adapters if weights not in self._slots]
        if not all([is_simple(site) for weights in new for site in weights.sites.values()]):
            return False
        grown = [self._grow(number, padded_ranks(site)) for each in new for number, site in each.sites.items()]
        self.version += any(grown)
        return True

    def _grow(self, number: int, num_ranks: int) -> bool:
        """Make room for so many ranks at a site; whether there was none."""
        known = self._sizes.get(number)
        if known is not None and known.num_ranks >= num_ranks:
            return False
        self._sizes[number] = SiteSize.within(self._sites[number], num_ranks)
        return True

    def fill(self, numbers: np.ndarray, rows: Sequence[RowSpan], num_rows: int) -> None:
        """Write a step's rows and tiles to `numbers` [num_numbers(num_rows)] int32, which are zeros.

        The records of its adapters are copied to the table where they are not there.
        """
        owners: dict[LowRankWeights, list[int]] = {}
        for place, row in enumerate(rows):
            if row.adapter is not None:
                owners.setdefault(weights_of(row.adapter), []).append(place)
        slots = self._slots_of(owners)
        places = [place for own in owners.values() for place in own]
        numbers[: len(places)] = places
        tiles = tile_lines(zip(slots, map(len, owners.values()), strict=True)).reshape(-1)
        begin = _first_tile(num_rows)
        numbers[begin : begin + len(tiles)] = tiles

    def take_over(self, numbers: torch.Tensor) -> None:
        """Copy what `fill` has written, on the device by now, to the memory that a replay reads."""
        self._numbers[: len(numbers)].copy_(numbers)

    def add(self, number: int, x: torch.Tensor, y: torch.Tensor, *, is_head: bool) -> torch.Tensor:
        """See LowRankOps; rows of the head are those of the step."""
        size = self._sizes.get(number)
        if size is not None:
            self._add_rows(x, y, self._layout(len(x)), self._table[:, number], size)
        return y

    def _layout(self, num_rows: int) -> RowTiles:
        begin, end = _first_tile(num_rows), self.num_numbers(num_rows)
        return RowTiles(self._numbers[:num_rows], self._numbers[begin:end].view(-1, 3), min(num_rows, MAX_PROGRAMS))

    def _slots_of(self, adapters: Mapping[LowRankWeights, object]) -> list[int]:
        """The slots of a step's adapters; those of adapters that are not in the step are taken where none is free."""
        taken: list[int] = []
        for weights in adapters:
            slot = self._slots.pop(weights, None)
            if slot is None:
                slot = self._free_slot(adapters)
                self._table[slot].copy_(records_of(weights, self._table.device), non_blocking=True)
            self._slots[weights] = slot
            taken.append(slot)
        return taken

    def _free_slot(self, adapters: Mapping[LowRankWeights, object]) -> int:
        held = list(self._slots.items())  # of adapters that are not freed meanwhile
        used = {slot for _, slot in held}
        free = next((slot for slot in range(len(self._table)) if slot not in used), None)
        if free is not None:
            return free
        return self._slots.pop(next(weights for weights, _ in held if weights not in adapters))


def _first_tile(num_rows: int) -> int:
    return -(-num_rows // _ALIGNMENT) * _ALIGNMENT
