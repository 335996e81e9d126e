"""One rank's engine: cached batches in, one forward per step, sampled and settled results out.

Knows no sockets and no protobuf; `server` calls it on the one compute thread, strictly in order, so nothing here
locks. Every rank makes the same calls with the same arguments; all checks that can fail happen before the first
collective, so ranks fail together. Rank 0 samples; each rank describes the requests that are its own (id modulo ranks).
"""

import json
import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol

import numpy as np
import torch

from funitel.model_server.device.gpu import Gpu
from funitel.model_server.device.memory import give_back, is_out_of_memory
from funitel.model_server.device.pinned_memory import page_locked
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.executor import profile_run
from funitel.model_server.executor.gpu_pool_sizing import GpuPoolMemory
from funitel.model_server.executor.output import OutputProcessor, StepOutput
from funitel.model_server.executor.pool_sizing import HostPoolMemory, PoolMemory, num_pool_blocks
from funitel.model_server.executor.step_checks import StepBounds, check_addresses, check_step, check_supported
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.forward.interface import Forward, RecordingForward
from funitel.model_server.kv_cache.host_tier import HostBlocks
from funitel.model_server.kv_cache.pool import KVCache, Pools
from funitel.model_server.sampling.grammar import GrammarCompiler, GrammarState, TokenMasks
from funitel.model_server.sampling.logits_processors import ScoreMath, TorchScores
from funitel.model_server.sampling.sampler import SampledToken, SamplingState, sample, token_logprobs
from funitel.model_server.sampling.watermark import Watermark
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher, TextCodec
from funitel.model_server.sequence.table import SequenceState, SequenceTable
from funitel.model_server.spec.model_spec import ModelFacts
from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    NotEnoughMemory,
    ResourceExhausted,
    SettingsError,
    ShardUnsound,
    UnknownBatch,
)
from funitel.proto.process import logs
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    GrammarType,
    RowUpdate,
    SequenceStart,
    StepResult,
    WarmupLimits,
    WarmupResult,
)

logger = logging.getLogger(__name__)

# On a CPU memory is not sized by a measured peak, so warming up needs no full-size prefill: it would take seconds.
CPU_WARMUP_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What the executor is told at start. `dtype` is the precision of the KV pool."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    memory_fraction: float
    allow_prefill_logprobs: bool
    eos_token_ids: frozenset[int]
    watermark: Watermark = Watermark()
    host_bytes: int = 0  # of the host's memory for evicted blocks
    step_bytes: Callable[[int], int] | None = None  # memory of a step of so many tokens, where that is known before
    forces_spans: bool = True  # tokens that alone can follow in a grammar are taken without a forward each
    wipes_blocks: bool = True  # the last block of a row is read whole: what others left in it must not be catching


class PendingStep(Protocol):
    """A step after which the next may be computed."""

    def describe(self) -> StepResult:
        """The whole result. Once for each step, in their order; from any thread, also while the next is computed."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose result is still to be put into words."""

    settler: OutputProcessor
    settled: Sequence[StepOutput]
    result: StepResult  # without generations

    def describe(self) -> StepResult:
        """See `PendingStep`."""
        begin = time.perf_counter_ns()
        generations = tuple(map(self.settler.describe, self.settled))
        spent = time.perf_counter_ns() - begin
        result = self.result
        return replace(
            result, generations=generations, decode_ns=result.decode_ns + spent, total_ns=result.total_ns + spent
        )


