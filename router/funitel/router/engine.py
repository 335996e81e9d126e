"""Requests over one replica: who is let in, how they are cancelled, what draining and handing over mean.

The steps themselves are made by a `StepLoop`. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from funitel.proto.errors import DeadlineExceeded, FunitelError, NotReady, Overloaded, ShardFailed, StepFailed
from funitel.router.admission import Admission, InFlight
from funitel.router.metrics import Metrics
from funitel.router.peer import check_capabilities
from funitel.router.placement import Standing
from funitel.router.replica import Replica
from funitel.router.requests import Requests
from funitel.router.scheduler import Scheduler
from funitel.router.sequence import Limits, Request, Sequence
from funitel.router.settings import RouterSettings
from funitel.router.step_loop import StepLoop
from funitel.router.stream import TokenStream

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
    ) -> None:
        self.limits = limits
        self._replica = replica
        self._scheduler = scheduler
        self._metrics = metrics
        self._admission = admission
        self._requests = Requests(scheduler, self._expire)
        self._compiling: dict[int, tuple[Sequence, asyncio.Task[None]]] = {}  # by id, while their grammar is compiled
        self._steps = StepLoop(
            replica,
            scheduler,
            self._requests,
            metrics,
            admission.throughput,
            pipeline_steps,
            self._compiling.keys(),
            decode_tokens,
        )
        self._next_id = 0
        self._is_draining = False

    @property
    def compute_type(self) -> str:
        """Shards and device, such as "2-cpu"."""
        return f"{len(self._replica.infos)}-{self._replica.info.device_type}"

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
        self._check_open()
        sequence = self._sequence_of(request)
        self._next_id += 1
        return self.accept(sequence)

    def check_room(self, newcomer: Request, entering: InFlight) -> None:
        """Find out whether a request would be queued, behind so many that are about to be submitted.

        Raises: as `submit`, save for InvalidRequest.
        """
        self._check_open()
        self.check_place(self._sequence_of(newcomer), self.in_flight(newcomer.key) + entering)

    def _check_open(self) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._steps.has_ended:
            raise ShardFailed("the engine has stopped")

    def _sequence_of(self, request: Request) -> Sequence:
        """The sequence of a request that comes now."""
        num_opening = self._replica.info.num_opening_tokens
        return Sequence(self._next_id, request, num_opening=num_opening, arrived=time.monotonic())

    def accept(self, sequence: Sequence, in_flight: InFlight | None = None) -> TokenStream:
        """Queue a sequence whose id is new here, if there is a place for it.

        The bounds on requests hold for `in_flight`, when others than those here count too.

        Raises:
            Overloaded, DeadlineExceeded: as `submit`.
        """
        self._admit(sequence, in_flight or self.in_flight(sequence.request.key))
        stream = TokenStream(sequence.request, cancel=partial(self._cancel, sequence))
        self._take(sequence, stream)
        return stream

    def take_over(self, sequence: Sequence, stream: TokenStream) -> None:
        """Go on with what another engine gave up, draining or not."""
        stream.move(partial(self._cancel, sequence))
        self._take(sequence, stream)

    def tell_of_loss(self, on_lost: Callable[[FunitelError], None]) -> None:
        """Have `on_lost` called once the shards are gone; it is to call `give_up`."""
        self._steps.on_lost = on_lost

    def give_up(self) -> list[tuple[Sequence, TokenStream]]:
        """Stop, and hand over whatever has not ended, oldest first; the shards are not asked."""
        self._steps.give_up()
        for _, task in self._compiling.values():
            task.cancel()
        scheduler = self._scheduler
        for sequence in scheduler.running.values():
            sequence.num_losses += 1
        compiling = (sequence for sequence, _ in self._compiling.values())
        # One whose grammar has just been compiled may still be among those that compile.
        here = {s.id: s for s in (*scheduler.running.values(), *scheduler.waiting, *compiling)}
        handed_over = []
        for _, sequence in sorted(here.items()):
            stream = self._requests.forget(sequence)
            if stream is not None:  # a client may have left while its grammar is compiled
                handed_over.append((sequence.afresh(), stream))
        return handed_over

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._requests)

    def in_flight(self, key: bytes) -> InFlight:
        """Requests in flight: all, and those of an API key."""
        return self._requests.in_flight(key)

    @property
    def can_resume(self) -> bool:
        """Whether a sequence can go on behind tokens that it has got already, here or elsewhere."""
        return self._scheduler.can_resume

    def standing(self, sequence: Sequence) -> Standing:
        """How suitable this replica is for a sequence that is not here."""
        return Standing(self._scheduler.load_tokens, self._scheduler.cached_prefix_len(sequence))

    def _take(self, sequence: Sequence, stream: TokenStream) -> None:
        self._requests.add(sequence, stream)
        if sequence.request.sampling.grammar:
            task = asyncio.create_task(self._compile_and_queue(sequence))
            self._compiling[sequence.id] = sequence, task
            task.add_done_callback(lambda _: self._compiling.pop(sequence.id))
        else:
            self._queue(sequence)

    def check_place(self, sequence: Sequence, in_flight: InFlight) -> Sequence | None:
        """Return who must leave the queue for a sequence, if somebody must; raises as `accept`."""
        if sequence.request.deadline is not None and sequence.request.deadline <= sequence.arrived:
            self._metrics.count_expired("arriving")
            raise DeadlineExceeded("the deadline passed before the request was queued")
        waiting, running = self._scheduler.waiting, self._scheduler.running.values()
        try:
            return self._admission.check(sequence, in_flight, waiting, self._scheduler.shares, running)
        except Overloaded as refused:
            self._metrics.count_refused(refused.reason)
            raise

    def _admit(self, sequence: Sequence, in_flight: InFlight) -> None:
        """Make sure that there is a place for a sequence; one of a key with more may lose its own."""
        leaving = self.check_place(sequence, in_flight)
        if leaving is not None:
            waiting, running = self._scheduler.waiting, self._scheduler.running.values()
            place = self._admission.place_of(leaving, waiting, running)
            self._metrics.count_refused("displaced")
            lost = ": its place went to an API key that has fewer"
            self._requests.fail(leaving, Overloaded(lost, place.position, place.wait_seconds, "displaced"))

    def _expire(self, sequence: Sequence) -> None:
        """End a sequence whose deadline has passed; it is in no later step."""
        is_running = sequence.id in self._scheduler.running
        self._metrics.count_expired("running" if is_running else "waiting")
        done = f"after {len(sequence.output_ids)} tokens" if sequence.output_ids else "before its first token"
        self._requests.fail(sequence, DeadlineExceeded(f"the deadline passed {done}"))
        self._steps.wake()

    def _queue(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        self._steps.welcome()

    async def _compile_and_queue(self, sequence: Sequence) -> None:
        """Queue a sequence once the shards have compiled its grammar, unless the client has left by then."""
        sampling = sequence.request.sampling
        try:
            await self._replica.compile_grammar(sampling.grammar_type, sampling.grammar)
            if self._steps.has_ended:
                raise ShardFailed("the engine has stopped")
        except FunitelError as error:
            if not await self._steps.has_lost_shards(error):
                self._requests.fail(sequence, error)
            return
        except Exception as error:  # a stream must not hang
            logger.exception("compiling a grammar failed")
            self._requests.fail(sequence, StepFailed(f"{type(error).__name__}: {error}"))
            return
        if sequence in self._requests:
            self._queue(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        """Take a sequence out of every later step."""
        self._requests.forget(sequence)
        self._scheduler.remove(sequence)
        self._metrics.count_cancelled()
        self._steps.wake()

    async def health(self) -> None:
        """Raise a FunitelError unless every shard answers and the loop runs."""
        if self._steps.has_ended:
            raise ShardFailed("the engine has stopped")
        await self._replica.health()

    async def close(self) -> None:
        """Refuse new requests, let running ones finish, then let go of the shards."""
        self._is_draining = True
        await self.drained()
        await self._steps.close()

    async def drained(self) -> None:
        """Return once no request is here."""
        await self._requests.drained()
