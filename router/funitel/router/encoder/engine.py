"""The encoder engine: admission, batches by token budget, rows back to their requests.

One shard is one replica, and takes two batches at a time, so that it finds the next at hand. Event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from funitel.proto.errors import (
    DeadlineExceeded,
    FunitelError,
    NotReady,
    Overloaded,
    ShardFailed,
    ShardUnsound,
    StartupError,
    StepFailed,
)
from funitel.proto.settings.fields import require
from funitel.proto.step import EncoderFacts, EncoderInput, EncoderResult, EncoderTask
from funitel.proto.tracing import spans
from funitel.router.core.request import Limits, Request
from funitel.router.core.stream import Timings
from funitel.router.encoder.queue import EncoderQueue, QueuedText, Submission
from funitel.router.engine.step_pipeline import FIRST_FACTOR
from funitel.router.engine.warmup import admission_of
from funitel.router.replica_set.failover import MAX_LOSSES, NONE_LEFT
from funitel.router.replica_set.membership import Membership
from funitel.router.replica_set.table import Member, ReplicaAddress, Slot
from funitel.router.replica_set.weighted_choice import WeightedChoice
from funitel.router.scheduler.admission import Exceeded, InFlight, Reservation, Reservations
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.capabilities import default_pipeline_steps
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

BYTES = 4  # of a float32


@dataclass(slots=True)
class Encoded:
    """The numbers of each text of one request: float32, little-endian; for FILL with their tokens.

    A row of `width` numbers each; for EMBED_ALL a row for each of its tokens.
    """

    rows: list[bytes]
    ids: list[tuple[int, ...]]
    width: int = 0
    timings: Timings = field(default_factory=Timings)


class _Pending:
    """A request that waits for its rows."""

    def __init__(self, submission: Submission) -> None:
        count = len(submission.inputs)
        self.submission = submission
        self.encoded = Encoded([b""] * count, [()] * count)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.span = spans.current()  # of the caller
        self._num_missing = count

    def trace(self) -> None:
        """Record where the time went."""
        timings, now = self.encoded.timings, time.monotonic()
        if self.span is not None:
            spans.record("queue", self.span, timings.submitted, timings.started or now)
            if timings.started is not None:
                spans.record("encode", self.span, timings.started, timings.finished or now)

    def take(self, place: int, row: bytes, ids: tuple[int, ...]) -> None:
        """Note one row; the last one is the end."""
        self.encoded.rows[place], self.encoded.ids[place] = row, ids
        self._num_missing -= 1
        if not self._num_missing and not self.done.done():
            self.encoded.timings.finished = time.monotonic()
            self.done.set_result(None)

    def fail(self, error: FunitelError) -> None:
        """End with an error."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(eq=False, slots=True, kw_only=True)
class EncoderReplica(Member):
    """One encoder, which reports the memory that it holds."""

    batches: list[Sequence[QueuedText]] = field(default_factory=list)  # that it encodes

    async def health(self) -> None:
        """See `Member`."""
        (memory,) = await self.shards.health()
        self.slot.metrics.set_memory(0, memory)

    @contextmanager
    def encoding(self, texts: Sequence[QueuedText]) -> Iterator[None]:
        """Count texts as running here."""
        self.batches.append(texts)
        self.slot.metrics.set_running_texts(self.num_running)
        try:
            yield
        finally:
            self.batches.remove(texts)
            self.slot.metrics.set_running_texts(self.num_running)

    @property
    def num_running(self) -> int:
        """Texts that it encodes."""
        return sum(map(len, self.batches))


