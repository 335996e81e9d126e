"""The interface between the executor and what makes draft tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from funitel.model_server.forward.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A decoding row that may have drafts: `tokens` are all it has, the last without KV; at most `limit` drafts."""

    request_id: int
    tokens: Sequence[int]
    block_table: np.ndarray  # [num_blocks] int32, covers len(tokens) + limit tokens
    limit: int


class Drafter(Protocol):
    """Makes draft tokens. Every rank makes the same calls; the drafts of rank 0 are used."""

    name: str
    hidden_layers: tuple[int, ...]
    """Layers of the target of which it reads the outputs (-1: the last one's, before the final norm); () for none."""

    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """See a forward of the target: `next_ids` [num_tokens] int64 is the token behind each of the batch's tokens, in
        the batch's flat order (the sampled one behind a row's last; -1 where it is not known yet), `hidden`
        [num_tokens, len(hidden_layers), hidden_size] float32. A drafter with KV of its own computes it here, in blocks
        of the same ids as the target's."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """At most `limit` tokens that may follow in each row."""
