"""Several replicas as one: a request goes to the one that suits it best, and on to another when that one is lost.

A replica is lost when a rank of it does not answer any more, because it died or because it was told to end. What waited
there waits elsewhere; what ran there is resumed elsewhere, behind the tokens its client has got: noise depends on seed
and position only, so the answer is the one it would have been. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from funitel.proto.errors import FunitelError, NotReady, ShardFailed, StartupError
from funitel.proto.step import ShardInfo
from funitel.router import encoder_engine
from funitel.router.admission import InFlight
from funitel.router.encoder_engine import EncoderEngine
from funitel.router.engine import Engine
from funitel.router.metrics import Metrics
from funitel.router.peer import check_capabilities
from funitel.router.placement import place
from funitel.router.replica_metrics import ReplicaMetrics
from funitel.router.sequence import Limits, Request, Sequence
from funitel.router.service import Inference
from funitel.router.settings import RouterSettings
from funitel.router.shards import Shards
from funitel.router.stream import TokenStream
from funitel.router.warmup import start

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 0.5  # between two looks at a replica whose connection ended and that answers all the same
# A sequence that ran on so many replicas as they were lost may be what ends them: it gets the error.
MOST_LOSSES = 3


@dataclass(eq=False, slots=True)
class Member:
    """One replica of a fleet."""

    index: int
    engine: Engine
    shards: Shards
    metrics: ReplicaMetrics


class Fleet:
    """`Inference` over the engines of several replicas of one model."""

    def __init__(self, members: Seq[Member], metrics: Metrics) -> None:
        self._members = tuple(members)
        self._serving = list(members)
        self._metrics = metrics
        self._next_id = 0
        self._newest: tuple[Request, Member] | None = None
        self._is_draining = False
        self._probes: set[asyncio.Task[None]] = set()
        self.limits = _least([member.engine.limits for member in members])
        metrics.set_limits(self.limits)
        self._report()
        for member in members:
            member.engine.tell_of_loss(partial(self._lose, member))
        self._watches = [asyncio.create_task(self._watch(member)) for member in members]

    @property
    def compute_type(self) -> str:
        """Shards of all replicas and device, such as "4-cpu"."""
        infos = [info for member in self._members for info in member.shards.infos]
        return f"{len(infos)}-{infos[0].device_type}"

    def submit(self, request: Request) -> TokenStream:
        """Queue a request with the replica that suits it best; siblings, submitted in a row, stay together.

        Raises:
            InvalidRequest: the shards would ignore a part of it.
            Overloaded: there is no place for it, or it would wait longer than its deadline.
            DeadlineExceeded: its deadline has passed.
            NotReady: the router is draining.
            ShardFailed: every replica is lost.
        """
        check_capabilities(request.sampling, self._members[0].shards.infos[0].capabilities)
        self._check_open()
        sequence = self._sequence_of(request)
        self._next_id += 1
        member = self._home_of_sibling(request) or self._choose(sequence)
        self._newest = request, member
        return member.engine.accept(sequence, self._in_flight(request.key))

    def check_room(self, newcomer: Request, entering: InFlight) -> None:
        """Find out whether a request would be queued, behind so many that are about to be submitted.

        Raises: as `submit`, save for InvalidRequest.
        """
        self._check_open()
        sequence = self._sequence_of(newcomer)
        self._choose(sequence).engine.check_place(sequence, self._in_flight(newcomer.key) + entering)

    def _check_open(self) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if not self._serving:
            raise ShardFailed("every replica is lost")

    def _sequence_of(self, request: Request) -> Sequence:
        """The sequence of a request that comes now."""
        num_opening = self._members[0].shards.infos[0].num_opening_tokens
        return Sequence(self._next_id, request, num_opening=num_opening, arrived=time.monotonic())

    def _in_flight(self, key: bytes) -> InFlight:
        """Requests of all replicas that have not ended, and those of a key."""
        return sum((member.engine.in_flight(key) for member in self._serving), start=InFlight(0, 0))

    def _home_of_sibling(self, request: Request) -> Member | None:
        """Where the request before this one went, if it has the same prompt object: `n` and `best_of` make such."""
        if self._newest is None:
            return None
        newest, member = self._newest
        return member if newest.input_ids is request.input_ids and member in self._serving else None

    def _choose(self, sequence: Sequence) -> Member:
        return self._serving[place([member.engine.standing(sequence) for member in self._serving])]

    async def health(self) -> None:
        """Return once one replica answers; raise a FunitelError when none does."""
        failure: FunitelError = ShardFailed("every replica is lost")
        pending = {asyncio.create_task(member.engine.health()) for member in self._serving}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    self._leave_behind(pending)
                    return
                if not isinstance(error, FunitelError):
                    raise error
                failure = error
        raise failure

    def _leave_behind(self, probes: set[asyncio.Task[None]]) -> None:
        """Let probes that nobody waits for any more end by themselves."""
        for probe in probes:
            self._probes.add(probe)
            probe.add_done_callback(self._forget_probe)

    def _forget_probe(self, probe: asyncio.Task[None]) -> None:
        self._probes.discard(probe)
        if not probe.cancelled():
            probe.exception()  # retrieved, or asyncio would log it

    async def close(self) -> None:
        """Refuse new requests, let running ones finish, wherever, then let go of the shards."""
        self._is_draining = True
        while any(member.engine.num_requests for member in self._serving):
            await asyncio.gather(*(member.engine.drained() for member in self._serving))
        for task in (*self._watches, *self._probes):
            task.cancel()
        await asyncio.gather(*self._watches, *self._probes, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    # Losses ---------------------------------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        """Notice the end of a replica at once, idle or not."""
        while member in self._serving:
            await member.shards.disconnected()
            try:
                await member.engine.health()
            except FunitelError as error:
                self._lose(member, error)
            else:
                await asyncio.sleep(RECHECK_SECONDS)

    def _lose(self, member: Member, error: FunitelError) -> None:
        """Go on without a replica: what it had is moved to the others, oldest first, or fails with the last."""
        if member not in self._serving:
            return
        self._serving.remove(member)
        handed_over = member.engine.give_up()
        member.metrics.retire()
        num_moved = sum(self._move(sequence, stream, error) for sequence, stream in handed_over)
        self._report()
        logger.error(
            "replica %d is lost: %s; requests moved=%d failed=%d, %d of %d replicas serve",
            member.index,
            error.message,
            num_moved,
            len(handed_over) - num_moved,
            len(self._serving),
            len(self._members),
        )

    def _move(self, sequence: Sequence, stream: TokenStream, error: FunitelError) -> bool:
        """Let a sequence go on with another replica; one that cannot gets the error."""
        if not self._serving or sequence.num_losses >= MOST_LOSSES:
            stream.deliver(error)
            return False
        target = self._choose(sequence)
        if sequence.output_ids and not target.engine.can_resume:
            stream.deliver(error)
            return False
        target.engine.take_over(sequence, stream)
        self._metrics.count_moved()
        return True

    def _report(self) -> None:
        self._metrics.set_replicas(len(self._serving), len(self._members) - len(self._serving))


def _least(limits: Seq[Limits]) -> Limits:
    """What every replica can keep to: a request may go to any."""
    return Limits(
        max_input_tokens=min(each.max_input_tokens for each in limits),
        max_total_tokens=min(each.max_total_tokens for each in limits),
        pool_tokens=min(each.pool_tokens for each in limits),
    )


async def connect(settings: RouterSettings, metrics: Metrics) -> Inference | EncoderEngine:
    """Connect to the shards of every replica, warm them up and start an engine for each; one for all of an encoder.

    Raises:
        StartupError: a shard does not answer, replicas differ, or settings, model and memory do not fit together.
    """
    addresses = (settings.master_url, *settings.replica_address)
    patience = settings.shard_connect_timeout
    found = await asyncio.gather(*(Shards.connect(address, patience) for address in addresses))
    if any(info.encoder is not None for shards in found for info in shards.infos):
        return encoder_engine.start(found, settings, metrics)
    if len(found) == 1:
        return await start(found[0], settings, metrics)
    _check_alike(addresses, [shards.infos[-1] for shards in found])
    first_ranks = [sum(len(shards.infos) for shards in found[:index]) for index in range(len(found))]
    views = [ReplicaMetrics(metrics, first_rank) for first_rank in first_ranks]
    engines = await asyncio.gather(*(start(shards, settings, view) for shards, view in zip(found, views, strict=True)))
    members = [
        Member(index, engine, shards, view)
        for index, (engine, shards, view) in enumerate(zip(engines, found, views, strict=True))
    ]
    return Fleet(members, metrics)


def _check_alike(addresses: Seq[str], infos: Seq[ShardInfo]) -> None:
    """Raise StartupError unless a request may go to any replica, and from one to another."""
    for name in ("dtype", "block_size", "support_chunking", "use_prefix_caching", "capabilities"):
        first = getattr(infos[0], name)
        for address, info in zip(addresses, infos, strict=True):
            other = getattr(info, name)
            if other != first:
                raise StartupError(
                    f"replicas must be alike: {name} is {_shown(first)} at {addresses[0]}, {_shown(other)} at {address}"
                )


def _shown(value: object) -> str:
    return ",".join(sorted(value)) or "none" if isinstance(value, frozenset) else str(value)
