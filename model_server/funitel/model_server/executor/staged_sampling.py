"""Sampling over pipeline stages: a stage computes the next step while those behind it compute the last.

The first rank of the last stage samples, as with `SyncSampling`, and tells all ranks. The others know of a step only
once they are told: what describes it waits for that, on another thread than the one that computes. A call that names a
batch waits for the steps of that batch that are on their way, so every rank makes it with the same knowledge; steps of
other batches stay on their way meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, RLock
from typing import TypeVar

import torch

from funitel.model_server.device.stages import StageLink
from funitel.model_server.executor.interface import ActiveRow, BegunStep, PendingStep
from funitel.model_server.executor.model_runner import ModelRunner
from funitel.model_server.executor.output import OutputProcessor
from funitel.model_server.executor.sync_sampling import Computed, SyncSampling
from funitel.model_server.sampling.logits_processors import LogitsProcessors
from funitel.model_server.sequence.table import CachedBatches
from funitel.model_server.speculation.speculator import Speculator
from funitel.proto.errors import ShardFailed
from funitel.proto.step import StepResult

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class StepOnItsWay:
    """A `PendingStep` that waits until this rank is told its tokens when it is described."""

    begun: BegunStep
    computed: Computed
    forward_ns: int  # without waiting for other stages
    settle: Callable[["StepOnItsWay"], PendingStep]
    failure: ShardFailed | None = field(default=None)

    def describe(self) -> StepResult:
        """See `PendingStep`."""
        result = self.settle(self).describe()
        spent = self.forward_ns + result.decode_ns
        return replace(result, forward_ns=self.forward_ns, total_ns=spent)


class StagedSampling(SyncSampling):
    """`StepSampling` of a rank of a pipeline. Calls come from one thread, steps are described on another."""

    describing_waits = True

    def __init__(
        self,
        runner: ModelRunner,
        batches: CachedBatches,
        output: OutputProcessor,
        speculator: Speculator | None = None,
        *,
        link: StageLink,
        num_stages: int,
        scores: LogitsProcessors | None = None,
    ) -> None:
        assert speculator is None, "drafts need the tokens of the step before on every rank"
        super().__init__(runner, batches, output, scores=scores)
        self._agreeing_on = torch.device("cpu")
        self._link = link
        self._changed = Condition(RLock())
        self.lock = self._changed
        self._on_their_way: deque[StepOnItsWay] = deque()
        self._began = 0  # when the forward that is computed did, less what was waited for before it
        batches.before_use = self._wait_for
        batches.num_ended_steps = 2 * num_stages

    def call(self, is_ahead: bool, call: Callable[[], T]) -> T:
        """See StepSampling."""
        with self._changed:
            return call()

    def filter(self, batch_id: int, is_ahead: bool, call: Callable[[], T]) -> Callable[[], T]:
        """See StepSampling."""
        with self._changed:
            kept = call()
        return lambda: kept

    def compute(self, active: Sequence[ActiveRow]) -> Computed:
        """See StepSampling; what follows is known to the rank that samples alone. Other steps are told of meanwhile."""
        self._began = time.perf_counter_ns() - self._link.waited_ns
        self._changed.release()  # what is told of other steps need not wait for this forward
        try:
            return super().compute(active)
        finally:
            self._changed.acquire()

    def agreed(self, computed: Computed) -> Computed:
        """See SyncSampling: on ranks that do not sample, what follows is told later."""
        return super().agreed(computed) if self._runner.parallel.is_root else computed

    def finish(self, step: BegunStep, computed: Computed) -> PendingStep:
        """See StepSampling; on ranks that do not sample the step is known once it is described."""
        forward_ns = time.perf_counter_ns() - self._link.waited_ns - self._began
        is_known = not computed.due or self._runner.parallel.is_root
        launched = StepOnItsWay(step, computed, forward_ns, self._told)
        if is_known:
            known = super().finish(step, computed)
            launched.settle = lambda _: known
        else:
            self._on_their_way.append(launched)
        return launched

    def _told(self, step: StepOnItsWay) -> PendingStep:
        """Wait to be told what follows in a step, and process it; steps come in their order."""
        try:
            computed = super().agreed(step.computed)
        except ShardFailed as error:
            with self._changed:
                step.failure = error
                self._changed.notify_all()
            raise
        with self._changed:
            self._on_their_way.remove(step)
            pending = super().finish(step.begun, computed)
            self._changed.notify_all()
        return pending

    def _wait_for(self, batch_id: int | None) -> None:
        """Wait for the steps of a batch, or of all, that are on their way. The lock is held, but not while waiting.

        Raises:
            ShardFailed: what they wait for will not come.
        """
        while True:
            steps = [step for step in self._on_their_way if batch_id is None or step.begun.batch_id == batch_id]
            if not steps:
                return
            failure = next((step.failure for step in self._on_their_way if step.failure is not None), None)
            if failure is not None:
                raise failure
            self._changed.wait()
