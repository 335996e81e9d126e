"""The replicas of an encoder, each a single shard: those that serve, and those that are lost until they come back.

Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from funitel.proto.errors import FunitelError, ShardFailed, StartupError
from funitel.router.core.background_tasks import Tasks
from funitel.router.replica_set.failover import NO_REPLICA, STEADY_SECONDS, ReturnTimeout, comeback, next_pause
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 0.5  # between two looks at a shard whose connection ended and that answers all the same


@dataclass(eq=False, slots=True)
class _Serving:
    """A replica while it serves."""

    shards: Shards
    watch: "asyncio.Task[None] | None"
    since: float = field(default_factory=time.monotonic)


Work = Callable[[Shards], Coroutine[Any, Any, None]]


class EncoderReplicas:
    """Shards by the place of their replica. Each that serves has workers."""

    def __init__(
        self,
        found: Sequence[Shards],
        settings: RouterSettings,
        metrics: Metrics,
        work: Work,
        run_out: Callable[[FunitelError], None],
    ) -> None:
        """Let the shards serve.

        Args:
            found: those of each replica.
            settings: the router's.
            metrics: told how many serve.
            work: what a worker does, until `serves` is false of its shards.
            run_out: called when none has served for too long.
        """
        self.num_replicas = len(found)
        self.patience = ReturnTimeout(settings.shard_return_timeout, run_out)
        self._facts = found[0].infos[0].encoder
        self._can_come_back = settings.shard_return_timeout > 0
        self._num_workers = settings.pipeline_steps
        self._addresses = (settings.master_url, *settings.replica_address)
        self._tls = settings.shard_tls
        self._serving: dict[int, _Serving] = {}
        self._pauses = [0.0] * len(found)
        self._metrics = metrics
        self._work = work
        self._tasks = Tasks()
        self._farewells = Tasks()
        for place, shards in enumerate(found):
            self._welcome(place, shards)

    def serves(self, shards: Shards) -> bool:
        """Whether these shards are there."""
        return any(each.shards is shards for each in self._serving.values())

    async def health(self) -> None:
        """Return once one replica answers; raise a FunitelError when none does."""
        failure: FunitelError = ShardFailed(NO_REPLICA)
        for each in tuple(self._serving.values()):  # one may be lost meanwhile
            try:
                await each.shards.health()
                return
            except FunitelError as error:
                failure = error
        raise failure

    def _welcome(self, place: int, shards: Shards) -> None:
        watch = self._tasks.start(self._watch(shards)) if self._can_come_back else None
        self._serving[place] = _Serving(shards, watch)
        for _ in range(self._num_workers):
            self._tasks.start(self._work(shards))
        self._report()

    def _report(self) -> None:
        self._metrics.set_replicas(len(self._serving), self.num_replicas - len(self._serving))

    async def _watch(self, shards: Shards) -> None:
        """Notice the end of a replica at once, idle or not."""
        while self.serves(shards):
            await shards.disconnected()
            try:
                await shards.health()
            except FunitelError as error:
                self.lose(shards, error)
            else:
                await asyncio.sleep(RECHECK_SECONDS)

    def lose(self, shards: Shards, error: FunitelError) -> bool:
        """Go on without a replica; say whether what it had can be encoded by another, now or later.

        The last one is kept where no other can come.
        """
        if not self._can_come_back and len(self._serving) == 1 and self.serves(shards):
            return False
        for place in [place for place, each in self._serving.items() if each.shards is shards]:
            lost = self._serving.pop(place)
            if lost.watch is not None:
                lost.watch.cancel()
            self._report()
            logger.error("replica %d is lost: %s", place, error.message)
            shards.fence()
            self._farewells.start(shards.close())
            if self._can_come_back:
                is_steady = time.monotonic() - lost.since >= STEADY_SECONDS
                self._pauses[place] = 0.0 if is_steady else next_pause(self._pauses[place])
                self._tasks.start(self._come_back(place))
            if not self._serving:
                self.patience.begin()
        return not self.patience.is_over

    async def _come_back(self, place: int) -> None:
        """Let a replica serve again as soon as its shard answers."""
        began = time.monotonic()
        shards = await comeback(self._addresses[place], self._tls, self._let_in, self._pauses[place])
        self.patience.renew()
        self._welcome(place, shards)
        self._metrics.count_return()
        logger.warning("replica %d serves again after %.1f s", place, time.monotonic() - began)

    async def _let_in(self, shards: Shards) -> Shards:
        """Raise StartupError unless a shard is what the lost one was."""
        if len(shards.infos) != 1 or shards.infos[0].encoder != self._facts:
            raise StartupError("what answers there is another model")
        return shards

    async def close(self) -> None:
        """Let go of the shards; no worker is busy."""
        self.patience.renew()
        await self._tasks.cancel()
        await asyncio.gather(*(each.shards.close() for each in self._serving.values()), self._farewells.ended())
