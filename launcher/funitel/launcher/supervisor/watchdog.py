"""Shards that do not answer for too long are killed: what was stopped, or hangs in native code, cannot end itself."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from funitel.launcher.supervisor.process import Child

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
MOST_LOOK_SECONDS = 10.0  # that a look can take: what is beyond is this process's own standing still


async def watch(shard: Child, answers: Callable[[], Awaitable[bool]], most_seconds: float) -> None:
    """Look after a shard until it has ended; kill it once it has not answered for `most_seconds`."""
    silent = 0.0
    pause = min(LOOK_SECONDS, most_seconds / 4)
    while not shard.has_exited:
        began = time.monotonic()
        does_answer = await answers()
        await asyncio.wait({shard.exited}, timeout=pause)
        silent = 0.0 if does_answer else silent + min(time.monotonic() - began, MOST_LOOK_SECONDS)
        if silent > most_seconds and not shard.has_exited:
            logger.error("%s has not answered for %.0f s and is killed", shard.name, silent)
            shard.kill()
            return
