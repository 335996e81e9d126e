"""How many requests of batches may be in flight: what interactive requests leave free of the engines. Pure."""

from collections.abc import Iterable

from funitel.router.core.request import is_background
from funitel.router.engine.snapshot import EngineView
from funitel.router.scheduler.scheduler import Scheduler

MAX_SHARE = 2  # of the requests in flight that the server allows, batches have at most one half,
MAX_SHARE_UNSEEN = 8  # or an eighth where the state of the engine is not known
MIN_FREE_BLOCKS = 1 / 8  # of the pool, so that running sequences grow without preemption
MAX_ENTERING = 4  # requests of batches for each replica that do not run yet


class Room:
    """Decides whether one more request of a batch may be started."""

    def __init__(self, max_requests: int) -> None:
        """`max_requests`: that the server allows in flight."""
        self._max_requests = max_requests

    def has_room(self, num_in_flight: int, views: Iterable[EngineView]) -> bool:
        """Whether one more may be started beside `num_in_flight` of batches.

        Args:
            num_in_flight: requests of batches that were started and have not ended.
            views: the engines; none of an encoder.
        """
        schedulers = [view.scheduler for view in views]
        if not schedulers:
            return num_in_flight < max(1, self._max_requests // MAX_SHARE_UNSEEN)
        if num_in_flight >= max(1, self._max_requests // MAX_SHARE):
            return False
        if any(scheduler.waiting.num_foreground or scheduler.background.num_held for scheduler in schedulers):
            return False
        num_entering = num_in_flight - sum(_num_running(scheduler) for scheduler in schedulers)
        free = sum(map(_has_room, schedulers))
        return num_entering < MAX_ENTERING * free


def _num_running(scheduler: Scheduler) -> int:
    return sum(is_background(sequence.request.key) for sequence in scheduler.running.values())


def _has_room(scheduler: Scheduler) -> bool:
    """Whether a replica has a slot and blocks for one more."""
    blocks, most = scheduler.blocks, scheduler.policy.max_batch_size
    has_slot = most is None or len(scheduler.running) < most
    return has_slot and blocks.num_free >= MIN_FREE_BLOCKS * blocks.num_blocks
