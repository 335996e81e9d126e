"""Warmup: make an engine of connected shards, with the limits and the policy that they allow."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Protocol

from funitel.proto.errors import SettingsError
from funitel.proto.settings.fields import require
from funitel.proto.step import Capability, SamplingParams, SequenceStart, StoppingParams, WarmupLimits, WarmupResult
from funitel.router.core.request import Limits
from funitel.router.encoder_cache.cache import MediaRanks
from funitel.router.engine.engine import Engine
from funitel.router.engine.held_rows import are_sound
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.kv_cache.host_tier import CacheTier, HostTier
from funitel.router.scheduler.admission import Admission
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.settings import RECOMPUTE, SWAP, RouterSettings
from funitel.router.shard_client.capabilities import default_pipeline_steps
from funitel.router.shard_client.replica import Ranks, Replica
from funitel.router.shard_client.takeover import TakenOver
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_ON_THE_WIRE = 2**32 - 1
MAX_BEAMS = 128  # of one search: as many answers as OpenAI's requests can ask for
WARMUP_WORD = "test "  # one token or more, whatever the tokenizer


class LeftRanks(Protocol):
    """Ranks that an earlier router may have left rows on."""

    async def take_over(self, sequences: Sequence[SequenceStart], limits: WarmupLimits) -> TakenOver | None:
        """Take rows over; None if that cannot be."""

    def clear(self) -> Awaitable[None]:
        """Drop all rows."""


def admission_of(settings: RouterSettings) -> Admission:
    """The bounds on what may wait."""
    return Admission(
        settings.max_concurrent_requests,
        settings.max_queued_tokens,
        has_several_keys=settings.has_several_keys,
        target_seconds=None if settings.target_ttft_ms is None else settings.target_ttft_ms / 1000,
    )


async def start(
    ranks: Ranks,
    settings: RouterSettings,
    metrics: Metrics,
    admission: Admission | None = None,
    media_ranks: MediaRanks | None = None,
    left_ranks: LeftRanks | None = None,
) -> Engine:
    """Warm the ranks of a model up and start the engine over them; or take rows over, which then wait for `begin`.

    Args:
        ranks: they have answered.
        settings: the router's.
        metrics: get the sizes of weights and pool.
        admission: that of ranks which served before them.
        media_ranks: the same ranks, where prompts may have the media that they take.
        left_ranks: the same ranks, where they were not cleared yet.

    Raises:
        StartupError: settings, model and memory do not fit together.
    """
    replica = Replica(ranks)
    block_size = replica.info.block_size
    is_plain = not {Capability.ROW_UPDATES, Capability.TOKEN_IDS} <= replica.capabilities
    is_chunked = replica.info.support_chunking and not is_plain
    require(
        is_chunked or settings.target_itl_ms is None,
        f"--target-itl-ms {settings.target_itl_ms} needs shards that compute prompts in chunks",
    )
    require(
        is_chunked or settings.target_ttft_ms is None,
        f"--target-ttft-ms {settings.target_ttft_ms} needs shards that compute prompts in chunks",
    )
    left = None if left_ranks is None else await _take_over(left_ranks, replica, settings)
    results = await replica.warmup(*_largest_prefill(settings)) if left is None else left.warmups
    smallest = min(results, key=_triple)
    # A plain peer's pool counts block 0, which must stay unused.
    num_blocks = (smallest.pool_tokens or 0) // block_size - (1 if is_plain else 0)
    state_slots = min(result.state_slots for result in results)
    speculates = not is_plain and Capability.SPECULATION in replica.capabilities
    forks = is_chunked and Capability.BLOCK_FORKS in replica.capabilities
    limits = replace(
        _limits(settings, smallest, is_chunked, num_blocks * block_size),
        block_size=block_size,
        max_speculate=min(info.speculate for info in replica.infos) if speculates else 0,
        max_beams=_max_beams(settings, state_slots) if forks else 0,
        eos_token_ids=replica.info.eos_token_ids,
    )
    if media_ranks is not None and not is_chunked and replica.info.media is not None:
        logger.warning("images are refused: they need shards that compute prompts in chunks (--prefill-chunking)")
    if media_ranks is not None and is_chunked:
        limits = with_media(limits, replica, min(settings.max_batch_prefill_tokens, limits.pool_tokens))
    # Only numbered calls may overtake each other's answers, and only row updates say what a step computes.
    can_overlap = not is_plain and Capability.STEP_SEQ in replica.capabilities
    pipeline_steps = (
        (settings.pipeline_steps or default_pipeline_steps(replica.info, replica.num_stages)) if can_overlap else 1
    )
    policy = SchedulerPolicy(
        max_batch_prefill_tokens=min(settings.max_batch_prefill_tokens, limits.pool_tokens),
        max_batch_size=settings.max_batch_size,
        is_chunked=is_chunked,
        has_prefix_cache=not is_plain
        and (replica.info.use_prefix_caching or Capability.STATE_SLOTS in replica.capabilities),
        is_plain=is_plain,
        waiting_served_ratio=settings.waiting_served_ratio,
        max_waiting_tokens=settings.max_waiting_tokens,
        num_micro_batches=replica.num_stages,
        max_steps_each=pipeline_steps,
        preemption_victim=settings.preemption_victim,
        swaps=settings.preemption_mode == SWAP,
        has_whole_spans=limits.max_span_tokens > 0,
        target_gap_seconds=None if settings.target_itl_ms is None else settings.target_itl_ms / 1000,
    )
    for info, result in zip(replica.infos, results, strict=True):
        metrics.set_weights(info.rank, info.weight_bytes, info.sharded_weight_bytes)
        metrics.set_kv(info.rank, result.kv_bytes)
        metrics.set_reads(info.rank, info.weight_bytes, result.kv_bytes / (result.pool_tokens or 1))
    metrics.set_limits(limits)
    metrics.set_pool_tokens(limits.pool_tokens)
    logger.info("connected shards=%d %s %s", len(replica.infos), limits, policy)
    tier = await asyncio.to_thread(_lower_tier, results, settings)
    ttl = settings.prefix_cache_ttl
    scheduler = Scheduler(policy, BlockPool(num_blocks, block_size, 0, state_slots, host=tier, ttl=ttl))
    pipeline_steps += replica.num_stages - 1  # one is computed in each stage
    chosen = admission or admission_of(settings)
    decode_tokens, timeout = settings.otlp_decode_tokens, settings.step_timeout_s
    engine = Engine(
        *(replica, scheduler, limits, metrics, chosen, pipeline_steps, decode_tokens, timeout, settings.max_loras),
        media_ranks,
    )
    if left is not None:
        engine.hold(left.last_step_seq, left.batches)
    return engine


async def _take_over(ranks: LeftRanks, replica: Replica, settings: RouterSettings) -> TakenOver | None:
    """Take over what an earlier router has left, or clear the ranks and return None."""
    left = await ranks.take_over(*_largest_prefill(settings))
    if left is not None:
        block_size = replica.info.block_size
        num_blocks = min(result.pool_tokens or 0 for result in left.warmups) // block_size
        if are_sound(left.batches, num_blocks, block_size):
            # What was in slots of the lower tier at the warm-up may have been overwritten since.
            return replace(left, warmups=tuple([replace(result, stored_blocks=()) for result in left.warmups]))
        logger.warning("rows of an earlier router are not taken over: they are none of this pool")
    await ranks.clear()
    return None


def with_media(limits: Limits, replica: Replica, max_chunk_tokens: int) -> Limits:
    """Return the limits with the media that all ranks take, and the bytes of features that every rank keeps."""
    facts = [info.media for info in replica.infos if info.media is not None]
    if Capability.MEDIA not in replica.capabilities or len(facts) < len(replica.infos):
        return limits
    media = replace(facts[-1], cache_bytes=min(each.cache_bytes for each in facts))
    return replace(limits, media=media, max_span_tokens=max_chunk_tokens if media.has_whole_spans else 0)


def _lower_tier(results: Sequence[WarmupResult], settings: RouterSettings) -> HostTier:
    """The slots of the ranks, with the content that all of them have under the same key."""
    num_slots = min(result.host_blocks for result in results)
    require(
        num_slots > 0 or settings.preemption_mode == RECOMPUTE,
        f"--preemption-mode {settings.preemption_mode} needs slots of --kv-disk-gb, or on a GPU of --kv-host-gb",
    )
    first, *others = ({(each.slot, each.key): each for each in result.stored_blocks} for result in results)
    stored = [each for place, each in first.items() if all(place in other for other in others)]
    kind = CacheTier.DISK if any(result.is_disk for result in results) else CacheTier.HOST
    if stored:
        logger.info("%s tier: %d of %d slots hold blocks of an earlier run", kind, len(stored), num_slots)
    return HostTier(num_slots, kind, settings.prefix_cache_ttl, stored, time.monotonic())


def _largest_prefill(settings: RouterSettings) -> tuple[list[SequenceStart], WarmupLimits]:
    """What to warm up with: the largest prefill allowed, as one or more prompts."""
    longest = min(settings.max_input_tokens or settings.max_batch_prefill_tokens, settings.max_batch_prefill_tokens)
    sequences: list[SequenceStart] = []
    left = settings.max_batch_prefill_tokens
    while left > 0 and (settings.max_batch_size is None or len(sequences) < settings.max_batch_size):
        num_tokens = min(longest, left)
        left -= num_tokens
        sequences.append(
            SequenceStart(
                request_id=0,
                sampling=SamplingParams(),
                stopping=StoppingParams(max_new_tokens=1, ignore_eos=True),
                inputs=WARMUP_WORD * num_tokens,
                truncate=num_tokens,
            )
        )
    max_running = settings.max_batch_size or settings.max_concurrent_requests
    limits = WarmupLimits(
        max_input_tokens=settings.max_input_tokens,
        max_prefill_tokens=settings.max_batch_prefill_tokens,
        max_total_tokens=settings.max_total_tokens,
        max_batch_total_tokens=settings.max_batch_total_tokens,
        max_batch_size=min(max_running, settings.max_concurrent_requests, MAX_ON_THE_WIRE),
    )
    return sequences, limits


def _max_beams(settings: RouterSettings, state_slots: int) -> int:
    """Beams that can be in one step; each has a slot of the state pool where there is one."""
    return min(MAX_BEAMS, settings.max_batch_size or MAX_BEAMS, state_slots or MAX_BEAMS)


def _triple(result: WarmupResult) -> tuple[int, int, int]:
    return (result.pool_tokens or 0, result.max_input_tokens, result.max_total_tokens)


def _limits(settings: RouterSettings, smallest: WarmupResult, is_chunked: bool, pool_tokens: int) -> Limits:
    """Settle the limits; a request longer than the `pool_tokens` that the blocks hold would wait forever."""
    if smallest.pool_tokens is None:
        raise SettingsError("the shards run a padded model: funitel needs paged shards")
    max_total = min(smallest.max_total_tokens, pool_tokens)
    require(
        settings.max_total_tokens is None or settings.max_total_tokens <= pool_tokens,
        f"the KV pool holds {pool_tokens} tokens, fewer than --max-total-tokens {settings.max_total_tokens}",
    )
    max_input = min(smallest.max_input_tokens, max_total - 1)
    if not is_chunked and max_input > settings.max_batch_prefill_tokens:
        if settings.max_input_tokens is not None:
            raise SettingsError(
                f"without chunked prefill --max-input-tokens {max_input} must be <= "
                f"--max-batch-prefill-tokens {settings.max_batch_prefill_tokens}"
            )
        max_input = settings.max_batch_prefill_tokens
    return Limits(max_input_tokens=max_input, max_total_tokens=max_total, pool_tokens=smallest.pool_tokens)
