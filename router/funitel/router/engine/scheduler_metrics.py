"""Report the scheduler's state to metrics and log after every turn. Event loop only."""

import logging

from funitel.router.scheduler.cost.chunk_budget import MIN_CHUNK_TOKENS
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.shard_client.replica import Replica
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


class SchedulerReport:
    """Queue, running sequences and pool as metrics; a target that cannot be held as a line of the log, once."""

    def __init__(self, scheduler: Scheduler, replica: Replica, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._replica = replica
        self._metrics = metrics
        self._reported: object = None  # the state that metrics have
        self._preempted = (0, 0)  # sequences, and tokens computed again, that metrics know of
        self._counted = (0, 0, 0)  # expired blocks, lost slots and sequences swapped out, that metrics know of
        self._used_slots = -1
        self._has_logged_target = False

    def update(self) -> None:
        """Report the state now."""
        scheduler, metrics = self._scheduler, self._metrics
        waiting, blocks = scheduler.waiting, scheduler.blocks
        sequences = len(waiting), len(scheduler.running)
        queue = waiting.num_preempted, waiting.num_prompt_tokens
        pool = blocks.num_used, blocks.num_free, blocks.num_cached
        states: tuple[int, int, int] | None = None
        if (slots := blocks.states) is not None:
            states = slots.num_used, slots.num_free, slots.num_cached
        state = sequences, queue, pool, states, self._replica.num_batches
        if state != self._reported:  # most steps change nothing of it
            self._reported = state
            metrics.set_sequences(*sequences)
            metrics.set_queue(*queue)
            metrics.set_pool(*pool)
            if states is not None:
                metrics.set_states(*states)
            metrics.set_batch_tokens(blocks.num_used * blocks.block_size)
            metrics.set_cached_batches(self._replica.num_batches)
        preempted = (scheduler.num_preempted, scheduler.shares.num_repeated)
        if preempted != self._preempted:
            metrics.count_preempted(*(now - before for now, before in zip(preempted, self._preempted, strict=True)))
            self._preempted = preempted
        if blocks.needs_ticks:
            self._update_tier()
        self._log_missed_target()

    def _update_tier(self) -> None:
        """Report the lower tier, and what has expired."""
        blocks, tier = self._scheduler.blocks, self._scheduler.blocks.host
        if tier.num_slots and len(tier) != self._used_slots:
            self._used_slots = len(tier)
            self._metrics.set_tier(len(tier), tier.num_slots - len(tier))
        counted = blocks.num_expired + tier.num_expired, tier.num_lost, self._scheduler.num_swapped
        if counted != self._counted:
            self._metrics.count_cache(*(now - before for now, before in zip(counted, self._counted, strict=True)))
            self._counted = counted

    def _log_missed_target(self) -> None:
        """Log once that the target is below what decoding alone takes."""
        step_time = self._scheduler.step_time
        if step_time.longest_plain_seconds is None or self._has_logged_target:
            return
        self._has_logged_target = True
        logger.warning(
            "--target-itl-ms %g cannot be held: decoding alone takes %.1f ms a step; beside running streams prompts "
            "advance by %d tokens a step",
            1e3 * (step_time.target_gap_seconds or 0.0),
            1e3 * step_time.longest_plain_seconds,
            MIN_CHUNK_TOKENS,
        )
