"""The slots of a replica set: one replica serves in a slot, is lost, and another takes its place."""

from collections.abc import Awaitable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, replace

from funitel.proto.errors import StartupError
from funitel.proto.step import Capability, MediaFacts, ShardInfo
from funitel.router.core.request import Limits
from funitel.router.engine.engine import Engine
from funitel.router.engine.warmup import admission_of, start
from funitel.router.replica_set.table import Member, ReplicaAddress, Slot
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
    "max_lora_rank",
    "speculate",
    "eos_token_ids",
    "media",
)


@dataclass(eq=False, slots=True, kw_only=True)
class ReplicaSlot(Slot):
    """What stays of a replica when it is lost: its metrics, and what admission has learnt there."""

    admission: Admission

    @classmethod
    def of(cls, place: ReplicaAddress, shards: Shards, settings: RouterSettings, metrics: Metrics) -> "ReplicaSlot":
        """Make a slot in which no replica serves yet.

        Args:
            place: id, address and weight.
            shards: what answers there.
            settings: the router's.
            metrics: those of the model.
        """
        num_ranks = len(shards.infos)
        return cls(
            replica_id=place.replica_id,
            address=place.address,
            weight=place.weight,
            num_ranks=num_ranks,
            metrics=metrics.child(place.replica_id, num_ranks),
            admission=admission_of(settings),
        )

    async def start(self, shards: Shards, settings: RouterSettings, *, takes_over: bool = False) -> "ServingReplica":
        """Warm shards up and start an engine over them; `takes_over`: they may hold rows of an earlier router.

        Raises:
            StartupError: settings, model and memory do not fit together.
            ShardFailed: they are lost already.
        """
        with ExitStack() as undo:
            undo.callback(self.metrics.retire)
            left = shards if takes_over else None
            engine = await start(shards, settings, self.metrics, self.admission, media_ranks=shards, left_ranks=left)
            undo.pop_all()
        return ServingReplica(slot=self, shards=shards, engine=engine)


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
        block_size=limits[0].block_size,
        max_beams=min(each.max_beams for each in limits),
        eos_token_ids=limits[0].eos_token_ids,
        media=_smallest_cache([each.media for each in limits]),
        max_span_tokens=min(each.max_span_tokens for each in limits),
    )


def _smallest_cache(facts: Seq[MediaFacts | None]) -> MediaFacts | None:
    """The facts of media, which are alike, with the bytes that every replica keeps; None where one takes text only."""
    known = [each for each in facts if each is not None]
    if len(known) < len(facts):
        return None
    return replace(known[0], cache_bytes=min(each.cache_bytes for each in known))


def _fact(info: ShardInfo, name: str) -> object:
    """What replicas have alike of a fact: of media all but the size of the cache."""
    value = getattr(info, name)
    return replace(value, cache_bytes=0) if isinstance(value, MediaFacts) else value


def can_take_adapters(info: ShardInfo) -> bool:
    """Whether shards can load adapters."""
    return bool(info.max_lora_rank) and Capability.ADAPTERS in info.capabilities


def check_alike(addresses: Seq[str], infos: Seq[ShardInfo]) -> None:
    """Raise StartupError unless a request may go to any replica, and from one to another."""
    for name in _ALIKE:
        first = _fact(infos[0], name)
        for address, info in zip(addresses, infos, strict=True):
            other = _fact(info, name)
            if other != first:
                raise StartupError(
                    f"replicas must be alike: {name} is {_shown(first)} at {addresses[0]}, {_shown(other)} at {address}"
                )


def _shown(value: object) -> str:
    return ",".join(sorted(map(str, value))) or "none" if isinstance(value, frozenset) else str(value)
