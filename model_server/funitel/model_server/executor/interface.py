"""What an executor is made of: its options, the step it returns, and how the tokens of a step are sampled."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from funitel.model_server.executor.output import OutputProcessor, StepOutput
from funitel.model_server.kv_cache.disk_tier import DiskTier
from funitel.model_server.kv_cache.precision import KvDtype
from funitel.model_server.media.service import FeatureService
from funitel.model_server.sampling.sampler import Watermark
from funitel.model_server.sequence.table import SequenceState
from funitel.proto.step import CachedBatch, StepResult

T = TypeVar("T")
S = TypeVar("S")

ActiveRow = tuple[SequenceState, int]
"""A row that takes part in a step, and how many tokens it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What the executor is told at start. `dtype` is the precision of the pool."""

    device: torch.device
    dtype: KvDtype
    block_size: int
    memory_fraction: float | None
    allow_prefill_logprobs: bool
    eos_token_ids: frozenset[int]
    watermark: Watermark = Watermark()
    num_replicas: int = 1  # that share a host's memory
    reserved_bytes: int = 0  # that the pool leaves for adapters and for features of media
    host_bytes: int = 0  # of the host's memory for evicted blocks
    disk: DiskTier | None = None  # for evicted blocks, instead
    step_bytes: Callable[[int], int] | None = None  # memory of a step of so many tokens, where that is known before
    gpu_blocks: tuple[torch.device, int] | None = None  # beside the host's layers: a GPU, and bytes of a block on it
    forces_spans: bool = True  # tokens that alone can follow in a grammar are taken without a forward each
    has_prefix_cache: bool = True
    media: FeatureService | None = None  # encodes images and sounds of prompts; None: prompts are text
    wipes_blocks: bool = True  # the last block of a row is read whole: NaNs left in it by others would spread

    @property
    def memory_device(self) -> torch.device:
        """The device that memory is given back on: the GPU where some layers are on one."""
        return self.device if self.gpu_blocks is None else self.gpu_blocks[0]


class PendingStep(Protocol):
    """A step after which the next may be computed."""

    def describe(self) -> StepResult:
        """The whole result. Once for each step, in their order; from any thread, also while the next is computed."""


@dataclass(frozen=True, slots=True)
class RefusedStep:
    """A step that was not computed, for copies from or to `lost_slots` failed on some rank."""

    lost_slots: tuple[int, ...]

    def describe(self) -> StepResult:
        """See `PendingStep`."""
        return StepResult((), None, lost_slots=self.lost_slots)


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step with a result that is still to be described."""

    output: OutputProcessor
    processed: Sequence[StepOutput]
    result: StepResult  # without generations
    number: int  # of the step, see `BegunStep`

    def describe(self) -> StepResult:
        """See `PendingStep`."""
        begin = time.perf_counter_ns()
        generations = tuple(map(self.output.describe, self.processed))
        result = self.result
        if self.output.described:
            self.output.record(self.number, result.memories)
        spent = time.perf_counter_ns() - begin
        return replace(
            result, generations=generations, decode_ns=result.decode_ns + spent, total_ns=result.total_ns + spent
        )


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step of a batch of `rows`, of which `active` take part; its call came at `begin` (performance counter).

    `number` counts the steps of this process, alike on all ranks.
    """

    batch_id: int
    rows: list[SequenceState]
    active: Sequence[ActiveRow]
    begin: int
    concat_ns: int | None
    number: int

    def result(
        self,
        batch: CachedBatch | None,
        active: Sequence[ActiveRow],
        num_forwards: int,
        *,
        forward_ns: int,
        decode_ns: int,
        total_ns: int,
    ) -> StepResult:
        """Its result, without generations; `active` are the rows that count, with the tokens they got."""
        return StepResult(
            generations=(),
            batch=batch,
            forward_ns=forward_ns,
            decode_ns=decode_ns,
            total_ns=total_ns,
            concat_ns=self.concat_ns,
            num_forwards=num_forwards if active else 0,
            num_forward_rows=len(active),
            num_forward_tokens=sum(count for _, count in active),
            memories=tuple([(row.request_id, row.sampling.mu) for row, _ in active if row.sampling.has_mu]),
        )


class StepSampling(Protocol, Generic[S]):
    """When and where the tokens of a step are sampled: before the next step begins, or on the device while it runs."""

    describing_waits: bool
    """Whether `PendingStep.describe` may take as long as the step: not for an event loop."""
    lock: AbstractContextManager[object]
    """Held while batches change."""

    def call(self, is_ahead: bool, call: Callable[[], T]) -> T:
        """Make a call that runs a step, once the steps before it are known as far as it needs them."""

    def filter(self, batch_id: int, is_ahead: bool, call: Callable[[], CachedBatch]) -> Callable[[], CachedBatch]:
        """Make a call that filters a batch; what is returned gives its result, once that may be waited for."""

    def compute(self, active: Sequence[ActiveRow]) -> S:
        """Run the forward of a step, and sample for the rows with no known token left."""

    def finish(self, step: BegunStep, computed: S) -> PendingStep:
        """Make a pending step of what was computed."""

    def profile(self, rows: Sequence[SequenceState], logits: torch.Tensor) -> None:
        """Sample for the rows of the profile run, as steps do it."""
