"""The warm-up: a profile run of the largest step, then a KV pool of what memory is left, and limits in tokens."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from funitel.model_server.device.memory import MEMORY_ERRORS, Gpu, is_out_of_memory, log_idle_memory
from funitel.model_server.device.pinned_memory import give_back, page_locked
from funitel.model_server.executor.admit import RowAdmission
from funitel.model_server.executor.interface import StepSampling
from funitel.model_server.executor.model_runner import ModelRunner
from funitel.model_server.executor.pool_sizing import (
    USUAL_BATCH_SIZE,
    GpuPoolMemory,
    HostPoolMemory,
    JoinedPoolMemory,
    PoolDemand,
    PoolMemory,
    PoolRoom,
    num_pool_blocks,
    num_state_slots,
)
from funitel.model_server.executor.prompt_scores import max_scored_tokens, score
from funitel.model_server.forward.batch import RecordingForward, RowSpan
from funitel.model_server.kv_cache.disk_tier import DiskBlocks, DiskTier
from funitel.model_server.kv_cache.pool import HostBlocks, KVCache
from funitel.model_server.kv_cache.precision import kv_label
from funitel.model_server.kv_cache.state_pool import StateLayout, StatePool
from funitel.model_server.sampling.sampler import SamplingState
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher, TextCodec
from funitel.model_server.sequence.table import SequenceState
from funitel.model_server.speculation.speculator import MAX_STEP_DRAFTS, Speculator
from funitel.proto.errors import InvalidRequest, NotEnoughMemory, SettingsError
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams, WarmupLimits, WarmupResult

logger = logging.getLogger(__name__)

MAX_PROFILED_ROWS = 1024  # sequences: beyond that each takes more than it can pay back
TOP_N = 20
# Every filter there is, and the model's own scores kept beside those that it changes.
HEAVIEST = SamplingParams(
    do_sample=True,
    temperature=0.7,
    top_k=1000,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.1,
    raw_logprobs=True,
)


def num_rows(max_batch_size: int | None) -> int:
    """Sequences of the largest step, beside its prompts."""
    return min(max_batch_size or USUAL_BATCH_SIZE, MAX_PROFILED_ROWS)


def profiled_rows(count: int, codec: TextCodec) -> list[SequenceState]:
    """So many sequences that ask for everything sampling can do, in places of the sequence table from 0 on."""
    stopping = StoppingParams(max_new_tokens=2, ignore_eos=True)
    begun = SequenceStart(request_id=0, sampling=HEAVIEST, stopping=stopping, top_n_tokens=TOP_N)
    return [
        SequenceState(
            index=i,
            start=begun,
            tokens=[0],
            prompt_len=1,
            num_cached=0,
            sampling=SamplingState.over(HEAVIEST, TOP_N, [0], []),
            detokenizer=Detokenizer(codec, [0]),
            stops=StopMatcher(()),
        )
        for i in range(count)
    ]


def prompts_within(prompts: Iterable[list[int]], budget: int) -> list[list[int]]:
    """The prompts that are not empty, cut off where they would be more tokens than `budget`."""
    kept = []
    for prompt in prompts:
        if tokens := prompt[:budget]:
            kept.append(tokens)
            budget -= len(tokens)
    return kept


def _block_tables(counts: Sequence[int]) -> list[np.ndarray]:
    """Block tables of so many blocks each, one behind the other."""
    return np.split(np.arange(sum(counts), dtype=np.int32), np.cumsum(counts)[:-1])


# On a CPU memory is not sized by a measured peak, so warming up needs no full-size prefill: it would take seconds.
CPU_WARMUP_TOKENS = 256
SCRATCH_SHARE = 1 / 32  # of the bytes for KV pool and states: what states before drafts take, but those of one row


class Warmup:
    """Makes the pool of a model runner, and its host tier."""

    def __init__(
        self,
        runner: ModelRunner,
        admission: RowAdmission,
        sampling: StepSampling[Any],
        codec: TextCodec,
        speculator: Speculator | None = None,
    ) -> None:
        options = runner.options
        self.memory: PoolMemory = HostPoolMemory(options.memory_fraction, runner.parallel, options.num_replicas)
        if options.device.type == "cuda":
            self.memory = GpuPoolMemory(Gpu(options.device), options.memory_fraction)
        elif options.gpu_blocks is not None:
            device, num_bytes = options.gpu_blocks
            gpu = GpuPoolMemory(Gpu(device), options.memory_fraction)
            self.memory = JoinedPoolMemory(self.memory, gpu, num_bytes / runner.pools.bytes_per_block)
        self._runner = runner
        self._admission = admission
        self._sampling = sampling
        self._speculator = speculator
        self._codec = codec
        self._host_memory: torch.Tensor | None = None

    def run(self, starts: Sequence[SequenceStart], limits: WarmupLimits) -> WarmupResult:
        """Run the largest step, size the pool by what memory is left beside it, and settle the limits in tokens.

        Raises:
            SettingsError: the limits asked for exceed the model's context, or what its encoder reads.
            NotEnoughMemory: the pool cannot hold the longest request allowed.
        """
        runner = self._runner
        context, max_prompt = runner.spec.max_position_embeddings, runner.rules.max_prompt
        asked = limits.max_input_tokens
        if max_prompt is not None and asked is not None and asked > max_prompt:
            raise SettingsError(
                f"--max-input-tokens {asked} exceeds the {max_prompt} tokens that the model's encoder reads"
            )
        if limits.max_total_tokens is not None and limits.max_total_tokens > context:
            raise SettingsError(
                f"--max-total-tokens {limits.max_total_tokens} exceeds the model's context of {context}"
            )
        runner.cache = None
        self.profile(starts, num_rows(limits.max_batch_size), limits.max_prefill_tokens)
        pool_tokens = self._size_pool(limits)
        if isinstance(runner.decoder, RecordingForward):
            runner.decoder.record_largest(runner.pool)
        max_total = limits.max_total_tokens or min(pool_tokens, context)
        max_input = asked or max_total - 1
        if max_total > pool_tokens:
            raise NotEnoughMemory(
                f"the KV pool holds {pool_tokens} tokens, fewer than --max-total-tokens {max_total}: "
                "lower it or give the pool more memory"
            )
        if max_input >= max_total:
            raise SettingsError(f"--max-input-tokens {max_input} must be < --max-total-tokens {max_total}")
        states = runner.pool.state_pool
        state_slots = (
            runner.pool.max_rows if states is None else states.num_slots - 1 - len(runner.scratch_slots)
        )  # slot 0 is no sequence's
        max_blocks = -(-min(context, pool_tokens) // runner.options.block_size) + 1
        runner.table.reset(max_blocks, max_rows=state_slots)
        host_blocks = self._make_host_blocks()
        log_idle_memory()
        return WarmupResult(
            pool_tokens=pool_tokens,
            max_input_tokens=max_input if max_prompt is None else min(max_input, max_prompt),
            max_total_tokens=max_total,
            host_blocks=host_blocks,
            state_slots=state_slots or 0,
            is_disk=runner.host is not None and runner.host.is_disk,
            stored_blocks=() if runner.host is None else runner.host.stored(),
            kv_bytes=runner.pool.num_bytes,
            total_kv_bytes=runner.pool.num_blocks * runner.pools.total_bytes_per_block,
        )

    def free(self) -> None:
        """Let go of the pool and its host tier; `run` makes others."""
        runner = self._runner
        if isinstance(runner.decoder, RecordingForward):
            runner.decoder.forget_recordings()
        if runner.cache is not None:
            runner.cache.free()
        runner.cache = runner.host = None
        if self._host_memory is not None:
            give_back(self._host_memory, runner.options.device)
        self._host_memory = None
        if runner.options.disk is not None:
            runner.options.disk.close()

    def profile(self, starts: Sequence[SequenceStart], num_rows: int, max_prefill_tokens: int) -> None:
        """Compute the warm-up prompts once in a pool made for them; where memory is measured, with all that may join.

        That is `num_rows` sequences that decode and sample, and recorded steps.
        """
        runner, is_measured = self._runner, self.memory.is_measured
        size, rules = runner.options.block_size, runner.rules
        budget = max_prefill_tokens if is_measured else CPU_WARMUP_TOKENS
        prompts = prompts_within(map(self._prompt_of, starts), budget)
        if not prompts:
            raise InvalidRequest("Warmup needs at least one prompt token")
        tables = _block_tables([-(-len(prompt) // size) for prompt in prompts])
        spans = [
            rules.profile_prompt(prompt, table, size, "last", is_measured=is_measured)
            for prompt, table in zip(prompts, tables, strict=True)
        ]
        most = max_scored_tokens(runner.spec.vocab_size)
        scored = rules.profile_prompt(prompts[0][:most], tables[0], size, "all", is_measured=is_measured)
        if is_measured:
            spans += [rules.profile_decode()] * num_rows
        runner.cache = pool = runner.pools.make(sum(map(len, tables)))
        if runner.pools.state_layout is not None:
            pool.state_pool = StatePool(runner.pools.state_layout, 1, runner.options.device)
        what = f"lower --max-batch-prefill-tokens {max_prefill_tokens} or --max-batch-size"
        self.memory.profile(lambda: self._compute(spans, scored, num_rows), what)
        if isinstance(runner.decoder, RecordingForward):
            self.memory.profile_recording(runner.decoder, pool)
        runner.cache = None
        runner.take_forwarded()

    @torch.inference_mode()
    def _compute(self, spans: Sequence[RowSpan], scored: RowSpan, num_rows: int) -> None:
        logits = self._runner.forward(spans)
        if not self.memory.is_measured:
            return
        if logits is not None:
            self._sampling.profile(profiled_rows(num_rows, self._codec), logits[len(logits) - num_rows :])
            del logits
        if scored.logits == "all":
            logits = self._runner.forward([scored])
            if logits is not None:
                ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
                score(logits, ids, TOP_N)

    def _prompt_of(self, start: SequenceStart) -> list[int]:
        return self._admission.prompt_of(start)[: self._runner.spec.max_position_embeddings]

    def _size_pool(self, limits: WarmupLimits) -> int:
        """Allocate the pool; every rank the same number of blocks. Returns its size in tokens."""
        runner, options, most_tokens = self._runner, self._runner.options, limits.max_prefill_tokens
        step_bytes = 0 if options.step_bytes is None else options.step_bytes(most_tokens)
        room, block_bytes = self.memory.room(step_bytes), runner.pools.bytes_per_block
        room = room.without(options.reserved_bytes)
        layout = runner.pools.state_layout
        num_slots = 0 if layout is None else self._num_slots(room, layout, num_rows(limits.max_batch_size))
        if layout is not None and self._speculator is not None:
            num_slots += self._num_scratch_slots(self._speculator, room, layout, num_slots)
        room = room.without(0 if layout is None else num_slots * layout.bytes_per_slot)
        demand = PoolDemand(
            context=runner.spec.max_position_embeddings,
            block_size=options.block_size,
            num_rows=num_rows(limits.max_batch_size),
            longest=limits.max_total_tokens,
            asked_tokens=limits.max_batch_total_tokens,
            empty=block_bytes < options.block_size,  # keys and values take two bytes a token at least
        )
        # Ranks hold different heads and read free memory at different moments: agree before anything may be refused.
        most, usual = (
            runner.parallel.smallest(num_bytes // block_bytes - 1)  # block 0 is no sequence's
            for num_bytes in (room.most, room.usual)
        )
        num_blocks, limit = num_pool_blocks(demand, room, most, usual)
        tokens = num_blocks * demand.block_size
        runner.cache = self._make_pool(num_blocks + 1, tokens)
        if layout is not None:
            runner.cache.state_pool = self._make_states(layout, num_slots)
        message = "KV pool tokens=%d bytes=%d dtype=%s contexts=%.1f limit=%s"
        logger.info(message, tokens, runner.pool.num_bytes, kv_label(options.dtype), tokens / demand.context, limit)
        if options.step_bytes is not None:
            logger.info("memory predicted_step_bytes=%d most_tokens=%d", step_bytes, most_tokens)
        return tokens

    def _num_slots(self, room: PoolRoom, layout: StateLayout, num_rows: int) -> int:
        """Slots of the state pool for `num_rows` sequences; as many on every rank."""
        has_cache = self._runner.options.has_prefix_cache
        wanted = num_state_slots(room, layout.bytes_per_slot, num_rows, has_prefix_cache=has_cache)
        found = self._runner.parallel.smallest(wanted)
        if found < 2:
            raise NotEnoughMemory(
                f"the states of a sequence take {layout.bytes_per_slot} bytes, and half of the {room.usual} bytes for "
                f"KV pool and states have no room for two: {room.limit}"
            )
        return found

    def _num_scratch_slots(self, speculator: Speculator, room: PoolRoom, layout: StateLayout, num_slots: int) -> int:
        """Slots behind the others for the states before drafts; as many on every rank."""
        most = int(room.usual * SCRATCH_SHARE) // layout.bytes_per_slot
        found = self._runner.parallel.smallest(min(MAX_STEP_DRAFTS, max(speculator.max_drafts, most)))
        speculator.max_step_drafts = found
        self._runner.scratch_slots = range(num_slots, num_slots + found)
        return found

    def _make_states(self, layout: StateLayout, num_slots: int) -> StatePool:
        try:
            states = StatePool(layout, num_slots, self._runner.options.device)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            num_bytes = num_slots * layout.bytes_per_slot
            raise NotEnoughMemory(
                f"there is no memory for a state pool of {num_slots} slots ({num_bytes} bytes): "
                "--max-batch-size sets another number"
            ) from None
        message = "state pool slots=%d bytes=%d bytes_per_slot=%d"
        logger.info(message, num_slots - 1 - len(self._runner.scratch_slots), states.num_bytes, layout.bytes_per_slot)
        return states

    def _make_pool(self, num_blocks: int, tokens: int) -> KVCache:
        try:
            return self._runner.pools.make(num_blocks)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            num_bytes = num_blocks * self._runner.pools.bytes_per_block
            raise NotEnoughMemory(
                f"there is no memory for a KV pool of {tokens} tokens ({num_bytes} bytes): "
                "--max-batch-total-tokens sets another size"
            ) from None

    def _open_disk(self, disk: DiskTier, num_slots: int) -> DiskBlocks:
        """Open files of one number on all ranks: a slot is found again only where every rank has the same in it."""
        runner, parallel = self._runner, self._runner.parallel
        wanted = None if parallel.rank == 0 else int(parallel.share("", 0))
        try:
            return disk.open(runner.pool, num_slots, wanted)
        finally:
            if parallel.rank == 0:
                parallel.share(str(disk.number), 0)

    def _make_host_blocks(self) -> int:
        """Have room for evicted blocks in the host's memory or a file, as much on every rank; returns for how many.

        Raises:
            SettingsError: the file cannot be used.
        """
        runner, options = self._runner, self._runner.options
        if options.disk is not None:
            num_slots = runner.parallel.smallest(options.disk.num_slots(runner.pools.bytes_per_block))
            runner.host = self._open_disk(options.disk, num_slots)
            return num_slots
        num_blocks = runner.parallel.smallest(options.host_bytes // runner.pools.bytes_per_block)
        if not num_blocks:
            return 0
        if self._host_memory is None:
            self._host_memory = page_locked(options.host_bytes, options.device, "--kv-host-gb")
        runner.host = HostBlocks(self._host_memory, num_blocks, runner.pool)
        logger.info("KV host tier blocks=%d bytes=%d", num_blocks, num_blocks * runner.pools.bytes_per_block)
        return num_blocks
