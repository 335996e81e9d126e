"""One step's rows as tensors, passed down explicitly: no global context."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.kv_cache import Slots


@dataclass(frozen=True, slots=True)
class RowSpan:
    """What one row computes in a step.

    `tokens` are the known tokens to compute, the first at position `start`; `block_table` covers at least
    start + len(tokens) tokens. `logits` says which of them need logits: "none", "last" or "all". `prompt_len` is that
    of the sequence, 0 where it does not matter.
    """

    tokens: Sequence[int]
    start: int
    block_table: np.ndarray  # [num_blocks] int32
    logits: str = "last"
    prompt_len: int = 0

    @property
    def end(self) -> int:
        """Context after the step, in tokens."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The sequences of one forward, tokens of all rows back to back, single-token rows first.

    `rows` are the spans in that order; `order[i]` is where the caller's row i went. `logit_indices` are the tokens
    whose logits are wanted, caller's row by row.
    """

    rows: tuple[RowSpan, ...]
    num_decode: int  # leading rows that compute one token
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slots: Slots
    logit_indices: torch.Tensor  # [num_logits] int64

    @classmethod
    def build(cls, spans: Sequence[RowSpan], block_size: int, device: torch.device) -> "ForwardBatch":
        """Lay rows out; decode rows are sorted by context so that attention can group like with like."""
        order = sorted(range(len(spans)), key=lambda i: (len(spans[i].tokens) > 1, spans[i].end))
        rows = tuple(spans[i] for i in order)
        lengths = np.array([len(row.tokens) for row in rows])
        first = np.zeros(len(spans), dtype=np.int64)  # caller's row -> its first token in the flat order
        first[order] = np.cumsum(lengths) - lengths
        positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
        blocks = np.concatenate([row.block_table[np.arange(row.start, row.end) // block_size] for row in rows])
        input_ids = np.concatenate([np.asarray(row.tokens, dtype=np.int64) for row in rows])
        wanted = [_logit_indices(span, first[i]) for i, span in enumerate(spans)]

        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int64, copy=False)).to(device, non_blocking=True)

        return cls(
            rows=rows,
            num_decode=int((lengths == 1).sum()),
            input_ids=tensor(input_ids),
            positions=tensor(positions),
            slots=(tensor(blocks), tensor(positions % block_size)),
            logit_indices=tensor(np.concatenate(wanted)),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens in this forward."""
        return self.input_ids.shape[0]

    def reaches(self) -> torch.Tensor:
        """How many tokens each token's sequence is known to have: those of its prompt, and those up to itself."""
        prompts = [np.full(len(row.tokens), row.prompt_len) for row in self.rows]
        known = torch.from_numpy(np.concatenate(prompts)).to(self.positions.device)
        return torch.maximum(known, self.positions + 1)


def _logit_indices(span: RowSpan, first: int) -> np.ndarray:
    count = {"none": 0, "last": 1, "all": len(span.tokens)}[span.logits]
    return np.arange(first + len(span.tokens) - count, first + len(span.tokens))