class EncoderEngine(Membership[EncoderReplica]):
    """The replicas of one encoder, each a single shard."""

    def __init__(
        self,
        replicas: Sequence[tuple[ReplicaAddress, Shards]],
        limits: Limits,
        settings: RouterSettings,
        metrics: Metrics,
    ) -> None:
        super().__init__(settings, metrics)
        self.limits = limits
        first = replicas[0][1]
        self.facts = _facts(first)
        self.dtype = first.infos[0].dtype
        self._queue = EncoderQueue(settings.max_batch_prefill_tokens, settings.max_batch_size)
        self._pending: dict[Submission, _Pending] = {}
        self._admission = admission_of(settings)
        self._reservations = Reservations()
        self._next_id = 0
        self._has_work = asyncio.Event()
        self._left = asyncio.Event()  # set whenever a request or a batch ends
        self._choice = WeightedChoice([])
        self._device_type = first.infos[0].device_type
        for place, shards in replicas:
            self._enter(self._member_of(place, shards))

    @property
    def compute_type(self) -> str:
        """Shards and device, such as "1-cpu"."""
        return f"{len(self._slots)}-{self._device_type}"

    async def encode(
        self,
        task: EncoderTask,
        inputs: Sequence[EncoderInput],
        *,
        priority: int = 0,
        deadline: float | None = None,
        reservation: Reservation | None = None,
        was_admitted: bool = False,
    ) -> Encoded:
        """Encode the texts of one request; leaving early takes back what still waits.

        Args:
            task: one of the model's.
            inputs: one or more.
            priority: lower is sooner.
            deadline: instant of the monotonic clock.
            reservation: of the request; released, for it counts here from now on.
            was_admitted: another router has admitted the request: it is not refused for want of places.

        Raises:
            Overloaded: there is no place for it, or it would wait longer than its deadline.
            DeadlineExceeded: its deadline has passed.
            NotReady: the router is draining, or the last replica was taken away.
            ShardFailed, StepFailed: the shards did not compute it.
        """
        now = time.monotonic()
        submission = Submission(self._next_id, task, inputs, priority)
        if reservation is not None:
            reservation.release()
        self._check(submission.num_tokens, deadline, now, was_admitted=was_admitted)
        self._next_id += 1
        pending = self._pending[submission] = _Pending(submission)
        self._queue.add(submission)
        self._has_work.set()
        self._report()
        try:
            async with asyncio.timeout(None if deadline is None else deadline - now):
                await pending.done
        except TimeoutError:
            started = pending.encoded.timings.started is not None
            self._metrics.count_expired("running" if started else "waiting")
            raise DeadlineExceeded("the deadline passed before every text was encoded") from None
        except asyncio.CancelledError:
            self._metrics.count_cancelled()
            raise
        finally:
            pending.trace()
            self._queue.remove(submission)
            del self._pending[submission]
            self._report()
            self._left.set()
        return pending.encoded

    def check_room(self, incoming: Request) -> None:
        """Ask admission about a request before its texts are known; raises as `encode`."""
        self._check(len(incoming.input_ids), incoming.deadline, time.monotonic())

    def reserve(self, incoming: Request) -> Reservation:
        """Hold a place for a request until its texts are given; raises as `check_room`, for want of places only."""
        self._check_open()
        self._refuse_if(self._admission.exceeded_count(self._in_flight))
        return self._reservations.hold(incoming.key)

    @property
    def _in_flight(self) -> InFlight:
        return InFlight(len(self._pending), 0) + self._reservations.in_flight(b"")

    def _check(self, num_tokens: int, deadline: float | None, now: float, *, was_admitted: bool = False) -> None:
        self._check_open()
        if deadline is not None and deadline <= now:
            self._metrics.count_expired("arriving")
            raise DeadlineExceeded("the deadline passed before the request was queued")
        if was_admitted:
            return
        admission, queue = self._admission, self._queue
        self._refuse_if(
            admission.exceeded_count(self._in_flight)
            or admission.exceeded_tokens(queue.num_texts, queue.num_tokens, num_tokens)
            or admission.exceeded_deadline(self._wait_seconds, inf if deadline is None else deadline - now)
        )

    @property
    def _wait_seconds(self) -> float:
        return self._queue.num_tokens / self._admission.throughput.tokens_per_second

    def _refuse_if(self, exceeded: Exceeded | None) -> None:
        if exceeded is not None:
            self._metrics.count_refused(exceeded.reason)
            position = self._in_flight.num_requests + 1
            raise Overloaded(f": {exceeded.words}", position, self._wait_seconds, exceeded.reason)

    async def close(self) -> None:
        """Refuse new requests, let running ones finish, then close the shards."""
        self._is_draining = True
        while self._pending:
            self._left.clear()
            await self._left.wait()
        await self._close_members()

    # Batches --------------------------------------------------------------------------------------------------------

    async def _work(self, member: EncoderReplica) -> None:
        """Send batch after batch to one replica, until it is lost or has drained."""
        while member in self._serving or self._ends_the_rest(member):
            texts = self._queue.plan() if self._is_its_turn(member) else []
            if not texts:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            self._choice.count(member.slot.weight, len(texts))
            self._has_work.set()  # it may be another one's turn
            now = time.monotonic()
            for submission in {text.submission for text in texts}:
                timings = self._pending[submission].encoded.timings
                timings.started = timings.started or now
            self._metrics.observe_new_batch(len(texts))
            self._report()
            try:
                with member.encoding(texts):
                    await self._compute(member, texts)
            finally:
                self._left.set()

    def _is_its_turn(self, member: EncoderReplica) -> bool:
        """Whether a replica may take the next batch: those of the weight that is due may, if weights differ."""
        weight = member.slot.weight
        if member not in self._serving or not any(each.slot.weight for each in self._serving):
            return True
        return weight == self._choice.next_weight() if self._choice.is_needed else weight > 0

    def _ends_the_rest(self, member: EncoderReplica) -> bool:
        """Whether a replica that drains is to encode what waits, as no other will."""
        return member in self._leaving and self._refuses and self._queue.num_texts > 0

    async def _compute(self, member: EncoderReplica, texts: Sequence[QueuedText]) -> None:
        """Have texts encoded; where that fails, each request by itself, so that it fails alone."""
        task = texts[0].submission.task
        began = time.monotonic()
        self._metrics.count_step("encode")
        try:
            with spans.propagate_to(self._spans(texts)):
                result = await self._answer(member.shards, task, texts)
            self._settle(texts, result)
        except ShardFailed as error:
            self._metrics.count_step_failure("encode")
            self._lose_texts(member, texts, error)
        except FunitelError as error:
            self._metrics.count_step_failure("encode")
            submissions = list(dict.fromkeys(text.submission for text in texts))
            if len(submissions) == 1:
                self._fail(texts, error)
                return
            for submission in submissions:
                if submission in self._pending:
                    await self._compute(member, [text for text in texts if text.submission is submission])
        except Exception as error:  # a request must not hang
            logger.exception("a batch of texts failed")
            self._fail(texts, StepFailed(f"{type(error).__name__}: {error}"))
        else:
            num_tokens, now = sum(len(text.input.input_ids) for text in texts), time.monotonic()
            self._admission.throughput.observe_step(num_tokens, now - began, now)
            member.slot.metrics.observe_encoding(len(texts), num_tokens, now - began, result.total_ns / 1e9)

    async def _answer(self, shards: Shards, task: EncoderTask, texts: Sequence[QueuedText]) -> EncoderResult:
        """What a replica makes of texts; raises ShardUnsound where it hangs."""
        timeout = FIRST_FACTOR * self._settings.step_timeout_s  # it may compute another batch before
        try:
            async with asyncio.timeout(timeout):
                return await shards.encode(task, [text.input for text in texts])
        except TimeoutError:
            raise ShardUnsound(f"the shard has not answered for {timeout:g} s") from None

    def _spans(self, texts: Sequence[QueuedText]) -> list[spans.OpenSpan]:
        """Those of the requests that texts are of, of the requests that are traced."""
        pending = [self._pending.get(submission) for submission in dict.fromkeys(text.submission for text in texts)]
        return [each.span for each in pending if each is not None and each.span is not None]

    def _settle(self, texts: Sequence[QueuedText], result: EncoderResult) -> None:
        size, broken = result.width * BYTES, frozenset(result.broken)
        is_by_token = texts[0].submission.task is EncoderTask.EMBED_ALL
        ends = list(accumulate(len(text.input.input_ids) if is_by_token else 1 for text in texts))
        if len(result.values) != size * ends[-1]:
            raise StepFailed(f"the shard gave {len(result.values)} bytes for {ends[-1]} rows of {size}")
        for row, ((submission, place), start, end) in enumerate(zip(texts, [0, *ends], ends, strict=False)):
            pending = self._pending.get(submission)
            if pending is None:  # its client has left
                continue
            if row in broken:
                pending.fail(StepFailed(f"the model's numbers for text {place} are not finite"))
            else:
                ids = result.ids[row * result.width : (row + 1) * result.width]
                submission.num_losses = 0
                pending.encoded.width = result.width
                pending.take(place, result.values[start * size : end * size], ids)

    def _fail(self, texts: Sequence[QueuedText], error: FunitelError) -> None:
        for submission in {text.submission for text in texts}:
            if submission in self._pending:
                self._queue.remove(submission)
                self._pending[submission].fail(error)

    def _lose_texts(self, member: EncoderReplica, texts: Sequence[QueuedText], error: FunitelError) -> None:
        """Let other replicas encode the texts of a lost one, or a replica that comes back; fail them if none can."""
        self._lose(member, error)
        can_go_on = not self._return_timeout.is_over and not self._refuses and member not in self._serving
        for submission in {text.submission for text in texts}:
            if submission.lost_with is not member:
                submission.num_losses += 1
            submission.lost_with = member
            if not can_go_on or submission.num_losses >= MAX_LOSSES:
                self._fail([text for text in texts if text.submission is submission], error)
        self._queue.give_back(texts)
        self._has_work.set()

    def _lose(self, member: EncoderReplica, error: FunitelError) -> None:
        """Go on without a replica; the last one is kept where none can come back."""
        if self._settings.shard_return_timeout or len(self._serving) > 1 or member in self._leaving:
            super()._lose(member, error)

    def _on_loss(self, member: EncoderReplica, error: FunitelError) -> str:
        if self._refuses and not self._leaving:
            self.fail_all(NotReady(NONE_LEFT))
        self._left.set()
        return f"texts waiting={self._queue.num_texts}"

    def _on_drain(self, member: EncoderReplica) -> str:
        return f"texts waiting={self._queue.num_texts} running={member.num_running}"

    async def _drained(self, member: EncoderReplica) -> None:
        while member in self._leaving and (member.batches or self._ends_the_rest(member)):
            self._left.clear()
            await self._left.wait()

    def _on_change(self) -> None:
        self._choice = WeightedChoice([member.slot.weight for member in self._serving])
        self._has_work.set()

    def _counts(self, member: EncoderReplica) -> tuple[int, int]:
        return 0, member.num_running  # what waits is in one queue for all

    def _on_join(self, member: EncoderReplica) -> str:
        for _ in range(self._settings.pipeline_steps or default_pipeline_steps(member.shards.infos[0])):
            self._tasks.start(self._work(member))
        return f"texts waiting={self._queue.num_texts}"

    async def _join(self, place: ReplicaAddress, shards: Shards) -> EncoderReplica:
        self._check_same(shards)
        return self._member_of(place, shards)

    async def _rejoin(self, lost: EncoderReplica, shards: Shards) -> EncoderReplica:
        self._check_same(shards)
        lost.slot.metrics.set_weights(0, shards.infos[0].weight_bytes, 0)
        return EncoderReplica(slot=lost.slot, shards=shards)

    def _check_same(self, shards: Shards) -> None:
        if len(shards.infos) != 1 or shards.infos[0].encoder != self.facts:
            raise StartupError("what answers there is another model")

    def _member_of(self, place: ReplicaAddress, shards: Shards) -> EncoderReplica:
        """Make a new replica of its shard."""
        slot = Slot(
            replica_id=place.replica_id,
            address=place.address,
            weight=place.weight,
            num_ranks=1,
            metrics=self._metrics.child(place.replica_id, 1),
        )
        slot.metrics.set_weights(0, shards.infos[0].weight_bytes, 0)
        return EncoderReplica(slot=slot, shards=shards)

    def fail_all(self, error: FunitelError) -> None:
        """End whatever waits for its rows; clients get the error."""
        for pending in self._pending.values():
            self._queue.remove(pending.submission)
            pending.fail(error)

    def _report(self) -> None:
        self._metrics.set_sequences(self._queue.num_texts, len(self._pending))
        self._metrics.set_queue(0, self._queue.num_tokens)


