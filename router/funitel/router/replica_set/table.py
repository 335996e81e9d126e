"""The table of replicas: where each one is, its weight, and what stays of it when it is lost. Event loop only."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from math import isfinite

from funitel.proto.errors import InvalidRequest
from funitel.router.replica_set.failover import STEADY_SECONDS, next_pause
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where a replica is: the address of its rank 0, `unix:///path` or `tcp://host:port`; and its weight."""

    replica_id: int
    address: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A replica of the table. `state` is `serving`, `draining` or `lost`; sequences of an encoder are texts."""

    replica_id: int
    address: str
    weight: float
    state: str
    num_waiting: int
    num_running: int


@dataclass(eq=False, slots=True, kw_only=True)
class Slot:
    """A row of the table of replicas: what stays of a replica when it is lost."""

    replica_id: int
    address: str
    weight: float = 1.0
    num_ranks: int
    metrics: Metrics
    pause_seconds: float = 0.0  # before its shards are connected to again
    reconnecting: "asyncio.Task[None] | None" = None
    draining: "asyncio.Task[None] | None" = None

    def note_loss(self, since: float) -> None:
        """Note that a replica is lost that served here `since` an instant of the monotonic clock."""
        self.metrics.retire()
        self.metrics.count_loss()
        is_steady = time.monotonic() - since >= STEADY_SECONDS
        self.pause_seconds = 0.0 if is_steady else next_pause(self.pause_seconds)


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """One replica while it serves or drains."""

    slot: Slot
    shards: Shards
    since: float = field(default_factory=time.monotonic)
    watch: asyncio.Task[None] | None = None

    def health(self) -> Awaitable[object]:
        """Raise a FunitelError unless every shard answers."""
        return self.shards.health()

    async def close(self) -> None:
        """Close the connections to the shards."""
        await self.shards.close()


def check_weight(replica_id: int, weight: float) -> None:
    """Raise InvalidRequest unless a weight is a finite number from 0 up."""
    if not isfinite(weight) or weight < 0:
        raise InvalidRequest(f"`weight` of replica {replica_id} must be a number >= 0. Given: {weight}", "weight")
