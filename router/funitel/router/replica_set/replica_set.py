"""The replicas of a model as one: a request goes to the one that suits it best, and on to another when that is lost.

A replica is lost when a rank of it does not answer any more, because it died or because it was told to end. What waited
there waits elsewhere; what ran there is resumed elsewhere, behind the tokens its client has got: noise depends on seed
and position only, so the answer is the one it would have been. Where no replica is left, all of it waits in the lobby
until one comes back, with whatever arrives meanwhile. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Sequence as Seq
from functools import partial

from funitel.proto.errors import FunitelError, NotReady, ShardFailed, StartupError
from funitel.router.core.background_tasks import Tasks
from funitel.router.core.request import Request, Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.encoder import engine
from funitel.router.encoder.engine import EncoderEngine
from funitel.router.engine.engine import Engine
from funitel.router.engine.request_table import RequestTable
from funitel.router.engine.snapshot import EngineView
from funitel.router.replica_set.failover import MOST_LOSSES, NO_REPLICA, ReturnTimeout, comeback
from funitel.router.replica_set.holding_queue import HoldingQueue
from funitel.router.replica_set.load_balancer import choose_replica
from funitel.router.replica_set.slot import ReplicaSlot, ServingReplica, check_alike, least_limits
from funitel.router.scheduler.admission import InFlight, Reservation, Reservations
from funitel.router.serving.service import Inference
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.capabilities import check_capabilities
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics
from funitel.router.telemetry.replica_metrics import ReplicaMetrics

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 0.5  # between two looks at a replica whose connection ended and that answers all the same


class ReplicaSet:
    """`Inference` over the engines of the replicas of one model."""

    def __init__(self, members: Seq[ServingReplica], settings: RouterSettings, metrics: Metrics) -> None:
        self.limits = least_limits([member.engine.limits for member in members])
        self._infos = tuple(info for member in members for info in member.shards.infos)
        self._settings = settings
        self._metrics = metrics
        self._num_replicas = len(members)
        self._serving: list[ServingReplica] = []
        self._lobby = HoldingQueue(ReplicaMetrics(metrics, 0), members[0].seat.admission)
        self._patience = ReturnTimeout(settings.shard_return_timeout, self._fail_lobby)
        self._reservations = Reservations()
        self._next_id = 0
        self._newest: tuple[Request, ServingReplica] | None = None
        self._is_draining = False
        self._tasks = Tasks()
        self._farewells = Tasks()
        metrics.set_limits(self.limits)
        for member in members:
            self._welcome(member)

    @property
    def compute_type(self) -> str:
        """Shards of all replicas and device, such as "4-cpu"."""
        return f"{len(self._infos)}-{self._infos[0].device_type}"

    @property
    def views(self) -> dict[int, EngineView]:
        """What the state of each replica that serves is read from, by its index."""
        return {member.seat.index: view for member in self._serving for view in member.engine.views.values()}

    def submit(self, request: Request) -> TokenStream:
        """Queue a request with the replica that suits it best; siblings, submitted in a row, stay together.

        Raises:
            InvalidRequest: the shards would ignore a part of it.
            Overloaded: there is no place for it, or it would wait longer than its deadline.
            DeadlineExceeded: its deadline has passed.
            NotReady: the router is draining.
            ShardFailed: every replica is lost, for good or for too long.
        """
        check_capabilities(request.sampling, self._infos[0].capabilities)
        self._check_open()
        sequence = self._sequence_of(request)
        self._next_id += 1
        if not self._serving:
            return self._lobby.requests.admit(sequence, self._in_flight(request.key))
        member = self._home_of_sibling(request) or self._choose(sequence)
        self._newest = request, member
        return member.engine.requests.admit(sequence, self._in_flight(request.key))

    def check_room(self, incoming: Request) -> None:
        """Ask admission about a request whose prompt is not known yet; raises as `submit`, except InvalidRequest."""
        self._check_open()
        sequence = self._sequence_of(incoming)
        self._table_for(sequence).check(sequence, self._in_flight(incoming.key))

    def reserve(self, incoming: Request) -> Reservation:
        """Hold a place for a request until it is submitted; raises as `check_room`, for want of places only."""
        self._check_open()
        sequence = self._sequence_of(incoming)
        self._table_for(sequence).check_count(sequence, self._in_flight(incoming.key))
        return self._reservations.hold(incoming.key)

    def _table_for(self, sequence: Sequence) -> RequestTable:
        return (self._choose(sequence).engine if self._serving else self._lobby).requests

    def _check_open(self) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._patience.is_over:
            raise ShardFailed(NO_REPLICA)

    def _sequence_of(self, request: Request) -> Sequence:
        """The sequence of a request that comes now."""
        num_opening = self._infos[0].num_opening_tokens
        return Sequence(self._next_id, request, num_opening=num_opening, arrived=time.monotonic())

    def _in_flight(self, key: bytes) -> InFlight:
        """Count requests of all replicas and reservations: all, and those of a key."""
        tables = (holder.requests.in_flight(key) for holder in self._holders())
        return sum(tables, start=self._reservations.in_flight(key))

    def _home_of_sibling(self, request: Request) -> ServingReplica | None:
        """Where the request before this one went, if it has the same prompt object: `n` and `best_of` make such."""
        if self._newest is None:
            return None
        newest, member = self._newest
        return member if newest.input_ids is request.input_ids and member in self._serving else None

    def _choose(self, sequence: Sequence) -> ServingReplica:
        if len(self._serving) == 1:
            return self._serving[0]
        return self._serving[choose_replica([member.engine.standing(sequence) for member in self._serving])]

    async def health(self) -> None:
        """Return once one replica answers; raise a FunitelError when none does."""
        failure: FunitelError = ShardFailed(NO_REPLICA)
        pending = {self._tasks.start(member.engine.health()) for member in self._serving}
        while pending:  # probes that nobody waits for any more end by themselves
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return
                if not isinstance(error, FunitelError):
                    raise error
                failure = error
        raise failure

    def fail_all(self, error: FunitelError) -> None:
        """End whatever runs or waits; clients get the error."""
        for holder in self._holders():
            holder.fail_all(error)

    async def close(self) -> None:
        """Refuse new requests, let running ones finish, wherever, then let go of the shards."""
        self._is_draining = True
        while any(holder.requests for holder in self._holders()):
            await asyncio.gather(*(holder.requests.drained() for holder in self._holders()))
        serving, self._serving = self._serving, []  # none is lost from now on
        self._patience.renew()
        await self._tasks.cancel()
        await asyncio.gather(*(member.engine.close() for member in serving), self._farewells.ended())

    def _holders(self) -> list[HoldingQueue | Engine]:
        return [self._lobby, *(member.engine for member in self._serving)]

    # Losses ---------------------------------------------------------------------------------------------------------

    async def _watch(self, member: ServingReplica) -> None:
        """Notice the end of a replica at once, idle or not."""
        while member in self._serving:
            await member.shards.disconnected()
            try:
                await member.engine.health()
            except FunitelError as error:
                self._lose(member, error)
            else:
                await asyncio.sleep(RECHECK_SECONDS)

    def _lose(self, member: ServingReplica, error: FunitelError) -> None:
        """Go on without a replica: what it had is moved to the others, oldest first, or waits for one to come back."""
        if member not in self._serving:
            return
        self._serving.remove(member)
        member.shards.fence()
        handed_over = member.engine.evacuate()
        member.seat.note_loss(member.since)
        if not self._serving:
            self._lobby = HoldingQueue(ReplicaMetrics(self._metrics, 0), member.seat.admission)
            self._patience.begin()
        num_kept = sum(self._move(sequence, stream, member, error) for sequence, stream in handed_over)
        self._report()
        logger.error(
            "replica %d is lost: %s; requests moved=%d waiting=%d failed=%d, %d of %d replicas serve",
            member.seat.index,
            error.message,
            num_kept if self._serving else 0,
            0 if self._serving else num_kept,
            len(handed_over) - num_kept,
            len(self._serving),
            self._num_replicas,
        )
        if member.watch is not None:
            member.watch.cancel()
        self._farewells.start(member.engine.close())
        if self._settings.shard_return_timeout:
            self._tasks.start(self._come_back(member.seat))

    def _move(self, sequence: Sequence, stream: TokenStream, lost: ServingReplica, error: FunitelError) -> bool:
        """Let a sequence go on with another replica, or wait for one; one that cannot gets the error."""
        can_go_on = not sequence.output_ids or lost.engine.can_resume
        if self._patience.is_over or sequence.num_losses >= MOST_LOSSES or not can_go_on:
            stream.deliver(error)
            return False
        if self._serving:
            self._choose(sequence).engine.requests.adopt(sequence, stream)
            self._metrics.count_moved()
        else:
            self._lobby.requests.adopt(sequence, stream)
        return True

    def _fail_lobby(self, error: FunitelError) -> None:
        self._lobby.fail_all(error)

    # Returns --------------------------------------------------------------------------------------------------------

    async def _come_back(self, seat: ReplicaSlot) -> None:
        """Have a seat taken again as soon as shards answer there: who waits in the lobby goes on."""
        began = time.monotonic()
        member = await comeback(seat.address, self._settings.shard_tls, partial(self._let_in, seat), seat.pause_seconds)
        waiting = self._lobby.evacuate()
        self._patience.renew()
        self._welcome(member)
        self._metrics.count_return()
        num_resumed = sum(self._resume(sequence, stream) for sequence, stream in waiting)
        logger.warning(
            "replica %d serves again after %.1f s; requests resumed=%d failed=%d, %d of %d replicas serve",
            seat.index,
            time.monotonic() - began,
            num_resumed,
            len(waiting) - num_resumed,
            len(self._serving),
            self._num_replicas,
        )

    async def _let_in(self, seat: ReplicaSlot, shards: Shards) -> ServingReplica:
        """Start an engine over shards that answer again.

        Raises:
            StartupError: they are not as they were.
            ShardFailed: they are lost already.
        """
        check_alike([self._settings.master_url, seat.address], [self._infos[0], shards.infos[-1]])
        member = await seat.take(shards, self._settings)
        limits, least = self.limits, least_limits([self.limits, member.engine.limits])
        if (least.max_input_tokens, least.max_total_tokens) == (limits.max_input_tokens, limits.max_total_tokens):
            return member
        words = f"a request may have {least.max_total_tokens} tokens there, elsewhere {limits.max_total_tokens}"
        if self._serving:
            seat.metrics.retire()
            await member.engine.close()
            raise StartupError(words)
        logger.warning("replica %d came back smaller: %s", seat.index, words)  # which is better than none
        self.limits = least
        return member

    def _resume(self, sequence: Sequence, stream: TokenStream) -> bool:
        """Let a sequence go on with a replica that has come back, if it is large enough."""
        most = self.limits.max_total_tokens
        length = sequence.num_prompt + sequence.request.stopping.max_new_tokens
        if length > most:
            stream.deliver(ShardFailed(f"the replica came back smaller: it may have {most} tokens, it wants {length}"))
            return False
        self._choose(sequence).engine.requests.adopt(sequence, stream)
        return True

    def _welcome(self, member: ServingReplica) -> None:
        """Let a replica serve from now on."""
        self._serving.append(member)
        self._serving.sort(key=lambda each: each.seat.index)
        member.engine.tell_of_loss(partial(self._lose, member))
        member.watch = self._tasks.start(self._watch(member))
        self._report()

    def _report(self) -> None:
        self._metrics.set_replicas(len(self._serving), self._num_replicas - len(self._serving))


async def connect(settings: RouterSettings, metrics: Metrics) -> Inference | EncoderEngine:
    """Connect to the shards of every replica, warm them up and start an engine for each; one for all of an encoder.

    Raises:
        StartupError: a shard does not answer, replicas differ, or settings, model and memory do not fit together.
    """
    addresses = (settings.master_url, *settings.replica_address)
    patience = settings.shard_connect_timeout
    found = await asyncio.gather(*(Shards.connect(address, patience, settings.shard_tls) for address in addresses))
    if any(info.encoder is not None for shards in found for info in shards.infos):
        return engine.start(found, settings, metrics)
    check_alike(addresses, [shards.infos[-1] for shards in found])
    first_ranks = [sum(len(shards.infos) for shards in found[:index]) for index in range(len(found))]
    seats = [
        ReplicaSlot.of(index, address, ReplicaMetrics(metrics, first_rank), settings)
        for index, (address, first_rank) in enumerate(zip(addresses, first_ranks, strict=True))
    ]
    members = await asyncio.gather(*(seat.take(shards, settings) for seat, shards in zip(seats, found, strict=True)))
    return ReplicaSet(members, settings, metrics)
