"""Decoding as CUDA graphs: a step of rows with one token each is recorded once for a bucket of rows, and replayed.

A step with rows that have adapters or media is computed as it is.

Launching a layer's kernels costs the host more than they cost the device when rows are few; a replay is one launch.
A step takes the smallest bucket that holds it. Rows beyond its own are padding: they compute token 0 at position 0 of
block 0, which is no sequence's, and what comes of it is not read.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from funitel.model_server.attention.backend import RecordableAttention
from funitel.model_server.device.memory import MEMORY_ERRORS, is_out_of_memory
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan, block_tables
from funitel.model_server.kv_cache.pool import KVCache, Slots
from funitel.model_server.models.decoder import Decoder
from funitel.proto.settings.batch_sizes import BatchSizes

logger = logging.getLogger(__name__)

Body = Callable[[], torch.Tensor | None]
Record = Callable[[Body], Body]  # from work on fixed tensors to its replay, which gives the same tensor each time

_LAST_DOUBLING, _LARGEST = 8, 256
_ALIGNMENT = 4  # int32 of 16 bytes: kernels are compiled for pointers that are aligned so, and for others again


def default_buckets() -> tuple[int, ...]:
    """Rows of the steps that are recorded: 1, 2, 4, 8, then every eighth number."""
    return (1, 2, 4, *range(_LAST_DOUBLING, _LARGEST + 1, 8))


class CudaRecorder:
    """Records work on this device as CUDA graphs, which share the memory of what they compute on the way."""

    _WARM_UPS = 2  # runs before: what is made once, such as compiled kernels, must not be in the graph

    def __init__(self) -> None:
        self._newest: Callable[[], Any] = lambda: None  # the newest graph, while it lives: its memory is shared

    def __call__(self, body: Body) -> Body:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._WARM_UPS):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph, newest = torch.cuda.CUDAGraph(), self._newest()
        pool = None if newest is None else newest.pool()
        # Other threads may call CUDA meanwhile: one waits for the copies of steps before, NCCL's for collectives.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = body()
        self._newest = weakref.ref(graph)

        def replay() -> torch.Tensor | None:
            graph.replay()
            return result

        return replay


class _Inputs:
    """What a recorded step of some rows reads: tokens, positions and contexts, and the blocks of every row.

    `rotary` are the positions for rotary embeddings, where a model may have other ones; the axes of a row are alike.

    Args:
        rows: [3 or 4, num_rows] int32.
        tables: [num_rows, width] int32.
    """

    def __init__(self, rows: torch.Tensor, tables: torch.Tensor) -> None:
        self._rows = rows
        self.tokens, self.positions, self.contexts, *rotary = rows
        self.rotary: torch.Tensor | None = rotary[0] if rotary else None
        self.tables = tables

    @classmethod
    def make(cls, num_rows: int, width: int, device: torch.device, *, has_axes: bool) -> "_Inputs":
        """Those of the largest step, of which others take the first rows."""
        aligned = -(-num_rows // _ALIGNMENT) * _ALIGNMENT
        rows = torch.zeros((4 if has_axes else 3, aligned), dtype=torch.int32, device=device)
        return cls(rows, torch.zeros((num_rows, width), dtype=torch.int32, device=device))

    def first(self, num_rows: int) -> "_Inputs":
        """The inputs of a step of fewer rows, in the same memory."""
        return _Inputs(self._rows[:, :num_rows], self.tables[:num_rows])

    def load(self, batch: ForwardBatch) -> None:
        """Take over the rows of a batch, in one upload; the others become padding.

        Of the blocks as many are told as the longest row has: what is left of a step before is beyond every context.
        """
        num_rows, num_lines = self.tables.shape[0], self._rows.shape[0]
        own = block_tables(batch.rows, batch.block_size)
        used = own.shape[1]
        staged = torch.zeros(num_rows * (num_lines + used), dtype=torch.int32, pin_memory=self.tables.is_cuda)
        numbers = staged.numpy()
        _, positions, contexts, *rotary = numbers[: num_lines * num_rows].reshape(num_lines, num_rows)
        numbers[num_lines * num_rows :].reshape(num_rows, used)[: len(own)] = own
        contexts[:] = 1
        for i, row in enumerate(batch.rows):
            positions[i], contexts[i] = row.start, row.end
        for line in rotary:
            line[: len(own)] = positions[: len(own)] if batch.rotary is None else batch.rotary
        there = staged.to(self.tables.device, non_blocking=True)
        self._rows.copy_(there[: num_lines * num_rows].view(num_lines, num_rows))
        self.tokens[: len(own)].copy_(batch.input_ids)  # which the step before may just have chosen
        self.tables[:, :used].copy_(there[num_lines * num_rows :].view(num_rows, used))


@dataclass(frozen=True)
class _FixedBatch(ForwardBatch):
    """A batch with tensors made from a step's inputs on the device, so that a replay makes them again."""

    inputs: _Inputs

    @classmethod
    def of(cls, inputs: _Inputs, block_size: int) -> "_FixedBatch":
        """The batch of whatever `inputs` hold."""
        num_rows = inputs.tokens.shape[0]
        every = torch.arange(num_rows, device=inputs.tokens.device)
        return cls((), num_rows, block_size, inputs.tokens.long(), every, inputs)

    @cached_property
    def positions(self) -> torch.Tensor:
        """See ForwardBatch."""
        positions: torch.Tensor = self.inputs.positions.long()
        return positions

    @cached_property
    def rotary_positions(self) -> torch.Tensor:
        """See ForwardBatch."""
        rotary = self.inputs.rotary
        return self.positions if rotary is None else rotary.long()

    @cached_property
    def slots(self) -> Slots:
        """See ForwardBatch."""
        index = self.positions // self.block_size
        return self.inputs.tables.gather(1, index[:, None])[:, 0].long(), self.positions % self.block_size


