"""What a device remembers of sequences from step to step: the last token of each, and for penalties all it holds."""

import numpy as np
import torch

from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.sequence.table import SequenceState

_MIN_SLOTS, _MIN_COUNTED = 1024, 8


class RowStates:
    """State by slot, the place of a row in the sequence table. What is written is seen by what is launched after it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros(_MIN_SLOTS, dtype=torch.int64, device=device)  # the last of each slot
        self.counts = torch.zeros(0, 2, vocab_size, dtype=torch.int32, device=device)  # in all, in the completion
        self._places: dict[int, int] = {}  # slot -> line of `counts`

    def reserve(self, num_slots: int) -> None:
        """Have room for so many slots."""
        if num_slots > len(self.tokens):
            grown = torch.zeros(max(num_slots, 2 * len(self.tokens)), dtype=torch.int64, device=self.device)
            grown[: len(self.tokens)] = self.tokens
            self.tokens = grown

    def place_of(self, row: SequenceState) -> int:
        """The line of a row's counts; on the first call for a row what it holds is counted there."""
        if row.counts_place is None:
            place = self._places.setdefault(row.index, len(self._places))
            self._grow(len(self._places))
            self._count(place, row)
            row.counts_place = place
        return row.counts_place

    def push(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the tokens [rows] that some slots [rows] have got."""
        self.tokens.index_copy_(0, slots, tokens)

    def count(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count completion tokens [rows] in the lines [rows] of their rows."""
        for part in range(2):
            line = self.counts[:, part]
            line[places, tokens] += 1  # a row is here once

    def _grow(self, num_places: int) -> None:
        if num_places > len(self.counts):
            shape = (max(num_places, 2 * len(self.counts), _MIN_COUNTED), *self.counts.shape[1:])
            grown = torch.zeros(shape, dtype=torch.int32, device=self.device)
            grown[: len(self.counts)] = self.counts
            self.counts = grown

    def _count(self, place: int, row: SequenceState) -> None:
        lines = self.counts[place]
        lines.zero_()
        for line, (ids, counts) in zip(lines, row.sampling.held(), strict=True):
            if ids:
                there = upload(np.array([ids, counts], dtype=np.int64), self.device)
                line.index_copy_(0, there[0], there[1].int())
