"""One rank's engine: cached batches in, one forward per step, sampled and processed results out.

Knows no sockets and no protobuf; `rpc` calls it on the one compute thread, strictly in order, so nothing here
locks. Every rank makes the same calls with the same arguments; all checks that can fail happen before the first
collective, so ranks fail together. Rank 0 samples; each rank describes the requests that are its own (id modulo ranks).
"""

import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from funitel.model_server.adapters.registry import LoadedAdapters, PlacedAdapter
from funitel.model_server.device.memory import is_out_of_memory, release_memory
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.executor.admit import RowAdmission, check_step
from funitel.model_server.executor.interface import (
    ActiveRow,
    BegunStep,
    ExecutorOptions,
    PendingStep,
    RefusedStep,
    StepSampling,
)
from funitel.model_server.executor.model_runner import ModelRunner
from funitel.model_server.executor.output import OutputProcessor
from funitel.model_server.executor.row_rules import RowRules
from funitel.model_server.executor.sync_sampling import SyncSampling
from funitel.model_server.executor.warmup import Warmup
from funitel.model_server.forward.batch import Forward
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.sequence.table import CachedBatches, HeldBatches, SequenceState
from funitel.model_server.spec.model_spec import ModelFacts
from funitel.model_server.speculation.speculator import Speculator
from funitel.proto.errors import FunitelError, InvalidRequest, ResourceExhausted, ShardUnsound, WrongState
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    GrammarType,
    MediaInput,
    RowUpdate,
    SequenceStart,
    WarmupLimits,
    WarmupResult,
)

MakeSampling = Callable[[ModelRunner, CachedBatches, OutputProcessor, Speculator | None], StepSampling[Any]]


