"""The engine: requests over one replica, with admission, cancellation, draining and evacuation. Event loop only.

The steps themselves are made by a `StepLoop`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import count

from funitel.proto.errors import FunitelError, NotReady, ShardFailed, StepFailed
from funitel.proto.takeover.state import HeldBatch, HeldRow
from funitel.router.adapters.slots import AdapterSlots, User
from funitel.router.core.request import Adapter, Limits, Request, Sequence, is_background
from funitel.router.core.stream import TokenStream
from funitel.router.encoder_cache.cache import EncoderCache, MediaRanks
from funitel.router.engine.held_rows import HeldRows
from funitel.router.engine.interface import ReplicaLoad
from funitel.router.engine.paused import PausedRequests
from funitel.router.engine.request_table import RequestTable
from funitel.router.engine.snapshot import EngineView
from funitel.router.engine.step_loop import StepLoop
from funitel.router.scheduler.admission import Admission, InFlight
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.capabilities import check_adapter, check_capabilities, check_media
from funitel.router.shard_client.replica import Replica
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests over one replica. `submit` from the event loop only."""

    def __init__(
        self,
        replica: Replica,
        scheduler: Scheduler,
        limits: Limits,
        metrics: Metrics,
        admission: Admission,
        pipeline_steps: int = 1,
        decode_tokens: int = RouterSettings.otlp_decode_tokens,
        step_timeout_s: float = RouterSettings.step_timeout_s,
        max_loras: int = RouterSettings.max_loras,
        media_ranks: MediaRanks | None = None,
    ) -> None:
        self.limits = limits
        self._replica = replica
        self._scheduler = scheduler
        self._metrics = metrics
        self._adapters = AdapterSlots(replica.ranks, max_loras, metrics.adapters, self._rows_dropped, self._displace)
        self._media = None
        if media_ranks is not None and limits.media is not None:
            self._media = EncoderCache(media_ranks, limits.media, metrics.media, self._rows_dropped)
        self.requests = RequestTable(
            scheduler,
            metrics,
            admission,
            enqueue=self._take,
            wake=self._wake,
            release=self._release,
        )
        self.paused = PausedRequests(lambda: (self.requests,), self._resume, lambda: self.can_resume, metrics)
        # By id, while their grammar is compiled or they wait for their adapter or media.
        self._preparing: dict[int, tuple[Sequence, asyncio.Task[None]]] = {}
        self._steps = StepLoop(
            replica,
            scheduler,
            self.requests,
            metrics,
            admission.throughput,
            pipeline_steps,
            self._preparing.keys(),
            decode_tokens,
            step_timeout_s,
        )
        if self.takes_adapters:
            metrics.adapters.watch(self._adapters.use)
        view = EngineView(
            scheduler, self.requests.streams, admission, self._steps.past, len(replica.infos), self._adapters.use
        )
        self.views = {0: view}  # of the only replica
        self.new_ids = count()  # of sequences; those of several replicas share one
        self.held = HeldRows(scheduler.blocks)  # of an earlier router
        self._claimed: dict[int, HeldRow] = {}  # by id, until their sequences run
        self._is_draining = False

    @property
    def compute_type(self) -> str:
        """Shards and device, such as "2-cpu"."""
        return f"{len(self._replica.infos)}-{self._replica.info.device_type}"

    @property
    def layer_parts(self) -> str | None:
        """See Inference."""
        return self._replica.info.layer_parts

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters can be loaded."""
        return self._replica.takes_adapters

    async def load_adapter(self, adapter: Adapter, *, is_pinned: bool = False) -> None:
        """Load an adapter; a pinned one is never evicted.

        Raises:
            InvalidRequest: it cannot be served.
            FunitelError: loading it failed.
        """
        holder = object()
        await self._adapters.wait(holder, adapter)
        self._adapters.pin(adapter, is_pinned=is_pinned)
        self._adapters.release(holder)

    def pin_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        """Never evict an adapter that is loaded, or evict it as others from now on."""
        self._adapters.pin(adapter, is_pinned=is_pinned)

    def retire_adapter(self, adapter: Adapter) -> None:
        """Unload an adapter once no request uses it or waits for it."""
        self._adapters.retire(adapter)

    def submit(self, request: Request) -> TokenStream:
        """Queue a request.

        Raises:
            InvalidRequest: the shards would ignore a part of it.
            Overloaded: there is no place for it, or it would wait longer than its deadline.
            DeadlineExceeded: its deadline has passed.
            NotReady: the router is draining.
            ShardFailed: the engine has stopped.
        """
        check_capabilities(request.sampling, self._replica.capabilities)
        check_adapter(request.adapter, takes_adapters=self.takes_adapters)
        check_media(request.media, takes_media=self._media is not None)
        self._check_open()
        sequence = self._sequence_of(request)
        return self.requests.admit(sequence, self._in_flight(request.key))

    def _in_flight(self, key: bytes) -> InFlight:
        found = self.requests.in_flight(key)
        return found + self.paused.in_flight(key) if self.paused.held else found

    def _resume(self, sequence: Sequence, stream: TokenStream) -> None:
        """Let a paused sequence go on."""
        if self._steps.has_ended:
            stream.deliver(ShardFailed("the engine has stopped"))
            return
        sequence.id = next(self.new_ids)
        self.requests.adopt(sequence, stream)

    def _displace(self, user: User) -> None:
        """Let a sequence of a batch wait again for its adapter: the place went to another one.

        As one that was paused it goes on under a new id, behind the tokens it has.
        """
        stream = self.requests.streams.get(user) if isinstance(user, int) else None
        sequence = None if stream is None else self.requests.find(stream)
        if stream is None or sequence is None or self._steps.has_ended:
            return
        self.requests.withdraw(sequence)
        self._resume(sequence.afresh(), stream)

    def _check_open(self) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._steps.has_ended:
            raise ShardFailed("the engine has stopped")

    def _sequence_of(self, request: Request) -> Sequence:
        """The sequence of a request that comes now."""
        num_opening = self._replica.info.num_opening_tokens
        known = list(request.output_ids)
        return Sequence(next(self.new_ids), request, known, num_opening=num_opening, arrived=time.monotonic())

    def hold(self, last_step_seq: int, batches: Seq[HeldBatch]) -> None:
        """Hold the rows that the shards have of an earlier router, and make no step until `begin`.

        To be called before the event loop runs anything else.
        """
        rows = [row for batch in batches for row in batch.rows]
        self._replica.go_on(last_step_seq, batches)
        self.held = HeldRows(self._scheduler.blocks, rows)
        self.new_ids = count(max((row.request_id + 1 for row in rows), default=0))
        self._steps.is_held = bool(rows)

    def claim(self, sequence: Sequence) -> HeldRow | None:
        """Take the row that an earlier router has left of a sequence; None: its tokens are computed again.

        The row has its adapter from now on, which must be loaded; `go_on` comes next.
        """
        request = sequence.request

        def takes_adapter(row: HeldRow) -> bool:
            is_behind = is_background(request.key)
            return request.adapter is None or self._adapters.take(
                row.request_id, request.adapter, is_background=is_behind
            )

        return self.held.claim(sequence, takes_adapter)

    def go_on(self, sequence: Sequence, stream: TokenStream, row: HeldRow) -> None:
        """Let a sequence of an earlier router go on in its row, which it has claimed."""
        sequence.id = row.request_id
        self._claimed[row.request_id] = row
        self.requests.adopt(sequence, stream)

    def begin(self) -> None:
        """Make steps from now on; rows that no sequence has claimed are dropped first."""
        self.held.drop_all_but(())
        self._steps.is_held = False
        self._wake()

    def on_loss(self, on_lost: Callable[[FunitelError], None]) -> None:
        """Have `on_lost` called once the shards are gone; it must call `evacuate`."""
        self._steps.on_lost = on_lost

    def evacuate(self) -> list[tuple[Sequence, TokenStream]]:
        """Stop without asking the shards; hand over what has not ended, oldest first. `close` comes after."""
        self._steps.halt()
        self._halt_caches()
        for _, task in self._preparing.values():
            task.cancel()
        scheduler = self._scheduler
        for sequence in scheduler.running.values():
            sequence.note_loss()
        preparing = (sequence for sequence, _ in self._preparing.values())
        # A sequence that was queued just now may still be among those that prepare.
        here = {s.id: s for s in (*scheduler.running.values(), *scheduler.waiting, *preparing)}
        handed_over = []
        for _, sequence in sorted(here.items()):
            stream = self.requests.remove(sequence)
            if stream is not None:  # a client may have left while its request was prepared
                handed_over.append((sequence.afresh(), stream))
        return handed_over

    def evacuate_waiting(self) -> list[tuple[Sequence, TokenStream]]:
        """Hand over what does not run, oldest first; what cannot be resumed elsewhere stays."""
        scheduler = self._scheduler
        preparing = (sequence for sequence, _ in self._preparing.values())
        here = {s.id: s for s in (*scheduler.waiting, *preparing) if s.id not in scheduler.running}
        handed_over = []
        for sequence_id, sequence in sorted(here.items()):
            if sequence.output_ids and not self.can_resume:
                continue
            if sequence_id in self._preparing:
                self._preparing[sequence_id][1].cancel()
            scheduler.remove(sequence)
            stream = self.requests.remove(sequence)
            if stream is not None:
                handed_over.append((sequence.afresh(), stream))
        self._wake()
        return handed_over

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run."""
        return len(self.requests) - self.num_running

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._scheduler.running)

    @property
    def can_resume(self) -> bool:
        """Whether a sequence can be resumed behind the tokens it has got, here or elsewhere."""
        return self._scheduler.can_resume

    def load_for(self, sequence: Sequence) -> ReplicaLoad:
        """The load of this replica, and its cached prefix of a sequence that is not here."""
        adapter = sequence.request.adapter
        has_adapter = adapter is not None and self._adapters.has(adapter)
        return ReplicaLoad(self._scheduler.load_tokens, self._scheduler.cached_prefix_len(sequence), has_adapter)

    def _take(self, sequence: Sequence) -> None:
        row = self._claimed.pop(sequence.id, None) if self._claimed else None
        if row is not None:
            self._scheduler.go_on(sequence, row.blocks, row.num_computed)
            self._wake()
            return
        request = sequence.request
        is_behind = is_background(request.key)
        is_ready = request.adapter is None or self._adapters.take(sequence.id, request.adapter, is_background=is_behind)
        if is_ready and not request.sampling.grammar and self._has_media(sequence):
            self._queue(sequence)
            return
        task = asyncio.create_task(self._prepare_and_queue(sequence))
        self._preparing[sequence.id] = sequence, task
        task.add_done_callback(lambda _: self._preparing.pop(sequence.id))

    def _has_media(self, sequence: Sequence) -> bool:
        """Whether the shards have encoded the media of a sequence, which holds them from now on."""
        media = [each.input for each in sequence.request.media]
        return not media or self._media is None or self._media.take(sequence.id, media)

    def _queue(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._steps.note_queued()

    async def _prepare_and_queue(self, sequence: Sequence) -> None:
        """Queue a sequence once the shards have its grammar, adapter and media, unless the client has left by then.

        Media come last: what holds some waits for nothing else.
        """
        request = sequence.request
        sampling, adapter = request.sampling, request.adapter
        try:
            if sampling.grammar:
                await self._replica.compile_grammar(sampling.grammar_type, sampling.grammar)
            if adapter is not None and sequence in self.requests:
                await self._adapters.wait(sequence.id, adapter, is_background=is_background(request.key))
            if self._media is not None and request.media and sequence in self.requests:
                media = [each.input for each in request.media]
                await self._media.wait(sequence.id, media, request.key, is_background=is_background(request.key))
            if self._steps.has_ended:
                raise ShardFailed("the engine has stopped")
        except FunitelError as error:
            if not await self._steps.has_lost_shards(error, is_beside_steps=True):
                self.requests.fail(sequence, error)
            return
        except Exception as error:  # a stream must not hang
            logger.exception("preparing a request failed")
            self.requests.fail(sequence, StepFailed(f"{type(error).__name__}: {error}"))
            return
        if sequence in self.requests:
            self._queue(sequence)

    def _wake(self) -> None:
        self._steps.wake()

    async def _rows_dropped(self) -> None:
        await self._steps.rows_dropped()

    def _release(self, sequence_id: int) -> None:
        """Take adapter and media back from a sequence that has left."""
        self._adapters.release(sequence_id)
        if self._media is not None:
            self._media.release(sequence_id)

    def _halt_caches(self) -> None:
        self._adapters.halt()
        if self._media is not None:
            self._media.halt()
        self._metrics.adapters.unwatch(self._adapters.use)

    async def health(self) -> None:
        """Raise a FunitelError unless every shard answers and the loop runs."""
        if self._steps.has_ended:
            raise ShardFailed("the engine has stopped")
        for rank, memory in enumerate(await self._replica.health()):
            self._metrics.set_memory(rank, memory)

    def fail_all(self, error: FunitelError) -> None:
        """End every request; clients get the error."""
        for _, task in self._preparing.values():
            task.cancel()
        self.requests.fail_all(error)
        self.paused.fail_all(error)

    async def close(self) -> None:
        """Refuse new requests, let running ones finish, then close the shards."""
        self._is_draining = True
        self.paused.close()
        await self.requests.drained()
        self._halt_caches()
        await self._adapters.close()
        if self._media is not None:
            await self._media.close()
        await self._steps.close()
