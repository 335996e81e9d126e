"""The replica set: load balancing and failover over the replicas of one model. Event loop only.

A replica is lost when a rank of it does not answer any more, because it died or was asked to end. What waited
there waits elsewhere; what ran there is resumed elsewhere, behind the tokens its client has got: noise depends on seed
and position only, so the answer is the one it would have been. Where no replica is left, all of it waits in the holding
queue until one comes back, with what arrives meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from functools import partial
from itertools import count

from funitel.proto.errors import FunitelError, NotReady, ShardFailed, StartupError
from funitel.router.core.request import Adapter, Request, Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.engine.engine import Engine
from funitel.router.engine.paused import PausedRequests
from funitel.router.engine.request_table import RequestTable
from funitel.router.engine.snapshot import EngineView
from funitel.router.replica_set.failover import MAX_LOSSES, NO_REPLICA, NONE_LEFT
from funitel.router.replica_set.holding_queue import HoldingQueue
from funitel.router.replica_set.load_balancer import LoadBalancer
from funitel.router.replica_set.replays import KeptOutputs, Replays
from funitel.router.replica_set.slot import ReplicaSlot, ServingReplica, can_take_adapters, check_alike, smallest_limits
from funitel.router.replica_set.table import ReplicaAddress
from funitel.router.scheduler.admission import InFlight, Reservation, Reservations
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.capabilities import check_adapter, check_capabilities
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


class ReplicaSet(Replays):
    """`Inference` over the engines of the replicas of one model."""

    def __init__(
        self,
        members: Seq[ServingReplica],
        settings: RouterSettings,
        metrics: Metrics,
        outputs: KeptOutputs | None = None,
    ) -> None:
        """Let replicas serve; `outputs` by output key are those of an earlier router."""
        super().__init__(members, settings, metrics, outputs)
        self.limits = smallest_limits([member.engine.limits for member in members])
        self._first = members[0].slot.address
        self.takes_adapters = can_take_adapters(self._info)
        self._holding = HoldingQueue(metrics.child(), members[0].slot.admission)
        self._balancer = LoadBalancer([])
        self._reservations = Reservations()
        self.paused = PausedRequests(
            lambda: (holder.requests for holder in self._holders()), self._unpause, self._can_resume, metrics
        )
        self._new_ids = count(max(next(member.engine.new_ids) for member in members))  # of sequences, on any replica
        self._loaded: set[str] = set()  # ids of adapters that `load_adapter` has loaded and none has retired
        self._pinned: dict[str, Adapter] = {}  # by id
        metrics.set_limits(self.limits)
        for member in members:
            self._enter(member)

    @property
    def compute_type(self) -> str:
        """Shards of all replicas and device, such as "4-cpu"."""
        return f"{sum(slot.num_ranks for slot in self._slots.values())}-{self._info.device_type}"

    @property
    def layer_parts(self) -> str | None:
        """See Inference."""
        return self._info.layer_parts

    @property
    def views(self) -> dict[int, EngineView]:
        """What the state of each replica that serves or drains is read from, by its id."""
        members = (*self._serving, *self._leaving)
        return {member.slot.replica_id: view for member in members for view in member.engine.views.values()}

    def submit(self, request: Request) -> TokenStream:
        """Queue a request with the replica that suits it best; siblings, submitted in a row, stay together.

        Raises:
            InvalidRequest: the shards would ignore a part of it.
            Overloaded: there is no place for it, or it would wait longer than its deadline.
            DeadlineExceeded: its deadline has passed.
            NotReady: the router is draining, or the last replica was taken away.
            ShardFailed: every replica is lost, for good or for too long.
        """
        check_capabilities(request.sampling, self._info.capabilities)
        check_adapter(request.adapter, takes_adapters=self.takes_adapters)
        self._check_open()
        if request.is_replayed:
            return self._submit_replayed(request, self._sequence_of(request))
        sequence = self._sequence_of(request)
        if not self._serving:
            return self._holding.requests.admit(sequence, self._in_flight(request.key))
        sibling = self._replica_of_sibling(request)
        member = sibling or self._choose(sequence)
        self._newest = request, member
        stream = member.engine.requests.admit(sequence, self._in_flight(request.key))
        if sibling is None and self._balancer.is_weighted:
            self._balancer.count(self._serving.index(member))
        return stream

    def _adopt_replayed(self, sequence: Sequence, stream: TokenStream) -> None:
        """As `_adopt`; siblings stay together."""
        sibling = self._replica_of_sibling(sequence.request)
        if sibling is not None:
            sibling.engine.requests.adopt(sequence, stream)
            return
        member = self._adopt(sequence, stream)
        if member is not None:
            self._newest = sequence.request, member

    def check_room(self, incoming: Request) -> None:
        """Ask admission about a request before its prompt is known; raises as `submit`, except InvalidRequest."""
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
        return (self._choose(sequence).engine if self._serving else self._holding).requests

    def _adopt(self, sequence: Sequence, stream: TokenStream) -> ServingReplica | None:
        """Let a sequence that was elsewhere go on with the replica that suits it best, which is returned.

        Where none serves it waits for one.
        """
        if not self._serving:
            self._holding.requests.adopt(sequence, stream)
            return None
        member = self._choose(sequence)
        if self._balancer.is_weighted:
            self._balancer.count(self._serving.index(member))
        member.engine.requests.adopt(sequence, stream)
        return member

    def _sequence_of(self, request: Request) -> Sequence:
        """The sequence of a request that comes now."""
        num_opening = self._info.num_opening_tokens
        known = list(request.output_ids)
        return Sequence(next(self._new_ids), request, known, num_opening=num_opening, arrived=time.monotonic())

    def _in_flight(self, key: bytes) -> InFlight:
        """Count requests of all replicas and reservations: all, and those of a key."""
        found = self._reservations.in_flight(key)
        for holder in self._holders():
            if holder.requests:
                found += holder.requests.in_flight(key)
        return found + self.paused.in_flight(key) if self.paused.held else found

    def _can_resume(self) -> bool:
        return all(member.engine.can_resume for member in self._serving)

    def _unpause(self, sequence: Sequence, stream: TokenStream) -> None:
        """Let a paused sequence go on with the replica that suits it best, or wait for one."""
        if self._return_timeout.is_over or self._refuses:
            stream.deliver(NotReady(NONE_LEFT) if self._refuses else ShardFailed(NO_REPLICA))
            return
        sequence.id = next(self._new_ids)
        self._resume(sequence, stream)

    def _replica_of_sibling(self, request: Request) -> ServingReplica | None:
        """Where the request before this one went, if it has the same prompt object: `n` and `best_of` make such."""
        if self._newest is None:
            return None
        newest, member = self._newest
        return member if newest.input_ids is request.input_ids and member in self._serving else None

    def _choose(self, sequence: Sequence) -> ServingReplica:
        if len(self._serving) == 1:
            return self._serving[0]
        loads = [member.engine.load_for(sequence) for member in self._serving]
        return self._serving[self._balancer.choose(loads)]

    def _on_change(self) -> None:
        self._balancer = LoadBalancer([member.slot.weight for member in self._serving])

    def _counts(self, member: ServingReplica) -> tuple[int, int]:
        return member.engine.num_waiting, member.engine.num_running

    async def load_adapter(self, adapter: Adapter, *, is_pinned: bool = False) -> None:
        """Load an adapter on every replica that serves, and a pinned one on those that come back.

        Raises:
            InvalidRequest: it cannot be served.
            FunitelError: loading it failed.
        """
        self._check_open()
        if not self._serving:
            raise ShardFailed(NO_REPLICA)
        loads = (member.engine.load_adapter(adapter, is_pinned=is_pinned) for member in self._serving)
        failures = [each for each in await asyncio.gather(*loads, return_exceptions=True) if each is not None]
        if failures:
            self._undo_load(adapter)
            raise failures[0]
        self._loaded.add(adapter.id)
        self._pinned.pop(adapter.id, None)
        if is_pinned:
            self._pinned[adapter.id] = adapter

    def _undo_load(self, adapter: Adapter) -> None:
        """Leave an adapter that could not be loaded everywhere as it was: unloaded, or pinned as before."""
        if adapter.id not in self._loaded:
            self.retire_adapter(adapter)
            return
        for member in self._serving:
            member.engine.pin_adapter(adapter, is_pinned=adapter.id in self._pinned)

    def retire_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter everywhere once no request uses it or waits for it."""
        self._loaded.discard(adapter.id)
        self._pinned.pop(adapter.id, None)
        for member in (*self._serving, *self._leaving):
            member.engine.retire_adapter(adapter)

    async def _load_pinned(self, engine: Engine) -> None:
        """Load the pinned adapters on a replica that has come back."""
        for adapter in tuple(self._pinned.values()):
            await engine.load_adapter(adapter, is_pinned=True)

    def fail_all(self, error: FunitelError) -> None:
        """End every request; clients get the error."""
        for holder in self._holders():
            holder.fail_all(error)
        self.paused.fail_all(error)

    async def close(self) -> None:
        """Refuse new requests, let running ones finish on any replica, then close the shards."""
        self._is_draining = True
        self.paused.close()
        while any(holder.requests for holder in self._holders()):
            await asyncio.gather(*(holder.requests.drained() for holder in self._holders()))
        await self._releases.close()
        await self._close_members()

    def _holders(self) -> list[HoldingQueue | Engine]:
        return [self._holding, *(member.engine for member in (*self._serving, *self._leaving))]

    # Leaving --------------------------------------------------------------------------------------------------------

    def _on_drain(self, member: ServingReplica) -> str:
        """Move what waits at a replica that drains, oldest first; where nothing can take it, it ends there."""
        waiting = [] if self._refuses else member.engine.evacuate_waiting()
        if not self._serving:
            self._hold(member)
        for sequence, stream in waiting:
            self._adopt(sequence, stream)
        if self._serving:
            self._metrics.count_moved(len(waiting))
        num_moved, num_held = (len(waiting), 0) if self._serving else (0, len(waiting))
        return f"requests moved={num_moved} waiting={num_held} running={len(member.engine.requests)}"

    async def _drained(self, member: ServingReplica) -> None:
        await member.engine.requests.drained()

    def _hold(self, last: ServingReplica) -> None:
        """Begin to hold requests, by the bounds and estimates of the replica that served last."""
        if not self._holding.requests:
            self._holding = HoldingQueue(self._metrics.child(), last.slot.admission)

    # Losses ---------------------------------------------------------------------------------------------------------

    def _on_loss(self, member: ServingReplica, error: FunitelError) -> str:
        """Move the requests of a lost replica to the others, oldest first, or let them wait for one to come back."""
        evacuated = member.engine.evacuate()
        if not self._serving:
            self._hold(member)
        num_kept = sum(self._move(sequence, stream, member, error) for sequence, stream in evacuated)
        num_moved, num_waiting = (num_kept, 0) if self._serving else (0, num_kept)
        return f"requests moved={num_moved} waiting={num_waiting} failed={len(evacuated) - num_kept}"

    def _move(self, sequence: Sequence, stream: TokenStream, lost: ServingReplica, error: FunitelError) -> bool:
        """Let a sequence go on with another replica, or wait for one; one that cannot gets the error."""
        can_go_on = not sequence.output_ids or lost.engine.can_resume
        if self._refuses:
            stream.deliver(NotReady(NONE_LEFT))
            return False
        if self._return_timeout.is_over or sequence.num_losses >= MAX_LOSSES or not can_go_on:
            stream.deliver(error)
            return False
        self._adopt(sequence, stream)
        if self._serving:
            self._metrics.count_moved()
        return True

    # Joining and returns --------------------------------------------------------------------------------------------

    async def _join(self, place: ReplicaAddress, shards: Shards) -> ServingReplica:
        """Start an engine over the shards of a new replica.

        Raises:
            StartupError: they differ from those of other replicas, or take shorter requests.
            ShardFailed: they are lost already.
        """
        slot = ReplicaSlot.of(place, shards, self._settings, self._metrics)
        with ExitStack() as undo:
            undo.callback(slot.metrics.remove)
            member = await self._start(slot, shards)
            undo.pop_all()
        self.limits = smallest_limits([self.limits, member.engine.limits])
        return member

    async def _rejoin(self, lost: ServingReplica, shards: Shards) -> ServingReplica:
        """Start an engine over shards that answer again.

        Raises:
            StartupError: they are not as they were.
            ShardFailed: they are lost already.
        """
        return await self._start(lost.slot, shards)

    async def _start(self, slot: ReplicaSlot, shards: Shards) -> ServingReplica:
        check_alike([self._first, slot.address], [self._info, shards.infos[-1]])
        member = await slot.start(shards, self._settings)
        limits, least = self.limits, smallest_limits([self.limits, member.engine.limits])
        if (least.max_input_tokens, least.max_total_tokens) == (limits.max_input_tokens, limits.max_total_tokens):
            return member
        words = f"a request may have {least.max_total_tokens} tokens there, elsewhere {limits.max_total_tokens}"
        if self._serving:
            slot.metrics.retire()
            await member.engine.close()
            raise StartupError(words)
        logger.warning("replica %d is smaller: %s", slot.replica_id, words)  # which is better than none
        self.limits = least
        return member

    def _on_join(self, member: ServingReplica) -> str:
        """Let the requests of the holding queue go on."""
        member.engine.on_loss(partial(self._lose, member))
        member.engine.new_ids = self._new_ids
        self._tasks.start(self._load_pinned(member.engine))
        self._releases.add()
        waiting = self._holding.evacuate()
        num_resumed = sum(self._resume(sequence, stream) for sequence, stream in waiting)
        return f"requests resumed={num_resumed} failed={len(waiting) - num_resumed}"

    def _resume(self, sequence: Sequence, stream: TokenStream) -> bool:
        """Let a sequence go on with a replica that has come, if it is large enough."""
        allowed = self.limits.max_total_tokens
        length = sequence.num_prompt + sequence.request.stopping.max_new_tokens
        if length > allowed:
            stream.deliver(
                ShardFailed(f"the replica came back smaller: it may have {allowed} tokens, it wants {length}")
            )
            return False
        self._adopt(sequence, stream)
        return True
