"""Watchdog: kill a shard that does not answer health checks, since a stopped or hung process cannot end itself."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from funitel.launcher.supervisor.process import Child

logger = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
MAX_CHECK_SECONDS = 10.0  # counted for one check: beyond that, this process itself was suspended


async def kill_when_unresponsive(shard: Child, answers: Callable[[], Awaitable[bool]], max_seconds: float) -> None:
    """Check a shard until it has ended; kill it once it has not answered for `max_seconds`."""
    unresponsive = 0.0
    pause = min(CHECK_SECONDS, max_seconds / 4)
    while not shard.has_exited:
        began = time.monotonic()
        is_answering = await answers()
        await asyncio.wait({shard.exited}, timeout=pause)
        unresponsive = 0.0 if is_answering else unresponsive + min(time.monotonic() - began, MAX_CHECK_SECONDS)
        if unresponsive > max_seconds and not shard.has_exited:
            logger.error("%s has not answered for %.0f s and is killed", shard.name, unresponsive)
            shard.kill()
            return
