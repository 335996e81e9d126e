"""Rows with equally many tokens as the tensors of a padded batch, padded on the left."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.forward.batch import RowSpan
from funitel.model_server.kv_cache.pool import Slots


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Rows of a forward, and where what is kept of them lies. `width` is the longest context, in tokens."""

    has_past: bool  # all of them have, or none
    width: int
    input_ids: torch.Tensor  # [rows, tokens]
    positions: torch.Tensor  # [rows, tokens]
    mask: torch.Tensor | None  # [rows, width]: 1 where there is a token; None where none is missing
    written: Slots  # of the tokens, each [rows * tokens]
    read: Slots  # of the contexts, each [rows, width]; where the mask is 0 any slot of the row
    first_blocks: torch.Tensor  # [rows]

    @property
    def num_tokens(self) -> int:
        """Tokens of each row."""
        return self.input_ids.shape[1]

    @classmethod
    def of(cls, rows: Sequence[RowSpan], block_size: int, device: torch.device) -> "StackedRows":
        """Lay out rows of equally many tokens, all at a start of 0 or none."""
        width = max(row.end for row in rows)
        ends = np.array([row.end for row in rows])[:, None]
        num_tokens = len(rows[0].tokens)
        places = np.arange(width) - (width - ends)  # [rows, width]: positions, negative before the first token
        tables = [row.block_table for row in rows]

        def slots(positions: np.ndarray) -> Slots:
            blocks = np.stack([table[own // block_size] for table, own in zip(tables, positions, strict=True)])
            return tensor(blocks), tensor(positions % block_size)

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        blocks, offsets = slots(places[:, width - num_tokens :])
        return cls(
            has_past=rows[0].start > 0,
            width=width,
            input_ids=tensor(np.array([row.tokens for row in rows])),
            positions=tensor(places[:, width - num_tokens :]),
            mask=None if (places[:, 0] == 0).all() else tensor(places >= 0),
            written=(blocks.flatten(), offsets.flatten()),
            read=slots(np.maximum(places, 0)),
            first_blocks=tensor(np.array([table[0] for table in tables])),
        )