class Executor:
    """Runs steps over a paged KV pool. Created loaded; `warmup` sizes the pool and must come first."""

    describing_waits = False  # whether `PendingStep.describe` may take as long as the step: not for an event loop

    def __init__(
        self,
        spec: ModelFacts,
        decoder: Forward,
        pools: Pools,
        codec: TextCodec,
        parallel: TensorParallel,
        options: ExecutorOptions,
        scores: ScoreMath | None = None,
    ) -> None:
        self.spec = spec
        self.decoder = decoder
        self.codec = codec
        self.parallel = parallel
        self.options = options
        self.scores = scores or TorchScores()
        self.pools = pools
        self.memory: PoolMemory = HostPoolMemory(options.memory_fraction, parallel)
        if options.device.type == "cuda":
            self.memory = GpuPoolMemory(Gpu(options.device), options.memory_fraction)
        self.max_prefill_tokens = spec.max_position_embeddings
        self.takes_first_token = False  # of a request; see `Capability.FIRST_TOKEN`
        self._cache: KVCache | None = None
        self._host: HostBlocks | None = None
        self._host_memory: torch.Tensor | None = None
        self._batches: dict[int, list[SequenceState]] = {}
        self._ended: dict[int, frozenset[int]] = {}  # batches that ended in the step before, with their requests
        self._table = SequenceTable(max_blocks=1)
        self._settler = OutputProcessor(codec, parallel, options.eos_token_ids)
        self._grammars = GrammarCompiler(codec.path, spec.vocab_size, options.eos_token_ids)

    # Steps ----------------------------------------------------------------------------------------------------------

    def prefill(
        self,
        batch_id: int,
        starts: Sequence[SequenceStart],
        cached: CachedBatch | None = None,
        updates: Sequence[RowUpdate] = (),
    ) -> StepResult:
        """`compute_prefill`, described at once: for a caller that plans no step before it has this one's result."""
        return self.compute_prefill(batch_id, starts, cached, updates).describe()

    def decode(self, cached: Sequence[CachedBatch], updates: Sequence[RowUpdate] = ()) -> StepResult:
        """`compute_decode`, described at once."""
        return self.compute_decode(cached, updates).describe()

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
        """Take new sequences in and run one step, together with `cached` in the same forward if given.

        `copies` between blocks and the host's memory come first. The resulting batch has the id of `cached`, else
        `batch_id`. `is_ahead`: the caller plans without having seen
        the step before, so a batch that ended in that step is an empty one, and a row of which `updates` say nothing
        computes one token, however many that step has brought.

        Raises:
            InvalidRequest: the call contradicts itself; nothing has changed.
            UnknownBatch: `cached` is not here; nothing has changed.
        """
        begin = time.perf_counter_ns()
        running = self._rows_of(cached.id, is_ahead) if cached is not None else []
        if not starts:
            raise InvalidRequest("a prefill needs at least one request")
        updates = self._of_rows_left(updates, is_ahead)
        new: list[SequenceState] = []
        try:
            for start in starts:
                new.append(self._admit(start))
            counts = self._counts(running, new, updates, is_ahead)
            check_step(running, new, counts, updates, self._bounds)
            self._check_copies(copies)
        except Exception:
            self._table.release(new)
            raise
        self._carry_out(copies)
        self._grant(running, updates)
        self._wipe(new, updates)
        if cached is None:
            self.clear(batch_id)  # a batch of the same id is replaced
        concat_ns = time.perf_counter_ns() - begin if cached is not None else None
        return self._step(batch_id if cached is None else cached.id, running + new, counts, begin, concat_ns)

    def compute_decode(
        self,
        cached: Sequence[CachedBatch],
        updates: Sequence[RowUpdate] = (),
        copies: Sequence[BlockCopy] = (),
        *,
        is_ahead: bool = False,
    ) -> PendingStep:
        """Run one step of one or more cached batches, concatenated under the id of the first.

        `copies`, `is_ahead` and what is raised: as for `compute_prefill`.
        """
        begin = time.perf_counter_ns()
        if not cached:
            raise InvalidRequest("a decode needs at least one cached batch")
        if len({batch.id for batch in cached}) < len(cached):
            raise InvalidRequest("a decode names the same batch twice")
        parts = [self._rows_of(batch.id, is_ahead) for batch in cached]
        rows = [row for part in parts for row in part]
        updates = self._of_rows_left(updates, is_ahead)
        counts = self._counts(rows, [], updates, is_ahead)
        check_step(rows, [], counts, updates, self._bounds)
        self._check_copies(copies)
        self._carry_out(copies)
        self._grant(rows, updates)
        self._wipe([], updates)
        for batch in cached[1:]:
            self._batches.pop(batch.id, None)
        concat_ns = time.perf_counter_ns() - begin if len(cached) > 1 else None
        return self._step(cached[0].id, rows, counts, begin, concat_ns)

    def _check_copies(self, copies: Sequence[BlockCopy]) -> None:
        if copies and self._host is None:
            raise InvalidRequest(f"{len(copies)} copies of blocks: this shard keeps none in the host's memory")
        if self._host is not None:
            self._host.check(copies)

    def _carry_out(self, copies: Sequence[BlockCopy]) -> None:
        if self._host is not None:
            self._host.carry_out(copies)

    def filter(self, batch_id: int, request_ids: Sequence[int], *, is_ahead: bool = False) -> CachedBatch:
        """Keep only `request_ids` of a cached batch; of one that ended in the step before, if `is_ahead`, nothing.

        Raises:
            UnknownBatch: unknown batch, nothing to keep, or a request that is not in it.
        """
        rows = self._rows_of(batch_id, is_ahead)
        if not rows:
            return CachedBatch(batch_id, ())
        keep = set(request_ids)
        if not keep:
            raise UnknownBatch(f"filtering batch {batch_id} must keep at least one request")
        unknown = keep - {row.request_id for row in rows}
        if unknown:
            raise UnknownBatch(f"batch {batch_id} holds no request {min(unknown)}")
        self._table.release(row for row in rows if row.request_id not in keep)
        self._batches[batch_id] = [row for row in rows if row.request_id in keep]
        return self._cached_batch(batch_id)

    def begin_filter(self, batch_id: int, request_ids: Sequence[int], *, is_ahead: bool) -> Callable[[], CachedBatch]:
        """`filter`; what is returned gives its result, once it may be waited for, as `PendingStep.describe` does."""
        kept = self.filter(batch_id, request_ids, is_ahead=is_ahead)
        return lambda: kept

    def clear(self, batch_id: int | None = None) -> None:
        """Drop one cached batch, or all; an unknown one is no error."""
        if batch_id is None:
            self._ended = {}
        dropped = list(self._batches) if batch_id is None else [batch_id]
        for known in dropped:
            self._table.release(self._batches.pop(known, []))

    def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar, so that a step that brings it need not. May be called from any thread.

        Raises:
            InvalidRequest: it is malformed, or cannot be kept over this model's tokens.
        """
        self._grammars.compile(kind, text)

    @property
    def num_sequences(self) -> int:
        """Rows held, finished ones included."""
        return len(self._table)

    def _rows_of(self, batch_id: int, is_ahead: bool) -> list[SequenceState]:
        if batch_id in self._batches:
            return self._batches[batch_id]
        if is_ahead and batch_id in self._ended:
            return []
        raise UnknownBatch(f"Batch ID {batch_id} not found in cache")

    def _of_rows_left(self, updates: Sequence[RowUpdate], is_ahead: bool) -> Sequence[RowUpdate]:
        """Row updates without those of rows that are gone because their batch ended in the step before."""
        if not is_ahead or not self._ended:
            return updates
        gone = frozenset().union(*self._ended.values())
        return [update for update in updates if update.request_id not in gone]

    def _cached_batch(self, batch_id: int) -> CachedBatch:
        rows = self._batches[batch_id]
        held = sum(row.num_blocks for row in rows) * self.options.block_size
        following = self._following([row.num_pending for row in rows])
        return CachedBatch(batch_id, tuple(row.request_id for row in rows), held, following)

    # Admission ------------------------------------------------------------------------------------------------------

    def _admit(self, start: SequenceStart) -> SequenceState:
        """Make the row of a new sequence."""
        check_supported(start, self.spec.vocab_size, takes_first_token=self.takes_first_token)
        prompt = list(start.input_ids) or self._encode(start)
        tokens = prompt + list(start.output_ids)
        if not prompt or max(tokens) >= self.spec.vocab_size:
            raise InvalidRequest(
                f"request {start.request_id} needs token ids within 0..{self.spec.vocab_size - 1}, "
                f"given {max(tokens) if prompt else 'none'}"
            )
        if start.cache_len >= len(tokens):
            raise InvalidRequest(f"cache_len {start.cache_len} must be < the {len(tokens)} tokens known")
        check_addresses(start, self._bounds)
        row = self._row(start, prompt, tokens)
        try:
            self._table.grant(row, start.blocks)
        except InvalidRequest:
            self._table.release([row])
            raise
        return row

    def _row(self, start: SequenceStart, prompt: list[int], tokens: list[int]) -> SequenceState:
        grammar = self._grammar(start)
        detokenizer = Detokenizer(self.codec, prompt)
        stops = StopMatcher(start.stopping.stop_sequences)
        for token_id in start.output_ids:
            detokenizer.push(token_id)
        stops.search(detokenizer.text)
        sampling = SamplingState.over(
            start.sampling, start.top_n_tokens, prompt, start.output_ids, self.options.watermark
        )
        return SequenceState(
            index=self._table.take(),  # last of all that can fail
            start=start,
            tokens=tokens,
            prompt_len=len(prompt),
            num_cached=start.cache_len,
            sampling=sampling,
            detokenizer=detokenizer,
            stops=stops,
            wants_prompt_logprobs=(
                start.prefill_logprobs and self.options.allow_prefill_logprobs and not start.output_ids
            ),
            grammar=grammar if self.parallel.rank == 0 else None,
        )

    def _grammar(self, start: SequenceStart) -> GrammarState | None:
        """The state of its grammar, if it has one; made on every rank, so that all refuse a bad one."""
        if not start.sampling.grammar:
            return None
        return self._grammars.start(start.sampling, start.output_ids, ignores_eos=start.stopping.ignore_eos)

    def _encode(self, start: SequenceStart) -> list[int]:
        ids = self.codec.encode(start.inputs, add_special_tokens=start.add_special_tokens)
        return ids[-start.truncate :] if start.truncate else ids

    def _grant(self, rows: Sequence[SequenceState], updates: Sequence[RowUpdate]) -> None:
        by_id = {row.request_id: row for row in rows}
        for update in updates:
            self._table.grant(by_id[update.request_id], update.blocks)

    def _wipe(self, new: Sequence[SequenceState], updates: Sequence[RowUpdate]) -> None:
        """Zero what rows are granted beyond what they find computed, where that is read before it is written."""
        if not self.options.wipes_blocks:
            return
        size = self.options.block_size
        granted = [block for row in new for block in row.start.blocks[-(-row.start.cache_len // size) :]]
        granted += [block for update in updates for block in update.blocks]
        if granted:
            self._pool.wipe(granted)

    def _counts(
        self,
        running: Sequence[SequenceState],
        new: Sequence[SequenceState],
        updates: Sequence[RowUpdate],
        is_ahead: bool,
    ) -> list[int]:
        """Tokens each row computes in this step.

        The router says so for new rows (`start.chunk_len`, else all) and in `updates`; what it leaves open shares
        the prefill budget, at least one token each. One that plans ahead means one token exactly.
        """
        asked = {update.request_id: update.chunk_len for update in updates}
        first = [_within(row.num_pending, row.start.chunk_len) for row in new]
        budget = self.max_prefill_tokens - sum(first) - len(running) + 1
        counts = []
        for row in running:
            count = asked.get(row.request_id)
            if is_ahead:
                count = 1 if count is None else count
            elif count is None and row.num_pending > 1:
                count = max(1, min(budget, row.num_pending))
                budget -= count - 1
            counts.append(_within(row.num_pending, count))
        return counts + first

    def _following(self, pending: Sequence[int]) -> int:
        """Tokens of a step of which nothing else is said, over rows that have so many to compute."""
        least = sum(count > 0 for count in pending)
        room = max(0, self.max_prefill_tokens - len(pending))  # beyond one token each
        return least + min(sum(pending) - least, room)

    @property
    def _bounds(self) -> StepBounds:
        context = self.spec.max_position_embeddings
        return StepBounds(self._pool.num_blocks, self._table.max_blocks, self.options.block_size, context)

    @property
    def _pool(self) -> KVCache:
        if self._cache is None:
            raise InvalidRequest("Warmup must come before the first step")
        return self._cache

    # One step -------------------------------------------------------------------------------------------------------

    def _step(
        self, batch_id: int, rows: list[SequenceState], counts: Sequence[int], begin: int, concat_ns: int | None
    ) -> PendingStep:
        """Forward, sample, settle; keep the batch unless every row has finished."""
        self._batches[batch_id] = rows
        self._ended = {}
        active = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        forward_begin = time.perf_counter_ns()
        try:
            due, spans = self._forward(active)
        except Exception as error:
            raise self._given_up(error, batch_id, active) from None
        settle_begin = time.perf_counter_ns()
        settled = [self._settler.settle(row, span) for row, span in zip(due, spans, strict=True)]
        for row in due:
            row.is_over = row.finish_reason is not None
        if all(row.is_over for row in rows):
            self._ended[batch_id] = frozenset(row.request_id for row in rows)
            self.clear(batch_id)
        end = time.perf_counter_ns()
        result = StepResult(
            generations=(),
            batch=self._cached_batch(batch_id) if batch_id in self._batches else None,
            forward_ns=settle_begin - forward_begin,
            decode_ns=end - settle_begin,
            total_ns=end - begin,
            concat_ns=concat_ns,
            num_forwards=1 if active else 0,
            num_forward_rows=len(active),
            num_forward_tokens=sum(count for _, count in active),
        )
        return ComputedStep(self._settler, [one for one in settled if one is not None], result)

    def _given_up(self, error: Exception, batch_id: int, active: Sequence[tuple[SequenceState, int]]) -> Exception:
        """Drop the batch of a step that failed; returns the error to raise."""
        self.clear(batch_id)
        return self._without_memory(error, active) if is_out_of_memory(error) else error

    def _without_memory(self, error: Exception, active: Sequence[tuple[SequenceState, int]]) -> FunitelError:
        """Give back what a step took that found no more memory; returns the error to raise."""
        traceback.clear_frames(error.__traceback__)  # they hold its tensors
        give_back(self.options.device)
        num_tokens = sum(count for _, count in active)
        said = f"there is no memory for a step of {num_tokens} tokens in {len(active)} sequences"
        if self.parallel.size > 1:  # the other ranks wait inside a collective, until this one ends
            return ShardUnsound(f"rank {self.parallel.rank}: {said}")
        return ResourceExhausted(said)

    @torch.inference_mode()
    def _forward(
        self, active: Sequence[tuple[SequenceState, int]]
    ) -> tuple[list[SequenceState], list[list[SampledToken]]]:
        """Compute the tokens of all active rows in one forward; sample for rows whose known tokens are done.

        Returns those rows, and what follows in each: the token sampled, and those its grammar forces after it.
        """
        if not active:
            return [], []
        spans = [self._span(row, count) for row, count in active]
        batch = ForwardBatch.build(spans, self.options.block_size, self.options.device)
        logits = self.decoder(batch, self._pool)
        due = [row for row, count in active if row.num_pending == count]
        following: list[list[SampledToken]] = []
        if logits is not None:
            logits = self._take_prompt_logprobs(active, spans, logits)
            if due:
                following = self._sample(due, logits)
        following = self._agree(due, following)
        for row, count in active:
            row.num_cached += count
        return due, following

    def _sample(self, due: Sequence[SequenceState], logits: torch.Tensor) -> list[list[SampledToken]]:
        masks = TokenMasks.of([row.grammar for row in due], logits.shape[1])
        sampled = sample(logits, [row.sampling for row in due], [len(row.tokens) for row in due], masks, self.scores)
        return [self._with_forced(row, token) for row, token in zip(due, sampled, strict=True)]

    def _with_forced(self, row: SequenceState, token: SampledToken) -> list[SampledToken]:
        """A token and those that alone can follow it, which need no forward to be chosen.

        Rows that want the model's own log-probabilities get none: those do need the forward.
        """
        grammar, params = row.grammar, row.start.sampling
        if grammar is None or math.isnan(token.logprob):  # a broken row gets no further
            return [token]
        if grammar.is_stuck:
            facts = {"request_id": row.start.name or str(row.request_id)}
            logs.log_fields(logger, "a request ends early: its grammar allows nothing more", logging.WARNING, **facts)
            return [replace(token, is_cut=True)]
        grammar.push(token.id)
        if not self.options.forces_spans or params.raw_logprobs or token.id in self.options.eos_token_ids:
            return [token]
        most = row.start.stopping.max_new_tokens - row.num_generated - 1
        with_top = row.sampling.top_n > 0
        return [token, *(SampledToken.forced(token_id, with_top=with_top) for token_id in grammar.forced(most))]

    def _span(self, row: SequenceState, count: int) -> RowSpan:
        end = row.num_cached + count
        wanted = "last" if count == row.num_pending else "none"
        if row.owes_prompt_logprobs:
            wanted = "all"
        tokens, table = self._tokens(row, end), self._table.block_table(row)
        return RowSpan(tokens, row.num_cached, table, wanted, row.prompt_len)

    def _tokens(self, row: SequenceState, end: int) -> list[int]:
        """The tokens of a row to be computed up to `end`."""
        return row.tokens[row.num_cached : end]

    def _agree(self, due: Sequence[SequenceState], following: list[list[SampledToken]]) -> list[list[SampledToken]]:
        """Give every rank what rank 0 chose, and the log-probabilities of prompts that are complete."""
        if self.parallel.size == 1 or not due:
            return following
        if wants_words(due):
            notes = [
                (list(map(astuple, tokens)), row.prompt_logprobs) for row, tokens in zip(due, following, strict=False)
            ]
            shared = json.loads(self.parallel.share(json.dumps(notes)))
            for row, (_, prompt_logprobs) in zip(due, shared, strict=True):
                row.prompt_logprobs = prompt_logprobs
            return [[SampledToken(*fields) for fields in tokens] for tokens, _ in shared]
        pairs = torch.zeros(len(due), 2, dtype=torch.float64)
        if following:
            pairs = torch.tensor([(token.id, token.logprob) for (token,) in following], dtype=torch.float64)
        pairs = self.parallel.broadcast(pairs.to(self.options.device))
        return [[SampledToken(int(token_id), logprob)] for token_id, logprob in pairs.tolist()]

    def _take_prompt_logprobs(
        self, active: Sequence[tuple[SequenceState, int]], spans: Sequence[RowSpan], logits: torch.Tensor
    ) -> torch.Tensor:
        """Note the log-probabilities of prompt tokens where asked for; return the logits of the rows due."""
        if not any(span.logits == "all" for span in spans):
            return logits
        kept, at = [], 0
        for (row, count), span in zip(active, spans, strict=True):
            size = {"none": 0, "last": 1, "all": count}[span.logits]
            part = logits[at : at + size]
            at += size
            if span.logits == "all":
                following = row.tokens[span.start + 1 : span.end + 1]  # the token after each computed one, if known
                ids = torch.tensor(following, dtype=torch.int64, device=part.device)
                row.prompt_logprobs += token_logprobs(part[: len(following)], ids).tolist()
            if row.num_pending == count:
                kept.append(part[-1:])
        return torch.cat(kept) if kept else logits[:0]

    # Warm-up --------------------------------------------------------------------------------------------------------

    def warmup(self, starts: Sequence[SequenceStart], limits: WarmupLimits) -> WarmupResult:
        """Run the largest step, size the pool by what memory is left beside it, and settle the limits in tokens.

        Raises:
            SettingsError: the limits asked for exceed the model's context.
            NotEnoughMemory: the pool cannot hold the longest request allowed.
        """
        context = self.spec.max_position_embeddings
        if limits.max_total_tokens is not None and limits.max_total_tokens > context:
            raise SettingsError(
                f"--max-total-tokens {limits.max_total_tokens} exceeds the model's context of {context}"
            )
        self.clear()
        self._cache = None
        self.max_prefill_tokens = limits.max_prefill_tokens
        self._rehearse(starts, profile_run.num_rows(limits.max_batch_size))
        pool_tokens = self._size_pool(limits)
        if isinstance(self.decoder, RecordingForward):
            self.decoder.record_largest(self._pool)
        max_total = limits.max_total_tokens or min(pool_tokens, context)
        max_input = limits.max_input_tokens or max_total - 1
        if max_total > pool_tokens:
            raise NotEnoughMemory(
                f"the KV pool holds {pool_tokens} tokens, fewer than --max-total-tokens {max_total}: "
                "lower it or give the pool more memory"
            )
        if max_input >= max_total:
            raise SettingsError(f"--max-input-tokens {max_input} must be < --max-total-tokens {max_total}")
        self._table = SequenceTable(max_blocks=-(-context // self.options.block_size) + 1)
        return WarmupResult(
            pool_tokens=pool_tokens,
            max_input_tokens=max_input,
            max_total_tokens=max_total,
            host_blocks=self._make_host_blocks(),
            kv_bytes=self._pool.num_bytes,
            total_kv_bytes=self._pool.num_blocks * self.pools.total_bytes_per_block,
        )

    def _make_host_blocks(self) -> int:
        """Have room for evicted blocks in the host's memory, as much on every rank; returns for how many."""
        most = self.parallel.smallest(self.options.host_bytes // self.pools.bytes_per_block)
        if not most:
            return 0
        if self._host_memory is None:
            self._host_memory = page_locked(self.options.host_bytes, self.options.device, "--kv-host-gb")
        self._host = HostBlocks(self._host_memory, most, self._pool)
        logger.info("KV host tier blocks=%d bytes=%d", most, most * self.pools.bytes_per_block)
        return most

    def _rehearse(self, starts: Sequence[SequenceStart], num_rows: int) -> None:
        """Compute the warm-up prompts once in a pool made for them; where memory is measured, with all that may join.

        That is `num_rows` sequences that decode and sample, and recorded steps.
        """
        is_measured, size = self.memory.is_measured, self.options.block_size
        budget = self.max_prefill_tokens if is_measured else CPU_WARMUP_TOKENS
        prompts = profile_run.within(map(self._warmup_tokens, starts), budget)
        if not prompts:
            raise InvalidRequest("Warmup needs at least one prompt token")
        tables = profile_run.tables([-(-len(prompt) // size) for prompt in prompts])
        spans = [self._rehearsal(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
        if is_measured:
            spans += [self._rehearsed_decode()] * num_rows
        self._cache = pool = self.pools.make(sum(map(len, tables)))
        what = f"lower --max-batch-prefill-tokens {self.max_prefill_tokens} or --max-batch-size"
        self.memory.rehearse(lambda: self._compute_rehearsal(spans, num_rows), what)
        if isinstance(self.decoder, RecordingForward):
            self.memory.rehearse_recording(self.decoder, pool)
        self._cache = None

    @torch.inference_mode()
    def _compute_rehearsal(self, spans: Sequence[RowSpan], num_rows: int) -> None:
        logits = self.decoder(ForwardBatch.build(spans, self.options.block_size, self.options.device), self._pool)
        if logits is not None and self.memory.is_measured:
            profile_run.describe_prompts(logits[: len(logits) - num_rows])
            self._rehearse_sampling(profile_run.rows_of(num_rows, self.codec), logits[len(logits) - num_rows :])

    def _rehearse_sampling(self, rows: Sequence[SequenceState], logits: torch.Tensor) -> None:
        self._sample(rows, logits)

    def _warmup_tokens(self, start: SequenceStart) -> list[int]:
        return (list(start.input_ids) or self._encode(start))[: self.spec.max_position_embeddings]

    def _rehearsal(self, tokens: Sequence[int], block_table: np.ndarray) -> RowSpan:
        """What a prompt of the warm-up computes."""
        is_described = self.memory.is_measured and self.options.allow_prefill_logprobs
        return RowSpan(tokens, 0, block_table, "all" if is_described else "last")

    def _rehearsed_decode(self) -> RowSpan:
        """What a sequence that decodes computes, in the block that is no sequence's."""
        return RowSpan([0], 0, np.zeros(1, np.int32))

    def _size_pool(self, limits: WarmupLimits) -> int:
        """Allocate the pool; every rank the same number of blocks. Returns its size in tokens."""
        options, size = self.options, self.options.block_size
        free = self.memory.pool_bytes()
        # Ranks hold different heads and read free memory at different moments: agree before anything may be refused.
        most = self.parallel.smallest(free // self.pools.bytes_per_block - 1)  # block 0 is never a sequence's
        num_blocks = num_pool_blocks(most, free, size, limits.max_batch_total_tokens)
        self._cache = self.pools.make(num_blocks + 1)
        logger.info("KV pool tokens=%d bytes=%d dtype=%s", num_blocks * size, self._pool.num_bytes, options.dtype)
        if options.step_bytes is not None:
            most = self.max_prefill_tokens
            logger.info("memory predicted_step_bytes=%d most_tokens=%d", options.step_bytes(most), most)
        return num_blocks * size


def wants_words(due: Sequence[SequenceState]) -> bool:
    """Whether a step says more of some row due than one token and its log-probability."""
    return any(row.sampling.top_n or row.owes_prompt_logprobs or row.start.sampling.grammar for row in due)


def _within(pending: int, asked: int | None) -> int:
    return pending if asked is None else min(asked, pending)
