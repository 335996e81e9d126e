"""The places of replicas in a fleet: one replica serves there, is lost, and another takes its place."""

import asyncio
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from funitel.proto.errors import StartupError
from funitel.proto.step import ShardInfo
from funitel.router.core.request import Limits
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import admission_of, start
from funitel.router.replica_set.failover import STEADY_SECONDS, next_pause
from funitel.router.scheduler.admission import Admission
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.replica_metrics import ReplicaMetrics

# Facts that replicas share: what a request has begun on one it may end on another.
_ALIKE = (
    "dtype",
    "block_size",
    "support_chunking",
    "use_prefix_caching",
    "capabilities",
    "vocab_size",
    "num_opening_tokens",
)


@dataclass(eq=False, slots=True)
class ReplicaSlot:
    """What stays of a replica when it is lost: where it comes back, and what was learnt there."""

    index: int
    address: str
    metrics: ReplicaMetrics
    admission: Admission
    pause_seconds: float = 0.0  # before another replica is looked for

    @classmethod
    def of(cls, index: int, address: str, metrics: ReplicaMetrics, settings: RouterSettings) -> "ReplicaSlot":
        """A seat that nobody has taken yet."""
        return cls(index, address, metrics, admission_of(settings))

    async def take(self, shards: Shards, settings: RouterSettings) -> "ServingReplica":
        """Warm shards up and start an engine over them.

        Raises:
            StartupError: settings, model and memory do not fit together.
            ShardFailed: they are lost already.
        """
        try:
            return ServingReplica(self, await start(shards, settings, self.metrics, self.admission), shards)
        except BaseException:
            self.metrics.retire()
            raise

    def note_loss(self, since: float) -> None:
        """Note that a replica is lost that served here `since` an instant of the monotonic clock."""
        self.metrics.retire()
        is_steady = time.monotonic() - since >= STEADY_SECONDS
        self.pause_seconds = 0.0 if is_steady else next_pause(self.pause_seconds)


@dataclass(eq=False, slots=True)
class ServingReplica:
    """One replica of a fleet while it serves."""

    seat: ReplicaSlot
    engine: Engine
    shards: Shards
    since: float = field(default_factory=time.monotonic)
    watch: asyncio.Task[None] | None = None


def least_limits(limits: Seq[Limits]) -> Limits:
    """What every replica can keep to: a request may go to any."""
    return Limits(
        max_input_tokens=min(each.max_input_tokens for each in limits),
        max_total_tokens=min(each.max_total_tokens for each in limits),
        pool_tokens=min(each.pool_tokens for each in limits),
    )


def check_alike(addresses: Seq[str], infos: Seq[ShardInfo]) -> None:
    """Raise StartupError unless a request may go to any replica, and from one to another."""
    for name in _ALIKE:
        first = getattr(infos[0], name)
        for address, info in zip(addresses, infos, strict=True):
            other = getattr(info, name)
            if other != first:
                raise StartupError(
                    f"replicas must be alike: {name} is {_shown(first)} at {addresses[0]}, {_shown(other)} at {address}"
                )


def _shown(value: object) -> str:
    return ",".join(sorted(value)) or "none" if isinstance(value, frozenset) else str(value)
