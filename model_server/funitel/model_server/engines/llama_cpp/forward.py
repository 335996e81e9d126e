"""A forward of llama.cpp over its own memory of keys and values; the blocks of the router account for its size.

A sequence of llama.cpp has the number of its row in the sequence table. All sequences share the cells of one memory, so
the blocks that the router grants are a count of cells, and which block it is does not matter.
"""

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from funitel.model_server.engines.llama_cpp.library import KeptBytes, LlamaContext, LlamaModel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.proto.errors import InvalidRequest, StepFailed


class LlamaCppPool(KVCache):
    """See KVCache. Its blocks have no places: they are cells of the context, which any sequence may use."""

    def __init__(self, pools: "LlamaCppPools", num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = pools.block_size
        self.max_rows = pools.num_rows
        self._num_bytes = num_blocks * pools.bytes_per_block + pools.state_bytes
        self.context = LlamaContext(
            pools.model,
            num_tokens=num_blocks * pools.block_size,
            num_sequences=pools.num_rows,
            num_threads=pools.num_threads,
        )

    @property
    def num_bytes(self) -> int:
        """See KVCache."""
        return self._num_bytes

    def check_copy(self, source: int, target: int) -> None:
        """Refuse: a block cannot be copied."""
        raise InvalidRequest(f"block {source} cannot be copied to block {target}: --engine llama_cpp copies no blocks")

    def wipe(self, blocks: Sequence[int]) -> None:
        """Nothing is to be done: llama.cpp masks what was not written."""


class LlamaCppPools:
    """See Pools. `num_rows` are the sequences that a pool made from now on has room for."""

    state_layout = None
    has_parted_blocks = False

    def __init__(self, model: LlamaModel, kept: KeptBytes, block_size: int, num_threads: int) -> None:
        self.model = model
        self.block_size = block_size
        self.num_threads = num_threads
        self.num_rows = 1
        self.bytes_per_block = self.total_bytes_per_block = block_size * kept.a_token
        self._kept = kept

    @property
    def state_bytes(self) -> int:
        """What the states of all sequences take, of a model with recurrent layers."""
        return self.num_rows * self._kept.a_sequence

    def make(self, num_blocks: int) -> LlamaCppPool:
        """See Pools."""
        return LlamaCppPool(self, num_blocks)


class LlamaCppForward:
    """See Forward."""

    _context: Callable[[], LlamaContext | None] = staticmethod(lambda: None)
    """Of the latest forward, as long as its pool lives."""

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """See Forward."""
        assert isinstance(cache, LlamaCppPool)
        self._context = weakref.ref(cache.context)
        tokens = batch.input_ids.numpy().astype(np.int32)
        positions = batch.positions.numpy().astype(np.int32)
        lengths = [len(row.tokens) for row in batch.rows]
        sequences = np.repeat(np.array([row.row_index for row in batch.rows], dtype=np.int32), lengths)
        places = batch.logit_indices.numpy()
        wanted = np.zeros(len(tokens), dtype=np.bool_)
        wanted[places] = True
        context = cache.context
        if len({row.row_index for row in batch.rows}) == len(batch.rows):
            for row in batch.rows:
                _prepare(context, row)
            logits = context.decode(tokens, positions, sequences, wanted)
        else:  # prompts of the warm-up, which have no rows
            parts, begin = [], 0
            for row, length in zip(batch.rows, lengths, strict=True):
                _prepare(context, row)
                part = slice(begin, begin := begin + length)
                parts.append(context.decode(tokens[part], positions[part], sequences[part], wanted[part]))
            logits = np.concatenate(parts)
        order = np.cumsum(wanted)[places] - 1  # of the caller's logits among those in the order of the tokens
        return torch.from_numpy(logits[order])

    def release(self, place: int) -> None:
        """Let go of the sequence of a row that is given back."""
        context = self._context()
        if context is not None and place < context.num_sequences:
            context.forget(place)


def _prepare(context: LlamaContext, row: RowSpan) -> None:
    """Have the context keep of a row what comes before this step, no more and no less.

    Raises:
        StepFailed: it keeps less.
    """
    if row.start == 0:
        context.forget(row.row_index)
        return
    length = context.length(row.row_index)
    if length < row.start:
        raise StepFailed(f"llama.cpp keeps {length} tokens of a sequence that has {row.start}")
    if length > row.start:  # of a step that failed
        context.forget(row.row_index, row.start)
