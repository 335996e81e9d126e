"""A step that was launched on a device: the rows it computes, and its result once the device is done."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from funitel.model_server.gpu_sampling.result_copy import Copy, SampledBatch, read_plain
from funitel.model_server.gpu_sampling.step_sampler import DueRow
from funitel.model_server.sampling.sampler import SampledToken
from funitel.model_server.sequence.table import SequenceState
from funitel.proto.step import StepResult


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of one step in flight: the rows due a token, and the one copy that brings those that are sampled.

    `sampled` is None on ranks that do not sample; `prompts` are rows with the number of log-probabilities of their
    prompts that come behind it.
    """

    due: list[DueRow]
    copy: Copy
    sampled: SampledBatch | None
    prompts: list[tuple[SequenceState, int]]
    is_shared_in_words: bool  # by the rank that sampled, once it has read

    def read(self) -> list[SampledToken]:
        """The tokens sampled, once they are there; of prompts, rows get the log-probabilities. Once only."""
        numbers = self.copy.wait()
        at = len(numbers) - sum(count for _, count in self.prompts)
        tokens = read_plain(numbers[:at]) if self.sampled is None else self.sampled.read(numbers[:at])
        for row, count in self.prompts:
            row.prompt_logprobs += numbers[at : at + count].tolist()
            at += count
        return tokens


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A `PendingStep` that waits for its result when it is described; `finish` then makes it `described`.

    Instants are of the performance counter, in nanoseconds.
    """

    batch_id: int
    rows: list[SequenceState]  # of its batch
    active: Sequence[tuple[SequenceState, int]]  # with the tokens they compute
    num_cached: list[int]  # of each row of the batch, this step included
    num_blocks: list[int]
    begin: int
    concat_ns: int | None
    launch: Launch | None  # until the step is finished
    finish: Callable[["LaunchedStep"], None]
    ready: int = 0  # 0: nothing has waited for it
    described: Callable[[], StepResult] | None = None
    finished: list[SequenceState] = field(default_factory=list)  # with this step
    has_ended: bool = False  # the batch did, with this step
    then: list[Callable[[], None]] = field(default_factory=list)  # to be done once it is finished

    def wait(self) -> None:
        """Wait for the device; on any thread, without holding up another."""
        if (launch := self.launch) is not None:
            launch.copy.wait()
            self.ready = self.ready or time.perf_counter_ns()

    def describe(self) -> StepResult:
        """See `PendingStep`."""
        self.wait()
        self.finish(self)
        assert self.described is not None
        return self.described()
