"""Failover: reconnect to lost replicas, and the timeout after which waiting requests fail. Event loop only."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from math import inf
from typing import TypeVar

from funitel.proto.errors import FunitelError, ShardFailed
from funitel.proto.security.tls import MutualTls
from funitel.router.shard_client.shards import Shards

logger = logging.getLogger(__name__)

T = TypeVar("T")
NO_REPLICA = "every replica is lost"
NONE_LEFT = "the model has no replica left"
# A request that was with so many replicas as they were lost, one after the other and without a token in between, may be
# what ends them: it gets the error.
MAX_LOSSES = 3
# Between two attempts with shards that answer and cannot serve, or do not for long.
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
STEADY_SECONDS = 10.0  # of service, after which a replica that is lost may come back at once


async def reconnect(
    address: str, tls: MutualTls | None, rejoin: Callable[[Shards], Awaitable[T]], pause_seconds: float = 0.0
) -> T:
    """Wait until the shards at an address answer again, and return what `rejoin` makes of them.

    Shards that it refuses, by a FunitelError, are disconnected and tried again later.

    Args:
        address: of rank 0.
        tls: how shards on TCP are reached.
        rejoin: gets connected shards.
        pause_seconds: before the first attempt; each that fails doubles it.
    """
    while True:
        await asyncio.sleep(pause_seconds)
        try:
            async with AsyncExitStack() as undo:
                shards = await Shards.connect(address, inf, tls)
                undo.push_async_callback(shards.close)
                member = await rejoin(shards)
                undo.pop_all()
            return member
        except FunitelError as error:
            pause_seconds = next_pause(pause_seconds)
            logger.warning(
                "the shards at %s cannot serve, asking again in %g s: %s", address, pause_seconds, error.message
            )


def next_pause(pause_seconds: float) -> float:
    """Return the seconds to wait after an attempt that has failed."""
    return min(max(2 * pause_seconds, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)


class ReturnTimeout:
    """The timeout of requests that wait while no replica serves; `expire` is called when it is over."""

    def __init__(self, seconds: int, expire: Callable[[FunitelError], None]) -> None:
        """Zero seconds: lost replicas do not come back."""
        self.is_over = False
        self._seconds = seconds
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """No replica serves from now on."""
        if self._seconds:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        else:
            self.is_over = True

    def renew(self) -> None:
        """A replica serves, or no request waits any more."""
        self.is_over = False
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.is_over = True
        self._expire(ShardFailed(f"{NO_REPLICA}, for {self._seconds} s"))
