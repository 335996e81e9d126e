"""The slots of a replica set: one replica serves in a slot, is lost, and another takes its place."""

from collections.abc import Awaitable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass

from funitel.proto.errors import StartupError
from funitel.proto.step import ShardInfo
from funitel.router.core.request import Limits
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import admission_of, start
from funitel.router.replica_set.membership import Member, Slot
from funitel.router.scheduler.admission import Admission
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

# Facts that replicas share: what a request has begun on one it may end on another.
_ALIKE = (
    "dtype",
    "block_size",
    "support_chunking",
    "use_prefix_caching",
    "capabilities",
    "vocab_size",
    "num_opening_tokens",
    "speculate",
)


@dataclass(eq=False, slots=True, kw_only=True)
class ReplicaSlot(Slot):
    """What stays of a replica when it is lost: its metrics, and what admission has learnt there."""

    metrics: Metrics
    admission: Admission

    @classmethod
    def of(cls, index: int, metrics: Metrics, settings: RouterSettings) -> "ReplicaSlot":
        """Make a slot in which no replica serves yet."""
        return cls(index=index, metrics=metrics, admission=admission_of(settings))

    async def start(self, shards: Shards, settings: RouterSettings) -> "ServingReplica":
        """Warm shards up and start an engine over them.

        Raises:
            StartupError: settings, model and memory do not fit together.
            ShardFailed: they are lost already.
        """
        with ExitStack() as undo:
            undo.callback(self.metrics.retire)
            engine = await start(shards, settings, self.metrics, self.admission)
            undo.pop_all()
        return ServingReplica(slot=self, shards=shards, engine=engine)

    def note_loss(self, since: float) -> None:
        """Note that a replica is lost that served here `since` an instant of the monotonic clock."""
        self.metrics.retire()
        Slot.note_loss(self, since)


@dataclass(eq=False, slots=True, kw_only=True)
class ServingReplica(Member):
    """One replica of a replica set while it serves."""

    slot: ReplicaSlot
    engine: Engine

    def health(self) -> Awaitable[object]:
        """Raise a FunitelError unless every shard answers and the engine runs."""
        return self.engine.health()

    async def close(self) -> None:
        """Close the engine and its shards."""
        await self.engine.close()


def smallest_limits(limits: Seq[Limits]) -> Limits:
    """Return the limits that every replica can keep: a request may go to any."""
    return Limits(
        max_input_tokens=min(each.max_input_tokens for each in limits),
        max_total_tokens=min(each.max_total_tokens for each in limits),
        pool_tokens=min(each.pool_tokens for each in limits),
        max_speculate=min(each.max_speculate for each in limits),
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