class GraphedDecoder:
    """`Forward` of a decoder: by replay where every row decodes and a bucket holds them, else as it is.

    Args:
        decoder: computes; its attention runs on tensors alone.
        attention: the decoder's.
        buckets: rows of the steps to record.
        context: longest of a row, in tokens.
        record: makes a replay of some work.
    """

    def __init__(
        self, decoder: Decoder, attention: RecordableAttention, buckets: Sequence[int], context: int, record: Record
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._buckets = sorted(buckets)
        self._width = -(-context // attention.block_size)
        self._record = record
        self._has_axes = any(rotary.spec.sections for rotary in decoder.token_embedding.rotaries)
        self._steps: dict[int, tuple[_Inputs, Body] | None] = {}  # None: there was no memory to record it
        self._cache: KVCache | None = None
        self._inputs: _Inputs | None = None
        self._logits: torch.Tensor | None = None

    @property
    def num_recordings(self) -> int:
        """See RecordingForward."""
        return len(self._buckets)

    def record_largest(self, cache: KVCache) -> None:
        """See RecordingForward."""
        rows = [RowSpan([0], 0, np.zeros(1, np.int32))] * self._buckets[-1]
        with torch.inference_mode():
            self(ForwardBatch.build(rows, self._attention.block_size, self._attention.device), cache)

    def forget_recordings(self) -> None:
        """See RecordingForward."""
        self._steps, self._cache, self._inputs, self._logits = {}, None, None, None

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """See Forward."""
        bucket = self._bucket_of(batch)
        if bucket is None:
            return self._decoder(batch, cache)
        if cache is not self._cache:  # recorded steps write to the pool they were recorded with
            self.forget_recordings()
            self._cache = cache
        if bucket not in self._steps:
            self._steps[bucket] = self._step(bucket, batch, cache)
        step = self._steps[bucket]
        if step is None:
            return self._decoder(batch, cache)
        inputs, replay = step
        inputs.load(batch)
        logits = replay()
        return None if logits is None else logits[batch.logit_indices]

    def _bucket_of(self, batch: ForwardBatch) -> int | None:
        num_rows = len(batch.rows)
        if batch.num_decode < num_rows or batch.logit_indices.shape[0] == 0 or batch.adapters:
            return None
        if batch.media is not None or (batch.rotary is not None and (batch.rotary.ndim > 1 or not self._has_axes)):
            return None
        return next((bucket for bucket in self._buckets if bucket >= num_rows), None)

    def _step(self, bucket: int, batch: ForwardBatch, cache: KVCache) -> tuple[_Inputs, Body] | None:
        if self._inputs is None:
            device, has_axes = batch.input_ids.device, self._has_axes
            self._inputs = _Inputs.make(self._buckets[-1], self._width, device, has_axes=has_axes)
        inputs = self._inputs.first(bucket)
        inputs.load(batch)

        def body() -> torch.Tensor | None:
            fixed = _FixedBatch.of(inputs, batch.block_size)
            plan = self._attention.plan_rows(inputs.contexts, inputs.tables)
            logits = self._decoder.run(fixed, cache, plan)
            return None if logits is None else self._kept(logits)

        try:
            return inputs, self._record(body)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("steps of %d rows are not recorded as CUDA graphs: there is no memory for it", bucket)
            return None

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in memory that all recorded steps share; it is made when the first is tried, before recording."""
        if self._logits is None:
            self._logits = logits.new_empty((self._buckets[-1], logits.shape[1]))
        kept = self._logits[: len(logits)]
        return kept.copy_(logits)


def recorded(decoder: Decoder, cuda_graphs: BatchSizes | None) -> Forward:
    """The decoder with its decoding steps recorded as CUDA graphs, where every operation of them can be.

    `cuda_graphs` are the rows of those steps; None: as many as are usual.
    """
    spec, attention = decoder.spec, decoder.attention
    if not isinstance(attention, RecordableAttention) or cuda_graphs == frozenset():
        return decoder
    if decoder.offload is not None:
        logger.info("decoding is not recorded as CUDA graphs: weights come from the host in every step")
        return decoder
    if decoder.boundary is not None:
        logger.info("decoding is not recorded as CUDA graphs: hidden states come from and go to other stages")
        return decoder
    if spec.state is not None:
        logger.info("decoding is not recorded as CUDA graphs: %s keeps states", spec.architecture)
        return decoder
    is_fixed = all(mixture.is_fixed for mixture in decoder.mixtures())  # else tokens are sorted by expert on the host
    if not is_fixed or any(rotary.needs_reaches for rotary in decoder.token_embedding.rotaries):
        logger.info("decoding is not recorded as CUDA graphs: what %s computes depends on tokens", spec.architecture)
        return decoder
    buckets = sorted(cuda_graphs or default_buckets())
    logger.info("decoding steps of up to %d rows are recorded as CUDA graphs, each when it first comes", buckets[-1])
    return GraphedDecoder(decoder, attention, buckets, spec.max_position_embeddings, CudaRecorder())
