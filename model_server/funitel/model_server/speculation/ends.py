"""Where rows end: what a drafter that reads hidden states keeps of the last position that the target has computed."""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from funitel.model_server.forward.batch import RowSpan
from funitel.model_server.speculation.interface import DraftRow

UNKNOWN = -1  # a token that is still to be sampled
_MOST = 2048  # rows


@dataclass(frozen=True, slots=True)
class End:
    """The last position of a row: the token behind it, or UNKNOWN, and a drafter's state there, [width]."""

    token: int
    state: torch.Tensor


class RowEnds:
    """Ends by the slot of the position, which is in a block of no other row; those not used for longest are dropped."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ends: OrderedDict[int, End] = OrderedDict()

    def clear(self) -> None:
        """Drop all."""
        self._ends.clear()

    def at(self, row: RowSpan | DraftRow, position: int) -> End | None:
        """The end at a position of a row, if it is known."""
        return self._ends.get(self._slot(row, position)) if position >= 0 else None

    def of(self, row: DraftRow) -> End | None:
        """The end of a row that wants drafts: before its last token, which has no KV."""
        return self.at(row, len(row.tokens) - 2) if row.limit > 0 else None

    def put(self, row: RowSpan | DraftRow, position: int, end: End) -> None:
        """Remember the end at a position of a row."""
        slot = self._slot(row, position)
        self._ends[slot] = end
        self._ends.move_to_end(slot)
        if len(self._ends) > _MOST:
            self._ends.popitem(last=False)

    def _slot(self, row: RowSpan | DraftRow, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return int(row.block_table[block]) * self._block_size + offset
