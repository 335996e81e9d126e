"""A step that was launched on a device: what it computes for whom, and its result once the device is done."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from funitel.model_server.gpu_sampling.result_copy import Copy, SampledBatch, read_plain
from funitel.model_server.sampling.sampler import SampledToken
from funitel.model_server.sequence.table import SequenceState
from funitel.proto.step import StepResult


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of one step under way: who is due a token, and the one copy that brings what was chosen.

    `choice` is None on ranks that do not sample; `prompts` are rows with the number of log-probabilities of their
    prompts that come behind it.
    """

    due: list[SequenceState]
    copy: Copy
    choice: SampledBatch | None
    prompts: list[tuple[SequenceState, int]]
    is_shared_in_words: bool  # by the rank that sampled, once it has read

    def read(self) -> list[SampledToken]:
        """The tokens of the rows due, once they are there; of prompts, rows get the log-probabilities. Once only."""
        numbers = self.copy.wait()
        at = len(numbers) - sum(count for _, count in self.prompts)
        tokens = read_plain(numbers[:at]) if self.choice is None else self.choice.read(numbers[:at])
        for row, count in self.prompts:
            row.prompt_logprobs += numbers[at : at + count].tolist()
            at += count
        return tokens


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A `Step` whose result is waited for when it is described; `settle` then makes it `described`.

    Instants are of the performance counter, in nanoseconds.
    """

    batch_id: int
    rows: list[SequenceState]  # of its batch
    active: list[tuple[SequenceState, int]]  # with the tokens they compute
    num_cached: list[int]  # of each row of the batch, this step included
    num_blocks: list[int]
    begin: int
    concat_ns: int | None
    launch: Launch | None  # until the step is settled
    settle: Callable[["LaunchedStep"], None]
    ready: int = 0  # 0: nobody has waited for it
    described: Callable[[], StepResult] | None = None
    finished: list[SequenceState] = field(default_factory=list)  # with this step
    has_ended: bool = False  # the batch did, with this step
    then: list[Callable[[], None]] = field(default_factory=list)  # to be done once it is settled

    def wait(self) -> None:
        """Wait for the device; on any thread, without holding up another."""
        if (launch := self.launch) is not None:
            launch.copy.wait()
            self.ready = self.ready or time.perf_counter_ns()

    def describe(self) -> StepResult:
        """See `Step`."""
        self.wait()
        self.settle(self)
        assert self.described is not None
        return self.described()
