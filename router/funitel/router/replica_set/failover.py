"""A lost replica comes back: its shards answer at the same address again, and are as they were. Event loop only."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

from funitel.proto.errors import FunitelError, ShardFailed
from funitel.proto.security.tls import MutualTls
from funitel.router.shard_client.shards import Shards

logger = logging.getLogger(__name__)

T = TypeVar("T")
NO_REPLICA = "every replica is lost"
# What was with so many replicas as they were lost, one after the other and without an answer in between, may be what
# ends them: it gets the error.
MOST_LOSSES = 3
# Between two attempts to let shards in that answer, and cannot serve, or do not for long.
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 30.0
STEADY_SECONDS = 10.0  # of service, after which a replica that is lost may come back at once


async def comeback(
    address: str, tls: MutualTls | None, let_in: Callable[[Shards], Awaitable[T]], pause_seconds: float = 0.0
) -> T:
    """Wait until the shards at an address answer again, and return what `let_in` makes of them.

    Shards that it refuses, by a FunitelError, are hung up on and tried again later.

    Args:
        address: of rank 0.
        tls: how shards on TCP are reached.
        let_in: gets connected shards.
        pause_seconds: before the first attempt; each that fails doubles it.
    """
    while True:
        await asyncio.sleep(pause_seconds)
        try:
            shards = await Shards.connect(address, inf, tls)
            try:
                return await let_in(shards)
            except BaseException:
                await shards.close()
                raise
        except FunitelError as error:
            pause_seconds = next_pause(pause_seconds)
            logger.warning(
                "the shards at %s cannot serve, asking again in %g s: %s", address, pause_seconds, error.message
            )


def next_pause(pause_seconds: float) -> float:
    """How long to wait after an attempt that has failed."""
    return min(max(2 * pause_seconds, LEAST_PAUSE_SECONDS), MOST_PAUSE_SECONDS)


class ReturnTimeout:
    """How long requests wait while no replica serves. `run_out` is called when that was too long."""

    def __init__(self, seconds: int, run_out: Callable[[FunitelError], None]) -> None:
        """With no seconds there is none: lost replicas do not come back."""
        self.is_over = False
        self._seconds = seconds
        self._run_out = run_out
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """No replica serves from now on."""
        if self._seconds:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        else:
            self.is_over = True

    def renew(self) -> None:
        """A replica serves, or nobody waits any more."""
        self.is_over = False
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.is_over = True
        self._run_out(ShardFailed(f"{NO_REPLICA}, for {self._seconds} s"))
