"""Asynchronous sampling: steps are launched while those before them are still computed, and none waits for the host.

The tokens that a step samples stay on the device, and the next step reads them there. What was sampled is copied to
the host once a step, and what describes the step waits for that. So a step is launched over *placeholder tokens*: a
row that is due has one more token, whatever it is, and ends only where its length says so. One that ends by what the
token is computes one token more, which is not told of; its blocks are still its own, as the router has not heard of
its end either when it plans that step.

Launching may depend on nothing but the calls made so far, or ranks would launch different steps: the end of a row
counts from the second step after it on, whenever the host came to know of it. A call that cannot be carried out so, or
that was planned with knowledge of all steps before it, waits for them, and then all is as with `SyncSampling`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import RLock
from typing import TypeVar

import torch

from funitel.model_server.executor.interface import ActiveRow, BegunStep, ComputedStep, PendingStep
from funitel.model_server.executor.model_runner import ModelRunner
from funitel.model_server.executor.output import OutputProcessor
from funitel.model_server.executor.prompt_scores import PromptScores, Scored, forward_scored
from funitel.model_server.executor.sync_sampling import agree_in_words, wants_words
from funitel.model_server.gpu_sampling.ops import ScoreMaths
from funitel.model_server.gpu_sampling.plan import RowStates
from funitel.model_server.gpu_sampling.result_copy import Copy, HostCopy, SampledBatch, read_plain
from funitel.model_server.gpu_sampling.sampler import Due, DueRow, StepSampler, due_of
from funitel.model_server.sampling.sampler import SampledToken
from funitel.model_server.sequence.table import CachedBatches, SequenceState
from funitel.model_server.speculation.speculator import Speculator
from funitel.proto.errors import InvalidRequest, UnknownBatch
from funitel.proto.step import CachedBatch, StepResult


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of one step in flight: the rows due a token, and the one copy that brings those that are sampled.

    `sampled` is None on ranks that do not sample; `prompts` are scores of which the numbers come behind it.
    """

    due: list[DueRow]
    copy: Copy
    sampled: SampledBatch | None
    prompts: list[PromptScores]
    is_shared_in_words: bool  # by the rank that sampled, once it has read
    num_forwards: int

    def read(self) -> list[SampledToken]:
        """The tokens sampled, once they are there; rows get the scores of their prompts. Once only."""
        numbers = self.copy.wait()
        at = len(numbers) - sum(prompt.numbers.numel() for prompt in self.prompts)
        tokens = read_plain(numbers[:at]) if self.sampled is None else self.sampled.read(numbers[:at])
        for row, scores in self.prompts:
            row.prompt_scores.append(numbers[at : at + scores.numel()].reshape(scores.shape))
            at += scores.numel()
        return tokens


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A `PendingStep` that waits for its result when it is described; `finish` then makes it `described`.

    Instants are of the performance counter, in nanoseconds.
    """

    begun: BegunStep
    num_cached: list[int]  # of each row of the batch, this step included
    num_blocks: list[int]
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


T = TypeVar("T")


class AsyncSampling:
    """`StepSampling` that gives the same answers. Calls come from one thread, steps are described on another."""

    describing_waits = True

    def __init__(
        self,
        runner: ModelRunner,
        batches: CachedBatches,
        output: OutputProcessor,
        speculator: Speculator | None = None,
        *,
        maths: ScoreMaths,
        copy: Callable[[torch.Tensor], Copy] = HostCopy,
    ) -> None:
        assert speculator is None, "tokens that only the device knows cannot be compared with drafts"
        self.lock: AbstractContextManager[object] = RLock()
        self.states = RowStates(runner.spec.vocab_size, runner.options.device)
        self._runner = runner
        self._batches = batches
        self._output = output
        self._sampler = StepSampler(self.states, maths, runner.parallel, runner.options.watermark)
        self._copy = copy
        self._in_flight: deque[LaunchedStep] = deque()  # oldest first: steps with ends that do not count yet
        self._last_ready = 0

    # Calls ----------------------------------------------------------------------------------------------------------

    def call(self, is_ahead: bool, call: Callable[[], T]) -> T:
        """See StepSampling."""
        with self.lock:
            self._let_end(1 if is_ahead else 0)
            return self._retried(call)

    def filter(self, batch_id: int, is_ahead: bool, call: Callable[[], CachedBatch]) -> Callable[[], CachedBatch]:
        """See StepSampling."""
        with self.lock:
            if not is_ahead:
                self._let_end(0)
            kept = self._retried(call)
            rows = list(self._batches.get(batch_id))
            cached, blocks = [row.num_cached for row in rows], [row.num_blocks for row in rows]
            if not self._in_flight:
                return lambda: kept
            last, found = self._in_flight[-1], list[CachedBatch]()

            def find() -> None:
                found.append(self._known_batch(batch_id, rows, cached, blocks))

            if last.launch is None:
                find()
            else:
                last.then.append(find)

        def answer() -> CachedBatch:
            last.wait()
            self._finish(last)
            return found[0]

        return answer

    def _retried(self, call: Callable[[], T]) -> T:
        """Make a call; if it cannot be carried out before the steps in flight are known, again when they are."""
        try:
            return call()
        except (InvalidRequest, UnknownBatch):
            if not self._in_flight:
                raise
            self._let_end(0)
            return call()

    # Launching ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def compute(self, active: Sequence[ActiveRow]) -> Launch:
        """Launch the forward of all active rows, sample for those with no known token left, begin to copy that."""
        due, scored = Due(), Scored(None, [], [], 0)
        if active:
            self.states.reserve(1 + max(row.index for row, _ in active))
            scored = forward_scored(self._runner, active, self.states.tokens)
            if any(row.num_placeholders and row.sampling.follows_tokens for row, _ in active):
                self._finish(self._in_flight[-1])
            due = due_of(active, scored.has_logits, self._runner.rules.forced)
        rows, sampled = due.sampled, None
        if rows and scored.logits is not None:
            sampled = self._sampler.sample(rows, due.places, scored.logits)
        self._sampler.force(due.forced)
        in_words = self._runner.parallel.size > 1 and wants_words(rows)
        numbers = self._sampler.shared(rows, sampled, in_words=in_words)
        if scored.prompts:
            numbers = torch.cat([numbers, *(prompt.numbers.flatten() for prompt in scored.prompts)])
        for row, count in active:
            row.num_cached += count
        for row, _ in due.rows:
            row.num_placeholders += 1
            row.is_over = row.num_generated + row.num_placeholders >= row.start.stopping.max_new_tokens
        return Launch(due.rows, self._copy(numbers), sampled, scored.prompts, in_words, scored.num_forwards)

    def finish(self, step: BegunStep, computed: Launch) -> PendingStep:
        """See StepSampling; the step's result is described later."""
        cached, blocks = [row.num_cached for row in step.rows], [row.num_blocks for row in step.rows]
        launched = LaunchedStep(step, cached, blocks, computed, self._finish)
        self._in_flight.append(launched)
        if computed.is_shared_in_words:
            self._finish(launched)  # with collectives, which must come in the same order on all ranks
        return launched

    def profile(self, rows: Sequence[SequenceState], logits: torch.Tensor) -> None:
        """See StepSampling; the counts that penalties need stay where they are, and need not grow later."""
        self.states.reserve(len(rows))
        self._sampler.sample(rows, list(range(len(rows))), logits)

    # Finishing ------------------------------------------------------------------------------------------------------

    def _finish(self, step: LaunchedStep) -> None:
        """Process the output of a step, after all before it."""
        with self.lock:
            for earlier in self._in_flight:
                if step.described is not None:
                    return
                self._finish_one(earlier)

    def _finish_one(self, step: LaunchedStep) -> None:
        launch = step.launch
        if launch is None:
            return
        step.wait()
        begin = time.perf_counter_ns()
        begun = step.begun
        active = [(row, count) for row, count in begun.active if row.finish_reason is None]
        processed = []
        for row, tokens in self._tokens_of(launch):
            row.num_placeholders -= 1
            if row.finish_reason is None:
                processed.append(self._output.process(row, tokens))
                if row.finish_reason is not None:
                    step.finished.append(row)
        step.launch = None
        batch: CachedBatch | None = self._known_batch(begun.batch_id, begun.rows, step.num_cached, step.num_blocks)
        if all(row.has_left or row.finish_reason is not None for row in begun.rows):
            step.has_ended, batch = True, None
            for row in begun.rows:
                row.has_left = True
        forward_ns = step.ready - max(begun.begin, self._last_ready)
        self._last_ready = step.ready
        decode_ns = time.perf_counter_ns() - begin
        total_ns = forward_ns + decode_ns
        result = begun.result(
            batch, active, launch.num_forwards, forward_ns=forward_ns, decode_ns=decode_ns, total_ns=total_ns
        )
        outputs = [one for one in processed if one is not None]
        step.described = ComputedStep(self._output, outputs, result, begun.number).describe
        for find in step.then:
            find()

    def _tokens_of(self, launch: Launch) -> list[tuple[SequenceState, list[SampledToken]]]:
        """The rows due, each with what follows in it: the token sampled and those its grammar forces, or one forced."""
        rows = [row for row, token_id in launch.due if token_id is None]
        following = [
            [token] if row.finish_reason is not None else self._output.with_forced(row, token)
            for row, token in zip(rows, launch.read(), strict=False)
        ]
        if launch.is_shared_in_words:
            following = agree_in_words(self._runner.parallel, rows, following)
        sampled = iter(following)
        return [
            (
                row,
                next(sampled) if token_id is None else [SampledToken.forced(token_id, with_top=row.sampling.top_n > 0)],
            )
            for row, token_id in launch.due
        ]

    def _known_batch(
        self, batch_id: int, rows: Sequence[SequenceState], num_cached: Sequence[int], num_blocks: Sequence[int]
    ) -> CachedBatch:
        """A batch by what is known of its rows, of which so much was computed; without those of a batch that ended."""
        held = [i for i, row in enumerate(rows) if not row.has_left]
        pending = [0 if rows[i].finish_reason is not None else len(rows[i].tokens) - num_cached[i] for i in held]
        return CachedBatch(
            batch_id,
            tuple(rows[i].request_id for i in held),
            sum(num_blocks[i] for i in held) * self._batches.block_size,
            self._batches.following(pending),
        )

    def _let_end(self, max_in_flight: int) -> None:
        """Let the ends of rows count for what is launched next, except those of the latest `max_in_flight` steps."""
        while len(self._in_flight) > max_in_flight:
            step = self._in_flight[0]
            self._finish(step)
            self._in_flight.popleft()
            for row in step.finished:
                row.is_over = True
            if step.has_ended:  # other rows may have joined its batch since
                self._batches.drop(step.begun.rows)
                self._batches.mark_ended(step.begun.batch_id, step.begun.rows, step.begun.number)
