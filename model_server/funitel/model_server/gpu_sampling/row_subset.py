"""Some rows of a matrix on a device."""

from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.device.upload import upload


@dataclass(frozen=True, slots=True)
class RowSubset:
    """Rows of a matrix by their places, which the device knows too: [rows] int64."""

    rows: list[int]
    index: torch.Tensor
    is_all: bool  # all rows, in order

    @classmethod
    def of(cls, rows: list[int], num_rows: int, device: torch.device) -> "RowSubset | None":
        """Rows out of so many, in order; None for none."""
        if not rows:
            return None
        return cls(rows, upload(np.array(rows, dtype=np.int64), device), len(rows) == num_rows)

    def of_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """These rows: a copy, or the matrix itself where they are all of it."""
        return matrix if self.is_all else matrix.index_select(0, self.index)

    def put(self, matrix: torch.Tensor, values: torch.Tensor) -> None:
        """Replace these rows in place."""
        if self.is_all:
            matrix.copy_(values)
        else:
            matrix.index_copy_(0, self.index, values)