class Executor:
    """Runs steps over a pool of KV blocks. Created loaded; `warmup` sizes the pool and must come first.

    Args:
        rules: what the model does with a sequence: a decoder's, or an encoder-decoder's.
        adapters: of this model; None: it takes none.
        speculator: chooses drafts, where sequences may speculate.
        sampling: makes what samples: on the host before the next step, or on the device while that is launched.
    """

    def __init__(
        self,
        spec: ModelFacts,
        decoder: Forward,
        pools: Pools,
        codec: TextCodec,
        parallel: TensorParallel,
        options: ExecutorOptions,
        sampling: MakeSampling = SyncSampling,
        rules: RowRules | None = None,
        adapters: LoadedAdapters | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.spec = spec
        self.codec = codec
        self.parallel = parallel
        self.options = options
        self.batches = CachedBatches(options.block_size, spec.max_position_embeddings)
        self.media = options.media
        table = self.batches.table
        self.runner = ModelRunner(spec, decoder, pools, parallel, options, rules, table)
        rules = self.runner.rules
        self.adapters = adapters or LoadedAdapters(None, 0, "this model takes none")
        samples = parallel.is_root
        self.admission = RowAdmission(spec.vocab_size, codec, options, rules, table, self.adapters, samples=samples)
        self.output = OutputProcessor(codec, parallel, options.eos_token_ids, forces_spans=options.forces_spans)
        self.speculator = speculator
        self.runner.keeps_forwarded = speculator is not None and speculator.observes
        self.sampling = sampling(self.runner, self.batches, self.output, speculator)
        self.profiler = Warmup(self.runner, self.admission, self.sampling, codec, speculator)

    def warmup(self, starts: Sequence[SequenceStart], limits: WarmupLimits) -> WarmupResult:
        """Run the largest step, size the pool by what memory is left beside it, and settle the limits in tokens.

        Raises: see `Warmup.run`.
        """
        self.runner.sleep_state.check_awake()
        self.clear()
        self._clear_aside()  # a router that begins anew knows of none
        self.batches.max_prefill_tokens = limits.max_prefill_tokens
        return self.profiler.run(starts, limits)

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

        `copies` between blocks and their slots come first; where a slot is lost nothing else is done, and the result
        names it. The resulting batch has the id of `cached`, else
        `batch_id`. `is_ahead`: the caller plans without having seen the steps in flight, so a batch that ended in one
        of them is an empty one, and a row of which `updates` say nothing computes one token, however many they have
        brought.

        Raises:
            InvalidRequest: the call contradicts itself; nothing has changed.
            UnknownBatch: `cached` is not here; nothing has changed.
            WrongState: the shard sleeps.
        """
        self.runner.sleep_state.check_awake()
        call = partial(self._prefill, batch_id, starts, cached, updates, copies, is_ahead)
        with self._turn():
            return self.sampling.call(is_ahead, partial(self.runner.carrying, call) if copies else call)

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
        self.runner.sleep_state.check_awake()
        call = partial(self._decode, cached, updates, copies, is_ahead)
        with self._turn():
            return self.sampling.call(is_ahead, partial(self.runner.carrying, call) if copies else call)

    def _turn(self) -> AbstractContextManager[None]:
        """Hold back the encoding of media while a step is computed."""
        return nullcontext() if self.media is None else self.media.step()

    def begin_filter(self, batch_id: int, request_ids: Sequence[int], *, is_ahead: bool) -> Callable[[], CachedBatch]:
        """Keep only `request_ids` of a cached batch; if `is_ahead`, without those that ended with it in flight.

        What is returned gives the result, once it may be waited for, as `PendingStep.describe` does.

        Raises:
            UnknownBatch: unknown batch, nothing to keep, or a request that is not in it.
        """
        return self.sampling.filter(
            batch_id, is_ahead, partial(self.batches.keep, batch_id, request_ids, is_ahead=is_ahead)
        )

    def clear(self, batch_id: int | None = None) -> None:
        """Drop one cached batch, or all; an unknown one is no error."""
        with self.sampling.lock:
            self.batches.clear(batch_id)
            if batch_id is None:
                self.runner.trust()

    def sleep(self, level: int) -> int:
        """Give the pool back, with the prefixes in it, and what weights take on a GPU; returns the bytes that are free.

        Adapters are dropped, as the Warmup behind Wake would do, and features of media. A shard that
        sleeps frees nothing more.

        Raises:
            WrongState: a sequence is here; nothing has changed.
            InvalidRequest: there is no such level.
            ResourceExhausted: the host has no memory for the weights of a GPU; the shard is awake, without a pool.
        """
        self.runner.sleep_state.check_level(level)
        return self.sampling.call(False, partial(self.runner.sleep_state.sleep, self, self._let_go))

    def _let_go(self) -> None:
        if num_rows := len(self.batches.table):
            raise WrongState(f"the shard cannot sleep: {num_rows} sequences are here; finish them, or clear the cache")
        self.batches.clear()
        self._clear_aside()
        self.output.records.clear()
        self.profiler.free()

    def _clear_aside(self) -> None:
        """Drop what was loaded and encoded beside the steps: adapters, and features of media."""
        self.adapters.clear()
        if self.media is not None:
            self.media.clear()

    def hold(self) -> HeldBatches:
        """All rows, once the steps before are known as far as rows depend on them; another router goes on with them.

        Rows keep the adapters and the features of media that they use. Others are dropped, as that router does not know
        of them.

        Raises:
            InvalidRequest: the rows depend on a call with copies of blocks that has failed; nothing has changed.
        """
        return self.sampling.call(False, self._hold)

    def _hold(self) -> HeldBatches:
        if self.runner.is_in_doubt:
            raise InvalidRequest("a call with copies of blocks has failed: ClearCache comes next")
        held = self.batches.hold()
        self.adapters.leave()
        if self.media is not None:
            self.media.clear()
        return held

    def wake(self) -> None:
        """Put the weights back where they were; Warmup comes next. Raises ResourceExhausted: see `SleepState.wake`."""
        self.runner.sleep_state.wake()

    def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar, so that a step that brings it need not. May be called from any thread.

        Raises:
            InvalidRequest: it is malformed, or cannot be kept over this model's tokens.
        """
        self.admission.grammars.compile(kind, text)

    def load_adapter(self, adapter_id: str, path: str) -> PlacedAdapter:
        """Load an adapter, so that later steps may name it. May be called from any thread.

        Raises:
            InvalidRequest: it cannot be used; nothing has changed.
        """
        self.runner.sleep_state.check_awake()
        return self.adapters.load(adapter_id, path, self.batches.has_adapter)

    def unload_adapter(self, adapter_id: str) -> None:
        """Forget an adapter; its memory is free when no row has it. May be called from any thread.

        Raises:
            InvalidRequest: there is none of this id.
        """
        self.adapters.unload(adapter_id)

    def encode_media(self, media: MediaInput) -> Future[int]:
        """Encode an image or a sound, so that later steps may name it; see `FeatureService.encode`. From any thread.

        Raises:
            InvalidRequest: this model takes none.
            WrongState: the shard sleeps.
        """
        self.runner.sleep_state.check_awake()
        if self.media is None:
            raise InvalidRequest("media: this model takes text alone", "media")
        return self.media.encode(media)

    def drop_media(self, keys: Sequence[bytes]) -> None:
        """Drop features of media; an unknown key is no error. May be called from any thread."""
        if self.media is not None:
            self.media.drop(keys)

    def _prefill(
        self,
        batch_id: int,
        starts: Sequence[SequenceStart],
        cached: CachedBatch | None,
        updates: Sequence[RowUpdate],
        copies: Sequence[BlockCopy],
        is_ahead: bool,
    ) -> PendingStep:
        begin, batches = time.perf_counter_ns(), self.batches
        running = batches.rows_of(cached.id, is_ahead) if cached is not None else []
        if not starts:
            raise InvalidRequest("a prefill needs at least one request")
        if is_ahead:
            updates = batches.updates_of_rows_left(updates)
        new: list[SequenceState] = []
        with ExitStack() as undo:
            undo.callback(batches.table.release, new)
            for start in starts:
                new.append(self.admission.admit(start, self.runner.bounds))
            counts = batches.counts(running, new, updates, is_ahead)
            check_step(running, new, counts, updates, self.runner.bounds)
            self._check_chunks(running + new, counts)
            self.runner.check_copies(copies)
            if lost := self.runner.copy_blocks(copies):
                return RefusedStep(lost)
            undo.pop_all()
        self._change(running, new, updates)
        self.output.begin_records(new)
        if cached is None:
            batches.clear(batch_id)  # a batch of the same id is replaced
        concat_ns = time.perf_counter_ns() - begin if cached is not None else None
        return self._step(batch_id if cached is None else cached.id, running + new, counts, begin, concat_ns)

    def _decode(
        self, cached: Sequence[CachedBatch], updates: Sequence[RowUpdate], copies: Sequence[BlockCopy], is_ahead: bool
    ) -> PendingStep:
        begin, batches = time.perf_counter_ns(), self.batches
        if not cached:
            raise InvalidRequest("a decode needs at least one cached batch")
        if len({batch.id for batch in cached}) < len(cached):
            raise InvalidRequest("a decode names the same batch twice")
        rows = [row for batch in cached for row in batches.rows_of(batch.id, is_ahead)]
        if is_ahead:
            updates = batches.updates_of_rows_left(updates)
        counts = batches.counts(rows, [], updates, is_ahead)
        check_step(rows, [], counts, updates, self.runner.bounds)
        self._check_chunks(rows, counts)
        if copies or updates:
            self.runner.check_copies(copies)
            if lost := self.runner.copy_blocks(copies):
                return RefusedStep(lost)
            self._change(rows, [], updates)
        for batch in cached[1:]:
            batches.pop(batch.id)
        concat_ns = time.perf_counter_ns() - begin if len(cached) > 1 else None
        return self._step(cached[0].id, rows, counts, begin, concat_ns)

    def _check_chunks(self, rows: Sequence[SequenceState], counts: Sequence[int]) -> None:
        for row, count in zip(rows, counts, strict=True):
            self.runner.rules.check_chunk(row, count)

    def _change(
        self,
        running: Sequence[SequenceState],
        new: Sequence[SequenceState],
        updates: Sequence[RowUpdate],
    ) -> None:
        """Do what was checked behind copies of blocks: copy states, grant blocks and make them zeros."""
        self.runner.copy_states(new)
        self.batches.grant(running, updates)
        self.runner.wipe(new, updates)

    def _step(
        self, batch_id: int, rows: list[SequenceState], counts: Sequence[int], begin: int, concat_ns: int | None
    ) -> PendingStep:
        """Run one step; a batch is dropped where its forward fails."""
        self.batches.put(batch_id, rows)
        active = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        try:
            computed = self.sampling.compute(active)
        except Exception as error:
            self.batches.clear(batch_id)
            raise (self._without_memory(error, active) if is_out_of_memory(error) else error) from None
        return self.sampling.finish(
            BegunStep(batch_id, rows, active, begin, concat_ns, self.batches.num_steps), computed
        )

    def _without_memory(self, error: Exception, active: Sequence[ActiveRow]) -> FunitelError:
        """Give back what a step took that found no more memory; returns the error to raise."""
        traceback.clear_frames(error.__traceback__)  # they hold its tensors
        release_memory(self.options.memory_device)
        num_tokens = sum(count for _, count in active)
        said = f"there is no memory for a step of {num_tokens} tokens in {len(active)} sequences"
        if self.parallel.size > 1:  # the other ranks wait inside a collective, until this one ends
            return ShardUnsound(f"rank {self.parallel.rank}: {said}")
        return ResourceExhausted(said)
