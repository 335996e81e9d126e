"""Decoding as CUDA graphs: a step of rows with one token each is recorded once for a bucket of rows, and replayed.

A step with rows that have media is computed as it is, and so is one with adapters that kernels do not compute. Other
steps with adapters have recordings of their own, since those without launch no kernels of adapters.

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
from funitel.model_server.layers.low_rank.recorded import RecordedLowRank
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
        self._graphs: list[Callable[[], Any]] = []  # references to graphs that may be gone: memory of one is all's

    def __call__(self, body: Body) -> Body:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._WARM_UPS):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs = [each for each in self._graphs if each() is not None]
        graph, other = torch.cuda.CUDAGraph(), self._graphs[0]() if self._graphs else None
        pool = None if other is None else other.pool()
        # Other threads may call CUDA meanwhile: one waits for the copies of steps before, NCCL's for collectives.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = body()
        self._graphs.append(weakref.ref(graph))

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

    def load(self, batch: ForwardBatch, adapters: RecordedLowRank | None) -> None:
        """Take over the rows of a batch, in one upload; the others become padding. `adapters` takes over theirs.

        Of the blocks as many are told as the longest row has: what is left of a step before is beyond every context.
        """
        num_rows, num_lines = self.tables.shape[0], self._rows.shape[0]
        own = block_tables(batch.rows, batch.block_size)
        used = own.shape[1]
        end = num_rows * (num_lines + used)
        num_numbers = end + (0 if adapters is None else adapters.num_numbers(num_rows))
        staged = torch.zeros(num_numbers, dtype=torch.int32, pin_memory=self.tables.is_cuda)
        numbers = staged.numpy()
        _, positions, contexts, *rotary = numbers[: num_lines * num_rows].reshape(num_lines, num_rows)
        numbers[num_lines * num_rows : end].reshape(num_rows, used)[: len(own)] = own
        contexts[:] = 1
        for i, row in enumerate(batch.rows):
            positions[i], contexts[i] = row.start, row.end
        for line in rotary:
            line[: len(own)] = positions[: len(own)] if batch.rotary is None else batch.rotary
        if adapters is not None:
            adapters.fill(numbers[end:], batch.rows, num_rows)
        there = staged.to(self.tables.device, non_blocking=True)
        self._rows.copy_(there[: num_lines * num_rows].view(num_lines, num_rows))
        self.tokens[: len(own)].copy_(batch.input_ids)  # which the step before may just have chosen
        self.tables[:, :used].copy_(there[num_lines * num_rows : end].view(num_rows, used))
        if adapters is not None:
            adapters.take_over(there[end:])


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
        # By bucket, and by version of the launches of adapters in steps that have some; None: no memory to record it.
        self._steps: dict[tuple[int, int | None], tuple[_Inputs, Body] | None] = {}
        self._cache: KVCache | None = None
        self._inputs: _Inputs | None = None
        self._adapters: RecordedLowRank | None = None
        self._logits: torch.Tensor | None = None

    @property
    def num_recordings(self) -> int:
        """See RecordingForward."""
        low_rank = self._decoder.low_rank
        return len(self._buckets) * (2 if low_rank is not None and low_rank.ops.is_recordable else 1)

    def record_largest(self, cache: KVCache) -> None:
        """See RecordingForward."""
        rows = [RowSpan([0], 0, np.zeros(1, np.int32))] * self._buckets[-1]
        with torch.inference_mode():
            self(ForwardBatch.build(rows, self._attention.block_size, self._attention.device), cache)

    def forget_recordings(self) -> None:
        """See RecordingForward."""
        self._steps, self._cache, self._inputs, self._adapters, self._logits = {}, None, None, None, None

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """See Forward."""
        bucket = self._bucket_of(batch)
        if bucket is None:
            return self._decoder(batch, cache)
        if cache is not self._cache:  # recorded steps write to the pool they were recorded with
            self.forget_recordings()
            self._cache = cache
        self._prepare(batch.input_ids.device)
        adapters, version = None, None
        if batch.adapters:
            adapters = self._adapters
            if adapters is None or not adapters.admit(batch.rows):
                return self._decoder(batch, cache)
            version = adapters.version
            self._forget_versions_but(version)
        key = bucket, version
        if key not in self._steps:
            self._steps[key] = self._step(bucket, batch, cache, adapters)
        step = self._steps[key]
        if step is None:
            return self._decoder(batch, cache)
        inputs, replay = step
        inputs.load(batch, adapters)
        logits = replay()
        return None if logits is None else logits[batch.logit_indices]

    def _prepare(self, device: torch.device) -> None:
        """Make the memory that recorded steps read; that of adapters too, so that it is there when it is measured."""
        if self._inputs is not None:
            return
        num_rows, low_rank = self._buckets[-1], self._decoder.low_rank
        self._inputs = _Inputs.make(num_rows, self._width, device, has_axes=self._has_axes)
        if low_rank is not None:
            self._adapters = low_rank.ops.recorded(low_rank.sites, num_rows, device)

    def _forget_versions_but(self, version: int) -> None:
        """Drop recorded steps with adapters of other versions: their launches lack room for the newest adapters."""
        stale = [key for key in self._steps if key[1] not in (None, version)]
        for key in stale:
            del self._steps[key]

    def _bucket_of(self, batch: ForwardBatch) -> int | None:
        num_rows = len(batch.rows)
        if batch.num_decode < num_rows or batch.logit_indices.shape[0] == 0:
            return None
        if batch.media is not None or (batch.rotary is not None and (batch.rotary.ndim > 1 or not self._has_axes)):
            return None
        return next((bucket for bucket in self._buckets if bucket >= num_rows), None)

    def _step(
        self, bucket: int, batch: ForwardBatch, cache: KVCache, adapters: RecordedLowRank | None
    ) -> tuple[_Inputs, Body] | None:
        assert self._inputs is not None
        inputs = self._inputs.first(bucket)
        inputs.load(batch, adapters)
        block_size = batch.block_size

        def body() -> torch.Tensor | None:  # without `batch`, of which adapters may be unloaded
            fixed = _FixedBatch.of(inputs, block_size)
            plan = self._attention.plan_rows(inputs.contexts, inputs.tables)
            logits = self._decoder.run(fixed, cache, plan, adapters)
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