def _facts(shards: Shards) -> EncoderFacts:
    facts = shards.infos[0].encoder
    assert facts is not None, "only encoders come here"
    return facts


def start_encoder(
    replicas: Sequence[tuple[ReplicaAddress, Shards]], settings: RouterSettings, metrics: Metrics
) -> EncoderEngine:
    """Start the engine of an encoder.

    Args:
        replicas: where they are, and the shards of each: one rank.
        settings: the router's.
        metrics: the router's.

    Raises:
        StartupError: replicas differ, or the settings ask for more than the model can.
    """
    facts = _facts(replicas[0][1])
    for _, shards in replicas:
        if len(shards.infos) != 1 or shards.infos[0].encoder != facts:
            raise StartupError("the replicas of an encoder must be one shard each, and alike")
    asked = settings.max_input_tokens
    require(
        asked is None or asked <= facts.max_tokens,
        f"--max-input-tokens {asked} must be <= {facts.max_tokens}, the positions that the model has",
    )
    longest = asked or facts.usual_tokens
    limits = Limits(max_input_tokens=longest, max_total_tokens=longest, pool_tokens=0)
    metrics.set_limits(limits)
    logger.info("connected encoders=%d %s %s", len(replicas), limits, facts)
    return EncoderEngine(replicas, limits, settings, metrics)
