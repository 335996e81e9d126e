"""A drafter that is a model of its own, smaller than the target and with the same tokens.

It computes prompts as the target does, and of what is sampled as much as it lacks when drafts are asked for.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.speculation.heads import behind_of
from funitel.model_server.speculation.interface import DraftRow
from funitel.model_server.speculation.tables import likeliest

_MAX_ROWS = 2048  # sequences of which digests are kept
_FEW = 32  # tokens that may be left for `propose` to compute
_MOST = 512  # tokens of a row that `propose` computes at once; drafts wait until all are there

Digests = npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Sequence:
    """Digests of the beginnings of a sequence: of its first token, of its first two, and so on."""

    tokens: list[int] = field(default_factory=list)
    digests: Digests = field(default_factory=lambda: np.zeros(0, np.uint64))

    def extend(self, tokens: Sequence[int]) -> Digests:
        """Those of all of `tokens`."""
        known = len(self.tokens)
        if known > len(tokens) or (known and self.tokens[-1] != tokens[known - 1]):
            known = 0
            self.tokens, self.digests = [], self.digests[:0]
        if known < len(tokens):
            new = list(tokens[known:])
            self.tokens += new
            self.digests = np.concatenate((self.digests, digests_of(new, int(self.digests[-1]) if known else 0)))
        return self.digests


class DraftModel:
    """See Drafter. It is given a pool when the target's is made; before that nothing is observed.

    Which beginning of a sequence lies in a slot is known by its digest, so that what other sequences left in a block,
    and drafts that were rejected, count as not computed.

    Args:
        forward: computes the model.
        parallel: the ranks that compute it together.
        block_size: tokens of a block.
        device: where it computes.
        vocab_size: of the model; other tokens cannot be read.
        target_vocab_size: of the target; others are not proposed.
        context: the longest sequence, in tokens.
    """

    name = "draft_model"
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        forward: Forward,
        parallel: TensorParallel,
        block_size: int,
        device: torch.device,
        vocab_size: int,
        target_vocab_size: int,
        context: int,
    ) -> None:
        self._forward = forward
        self._parallel = parallel
        self._block_size = block_size
        self._device = device
        self._vocab_size = vocab_size
        self._num_proposed = min(vocab_size, target_vocab_size)
        self._context = context
        self._pool: KVCache | None = None
        self._computed: Digests = np.zeros(0, np.uint64)  # by slot; 0: nothing
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()

    def take_pool(self, pool: KVCache | None) -> None:
        """Keep keys and values there from now on; what was computed before is forgotten."""
        self._pool = pool
        self._computed = np.zeros(0 if pool is None else pool.num_blocks * self._block_size, np.uint64)
        self._sequences.clear()

    @torch.inference_mode()
    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """See Drafter; a few tokens are left for `propose`."""
        if self._pool is None or all(len(row.tokens) <= _FEW for row in batch.rows):
            return
        ids, following = batch.input_ids.tolist(), next_ids.tolist()
        spans: list[RowSpan] = []
        begin = 0
        for row in batch.rows:
            count = len(row.tokens)
            own = ids[begin : begin + count]
            tokens = own[: len(behind_of(own, following[begin : begin + count]))]
            begin += count
            base = int(self._computed[self._slots(row.block_table, row.start - 1, row.start)[0]]) if row.start else 0
            if (row.start and not base) or row.start + len(tokens) > self._context:
                continue  # what lies before is not there: `propose` begins at the beginning
            digests = digests_of(tokens, base)
            slots = self._slots(row.block_table, row.start, row.start + len(tokens))
            done = _num_leading(self._computed[slots] == digests)
            if len(tokens) - done > _FEW:
                spans.append(RowSpan(self._readable(tokens[done:]), row.start + done, row.block_table, "none"))
                self._computed[slots[done:]] = digests[done:]
        if spans:
            self._run(spans)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        drafts: list[list[int]] = [[] for _ in rows]
        if self._pool is None:
            return drafts
        spans: list[RowSpan] = []
        ready: list[int] = []
        ends: dict[int, int] = {}  # digests of the rows with their drafts
        for index, row in enumerate(rows):
            count = len(row.tokens)
            if row.limit <= 0 or count + row.limit > self._context:
                continue
            digests = self._digests(row)
            slots = self._slots(row.block_table, 0, count)
            first = min(_num_leading(self._computed[slots] == digests), count - 1)
            last = min(count, first + _MOST)
            self._computed[slots[first:last]] = digests[first:last]
            is_whole = last == count
            tokens = self._readable(row.tokens[first:last])
            spans.append(RowSpan(tokens, first, row.block_table, "last" if is_whole else "none"))
            if is_whole:
                ready.append(index)
                ends[index] = int(digests[-1])
        while spans:
            chosen = self._run(spans, len(ready))
            going, spans = [], []
            for index, token in zip(ready, chosen, strict=True):
                row, drafted = rows[index], drafts[index]
                drafted.append(token)
                if len(drafted) < row.limit:
                    going.append(index)
                    place = len(row.tokens) + len(drafted) - 1
                    spans.append(RowSpan([token], place, row.block_table))
                    ends[index] = int(digests_of([token], ends[index])[0])
                    self._computed[self._slots(row.block_table, place, place + 1)] = ends[index]
            ready = going
        return drafts

    def _run(self, spans: Sequence[RowSpan], num_rows: int = 0) -> list[int]:
        """Compute spans; the likeliest token behind each of the `num_rows` that need logits, the same on all ranks."""
        assert self._pool is not None
        batch = ForwardBatch.build(spans, self._block_size, self._device)
        logits = self._forward(batch, self._pool)
        if not num_rows:
            return []
        known = None if logits is None else logits[:, : self._num_proposed]
        found: list[int] = likeliest(known, num_rows, self._parallel, self._device).tolist()
        return found

    def _digests(self, row: DraftRow) -> Digests:
        sequence = self._sequences.setdefault(row.request_id, _Sequence())
        self._sequences.move_to_end(row.request_id)
        if len(self._sequences) > _MAX_ROWS:
            self._sequences.popitem(last=False)
        return sequence.extend(row.tokens)

    def _slots(self, block_table: npt.NDArray[np.int32], begin: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(begin, end)
        blocks = block_table[positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that the model does not know as one that it does: drafts behind them are bad, and no more."""
        return [token if token < self._vocab_size else 0 for token in tokens]


def digests_of(tokens: Sequence[int], base: int) -> Digests:
    """Digests of the beginnings of a sequence that end at each of `tokens`; `base` is that of what lies before."""
    found, digest = [], base
    for token in tokens:
        digest = ((digest ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
        digest ^= digest >> 29
        found.append(digest or 1)
    return np.array(found, dtype=np.uint64)


def _num_leading(values: npt.NDArray[np.bool_]) -> int:
    """How many values are true before the first that is not."""
    return len(values) if values.all() else int(values.argmin())
