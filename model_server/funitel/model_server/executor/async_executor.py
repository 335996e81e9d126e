"""An executor whose steps are launched while those before them are still computed: nothing waits for the host.

The tokens that a step chooses stay on the device, and the next step reads them there. What was chosen is copied to the
host once a step, and whoever describes the step waits for that. So a step is launched over what is *promised*: a row
that is due has one more token, whatever it is, and ends only where its length says so. One that ends by what the token
is computes one token more, which nobody is told of; its blocks are still its own, as the router has not heard of its
end either when it plans that step.

Launching may depend on nothing but the calls made so far, or ranks would launch different steps: the end of a row
counts from the second step after it on, whenever the host came to know of it. A call that cannot be carried out so, or
that was planned with knowledge of all steps before it, waits for them, and then all is as in the base class.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from typing import TypeVar

import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.executor.executor import ComputedStep, Executor, ExecutorOptions, PendingStep, wants_words
from funitel.model_server.executor.launched_step import Launch, LaunchedStep
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.forward.interface import Forward
from funitel.model_server.gpu_sampling.ops import ScoreMaths
from funitel.model_server.gpu_sampling.result_copy import Copy, HostCopy
from funitel.model_server.gpu_sampling.row_state import RowStates, device_token
from funitel.model_server.gpu_sampling.sampler import follows_tokens
from funitel.model_server.gpu_sampling.step_sampler import Due, StepSampler, due_of
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.sequence.table import SequenceState
from funitel.model_server.spec.model_spec import ModelFacts
from funitel.proto.errors import InvalidRequest, UnknownBatch
from funitel.proto.step import BlockCopy, CachedBatch, RowUpdate, SequenceStart, StepResult

T = TypeVar("T")


class AsyncExecutor(Executor):
    """Runs steps as its base does, and answers the same. Calls come from one thread, steps are described on another."""

    describing_waits = True

    def __init__(
        self,
        spec: ModelFacts,
        decoder: Forward,
        pools: Pools,
        codec: TextCodec,
        parallel: TensorParallel,
        options: ExecutorOptions,
        maths: ScoreMaths,
        copy: Callable[[torch.Tensor], Copy] = HostCopy,
    ) -> None:
        super().__init__(spec, decoder, pools, codec, parallel, options)
        self._copy = copy
        self._states = RowStates(spec.vocab_size, options.device)
        self._chooser = StepSampler(self._states, maths, parallel, options.watermark)
        self._lock = RLock()
        self._under_way: deque[LaunchedStep] = deque()  # oldest first: those whose ends do not count yet
        self._last_ready = 0

    # Calls ----------------------------------------------------------------------------------------------------------

    def compute_prefill(
        self,
        batch_id: int,
        starts: Sequence[SequenceStart],
        cached: CachedBatch | None = None,
        updates: Sequence[RowUpdate] = (),
        copies: Sequence[BlockCopy] = (),
        *,
        is_ahead: bool = False,
    ) -> PendingStep:
        """See the base."""
        step = super().compute_prefill
        return self._carried_out(is_ahead, lambda: step(batch_id, starts, cached, updates, copies, is_ahead=is_ahead))

    def compute_decode(
        self,
        cached: Sequence[CachedBatch],
        updates: Sequence[RowUpdate] = (),
        copies: Sequence[BlockCopy] = (),
        *,
        is_ahead: bool = False,
    ) -> PendingStep:
        """See the base."""
        step = super().compute_decode
        return self._carried_out(is_ahead, lambda: step(cached, updates, copies, is_ahead=is_ahead))

    def _carried_out(self, is_ahead: bool, call: Callable[[], T]) -> T:
        """What a call gives that launches a step."""
        with self._lock:
            self._let_end(1 if is_ahead else 0)
            return self._retried(call)

    def _retried(self, call: Callable[[], T]) -> T:
        """Make a call; if it cannot be carried out before the steps under way are known, again when they are."""
        try:
            return call()
        except (InvalidRequest, UnknownBatch):
            if not self._under_way:
                raise
            self._let_end(0)
            return call()

    def filter(self, batch_id: int, request_ids: Sequence[int], *, is_ahead: bool = False) -> CachedBatch:
        """See the base."""
        return self.begin_filter(batch_id, request_ids, is_ahead=is_ahead)()

    def begin_filter(self, batch_id: int, request_ids: Sequence[int], *, is_ahead: bool) -> Callable[[], CachedBatch]:
        """See the base."""
        call = super().filter
        with self._lock:
            if not is_ahead:
                self._let_end(0)
            kept = self._retried(lambda: call(batch_id, request_ids, is_ahead=is_ahead))
            rows = list(self._batches.get(batch_id, ()))
            cached, blocks = [row.num_cached for row in rows], [row.num_blocks for row in rows]
            if not self._under_way:
                return lambda: kept
            last, found = self._under_way[-1], list[CachedBatch]()

            def find() -> None:
                found.append(self._known_batch(batch_id, rows, cached, blocks))

            if last.launch is None:
                find()
            else:
                last.then.append(find)

        def answer() -> CachedBatch:
            last.wait()
            self._settle(last)
            return found[0]

        return answer

    def clear(self, batch_id: int | None = None) -> None:
        """See the base."""
        with self._lock:
            super().clear(batch_id)

    # Launching ------------------------------------------------------------------------------------------------------

    def _step(
        self, batch_id: int, rows: list[SequenceState], counts: Sequence[int], begin: int, concat_ns: int | None
    ) -> PendingStep:
        """Launch a step; its result is described later."""
        self._batches[batch_id] = rows
        self._ended = {}
        active = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        try:
            launch = self._launch(active)
        except Exception as error:
            raise self._given_up(error, batch_id, active) from None
        cached, blocks = [row.num_cached for row in rows], [row.num_blocks for row in rows]
        step = LaunchedStep(batch_id, rows, active, cached, blocks, begin, concat_ns, launch, self._settle)
        self._under_way.append(step)
        if launch.is_shared_in_words:
            self._settle(step)  # with collectives, which must come in the same order on all ranks
        return step

    @torch.inference_mode()
    def _launch(self, active: list[tuple[SequenceState, int]]) -> Launch:
        """Launch the forward of all active rows, sample for those whose known tokens are done, begin to copy that."""
        due, logits = Due(), None
        if active:
            self._states.reserve(1 + max(row.index for row, _ in active))
            spans = [self._span(row, count) for row, count in active]
            batch = ForwardBatch.build(spans, self.options.block_size, self.options.device, self._states.tokens)
            logits = self.decoder(batch, self._pool)
            if any(row.num_promised and follows_tokens(row.start.sampling) for row, _ in active):
                self._settle(self._under_way[-1])
            due = due_of(active, [span.logits for span in spans], logits)
        choice = None
        if due.rows and logits is not None:
            choice = self._chooser.choose(due.rows, due.places, logits)
        in_words = self.parallel.size > 1 and wants_words(due.rows)
        numbers = self._chooser.shared(due.rows, choice, in_words=in_words)
        if due.prompts:
            numbers = torch.cat([numbers, *(logprobs.double() for _, logprobs in due.prompts)])
        for row, count in active:
            row.num_cached += count
        for row in due.rows:
            row.num_promised += 1
            row.is_over = row.num_generated + row.num_promised >= row.start.stopping.max_new_tokens
        prompts = [(row, len(logprobs)) for row, logprobs in due.prompts]
        return Launch(due.rows, self._copy(numbers), choice, prompts, in_words)

    def _tokens(self, row: SequenceState, end: int) -> list[int]:
        tokens = super()._tokens(row, end)
        return tokens if row.num_cached + len(tokens) == end else [*tokens, device_token(row)]

    def _rehearse_sampling(self, rows: Sequence[SequenceState], logits: torch.Tensor) -> None:
        """As steps do it; the counts that penalties need stay where they are, and need not grow later."""
        self._states.reserve(len(rows))
        self._chooser.choose(rows, list(range(len(rows))), logits)

    # Settling -------------------------------------------------------------------------------------------------------

    def _settle(self, step: LaunchedStep) -> None:
        """Settle a step, after all before it."""
        with self._lock:
            for earlier in self._under_way:
                if step.described is not None:
                    return
                self._settle_one(earlier)

    def _settle_one(self, step: LaunchedStep) -> None:
        launch = step.launch
        if launch is None:
            return
        step.wait()
        begin = time.perf_counter_ns()
        active = [(row, count) for row, count in step.active if row.finish_reason is None]
        following = [
            [token] if row.finish_reason is not None else self._with_forced(row, token)
            for row, token in zip(launch.due, launch.read(), strict=False)
        ]
        if launch.is_shared_in_words:
            following = self._agree(launch.due, following)
        settled = []
        for row, tokens in zip(launch.due, following, strict=True):
            row.num_promised -= 1
            if row.finish_reason is None:
                settled.append(self._settler.settle(row, tokens))
                if row.finish_reason is not None:
                    step.finished.append(row)
        step.launch = None
        batch: CachedBatch | None = self._known_batch(step.batch_id, step.rows, step.num_cached, step.num_blocks)
        if all(row.has_left or row.finish_reason is not None for row in step.rows):
            step.has_ended, batch = True, None
            for row in step.rows:
                row.has_left = True
        forward_ns = step.ready - max(step.begin, self._last_ready)
        self._last_ready = step.ready
        decode_ns = time.perf_counter_ns() - begin
        result = StepResult(
            generations=(),
            batch=batch,
            forward_ns=forward_ns,
            decode_ns=decode_ns,
            total_ns=forward_ns + decode_ns,
            concat_ns=step.concat_ns,
            num_forwards=1 if active else 0,
            num_forward_rows=len(active),
            num_forward_tokens=sum(count for _, count in active),
        )
        computed = ComputedStep(self._settler, [one for one in settled if one is not None], result)
        step.described = computed.describe
        for find in step.then:
            find()

    def _known_batch(
        self, batch_id: int, rows: Sequence[SequenceState], num_cached: Sequence[int], num_blocks: Sequence[int]
    ) -> CachedBatch:
        """A batch by what is known of its rows, of which so much was computed; without those of a batch that ended."""
        held = [i for i, row in enumerate(rows) if not row.has_left]
        pending = [0 if rows[i].finish_reason is not None else len(rows[i].tokens) - num_cached[i] for i in held]
        return CachedBatch(
            batch_id,
            tuple(rows[i].request_id for i in held),
            sum(num_blocks[i] for i in held) * self.options.block_size,
            self._following(pending),
        )

    def _let_end(self, most: int) -> None:
        """Let the ends of rows count for what is launched next, except those of the latest `most` steps."""
        while len(self._under_way) > most:
            step = self._under_way[0]
            self._settle(step)
            self._under_way.popleft()
            self._ended = {}
            for row in step.finished:
                row.is_over = True
            if step.has_ended:
                self._drop(step)

    def _drop(self, step: LaunchedStep) -> None:
        """Drop the rows of a batch that has ended with a step; other rows may have joined them since."""
        gone = set(map(id, step.rows))
        for batch_id, rows in tuple(self._batches.items()):
            left = [row for row in rows if id(row) in gone]
            if left:
                self._table.release(left)
                self._batches[batch_id] = [row for row in rows if id(row) not in gone]
                if not self._batches[batch_id]:
                    del self._batches[batch_id]
        if not self._under_way:
            self._ended = {step.batch_id: frozenset(row.request_id for row in step.rows)}
