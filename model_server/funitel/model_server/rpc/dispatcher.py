"""Dispatch the calls that change state, of gRPC and the step socket: run them in call order and answer them.

They begin in the order of their `step_seq` where the router numbers them, in order of arrival otherwise. A `Runner`
says whether the result of a step is described and encoded before the next one begins or beside it. Knows messages, but
neither gRPC nor sockets: `servicer` and `step_socket_server` carry them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from funitel.model_server.device.memory import is_out_of_memory
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.interface import PendingStep
from funitel.model_server.rpc.call_order import CallOrder
from funitel.model_server.rpc.compute_threads import Runner, attempt
from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    ResourceExhausted,
    ShardFailed,
    ShardUnsound,
    StepFailed,
    UnknownBatch,
    WrongState,
)
from funitel.proto.step import WarmupResult
from funitel.proto.takeover import wire as takeover_wire
from funitel.proto.takeover.state import HeldBatch, NumberedCall, TakeOverState

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Response = TypeVar("Response", pb.PrefillResponse, pb.DecodeResponse)
Numbered = pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest | pb.ClearCacheRequest
Request = Numbered | pb.WarmupRequest | pb.SleepRequest | pb.WakeRequest | pb.TakeOverRequest
Q = TypeVar("Q", bound=Request)


@dataclass(frozen=True, slots=True)
class ReplyCallbacks(Generic[R]):
    """The callbacks of a call: one of the two is called, once, on the loop of the dispatcher."""

    answer: Callable[[R], object]
    refuse: Callable[[FunitelError], object]


NOWHERE: ReplyCallbacks[object] = ReplyCallbacks(lambda _: None, lambda _: None)
NOT_NUMBERED = (pb.WarmupRequest, pb.SleepRequest, pb.WakeRequest, pb.TakeOverRequest)
UNCHANGED = (InvalidRequest, UnknownBatch, WrongState)  # failures of calls that have changed nothing


class Dispatcher:
    """The calls of one rank, each with a reply. They are made on `loop`, where `runner` reports results of its jobs.

    A caller that disconnects stops nothing: other ranks run the call too, and later ones build on it. `on_fatal` is
    called with failures after which this process cannot go on: the ranks have lost each other.
    """

    def __init__(
        self,
        executor: Executor,
        world_size: int,
        runner: Runner,
        loop: asyncio.AbstractEventLoop,
        on_fatal: Callable[[FunitelError], None],
    ) -> None:
        self.loop = loop
        self._executor = executor
        self._world_size = world_size
        self._runner = runner
        self._on_fatal = on_fatal
        self._order = CallOrder()
        self._numbered: dict[str, tuple[Callable[[bytes], Numbered], Callable[..., None]]] = {
            "Prefill": (pb.PrefillRequest.FromString, self.prefill),
            "Decode": (pb.DecodeRequest.FromString, self.decode),
            "FilterBatch": (pb.FilterBatchRequest.FromString, self.filter_batch),
            "ClearCache": (pb.ClearCacheRequest.FromString, self.clear_cache),
        }
        # For TakeOver, where calls are finished: the last Warmup with its answer, and whether a step has failed since.
        self._warmed: tuple[bytes, pb.WarmupResponse] | None = None
        self._has_failed = False
        # When the call that is computed was begun, and when the one that is answered; on the monotonic clock.
        self._begun: int | None = None
        self._answering: int | None = None

    @property
    def busy_ns(self) -> int:
        """Nanoseconds since the call in flight was begun; 0 where there is none. Asked from any thread."""
        begun = [instant for instant in (self._begun, self._answering) if instant is not None]
        return time.monotonic_ns() - min(begun) if begun else 0

    def make(self, call: Callable[[Q, ReplyCallbacks[R]], None], request: Q, reply: ReplyCallbacks[R]) -> None:
        """Make one of the calls below; what it raises itself is answered too, and takes up the call's number."""

        def fail(error: Exception) -> None:
            failure = self._failure(error)

            def refuse(_: FunitelError | None = None) -> None:
                reply.refuse(failure)

            self._order.begin(_step_seq(request), request, refuse, refuse)

        attempt(partial(call, request, reply), lambda _: None, fail)

    def clear_cache(self, request: pb.ClearCacheRequest, reply: ReplyCallbacks[pb.ClearCacheResponse]) -> None:
        """Drop one or all cached batches; dropping all starts the numbering again."""
        batch_id = request.id if request.HasField("id") else None

        def clear() -> None:
            self._executor.clear(batch_id)
            if batch_id is None:
                self._has_failed = False

        def answer(response: pb.ClearCacheResponse) -> None:
            if batch_id is None:
                self._order.reset()
            reply.answer(response)

        self._run(
            request, _step_seq(request), clear, lambda _: pb.ClearCacheResponse(), ReplyCallbacks(answer, reply.refuse)
        )

    def filter_batch(self, request: pb.FilterBatchRequest, reply: ReplyCallbacks[pb.FilterBatchResponse]) -> None:
        """Keep some rows of a cached batch."""
        step_seq = _step_seq(request)
        self._run(
            request,
            step_seq,
            lambda: self._executor.begin_filter(request.batch_id, request.request_ids, is_ahead=step_seq is not None),
            lambda kept: pb.FilterBatchResponse(batch=wire.encode_cached(kept())),
            reply,
        )

    def warmup(self, request: pb.WarmupRequest, reply: ReplyCallbacks[pb.WarmupResponse]) -> None:
        """Size the pool."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        limits = wire.decode_warmup_limits(request)

        def warm_up() -> WarmupResult:
            self._warmed, self._has_failed = None, False
            return self._executor.warmup(starts, limits)

        def encode(result: WarmupResult) -> pb.WarmupResponse:
            response = wire.encode_warmup_result(result)
            self._warmed = _identity(request), response
            return response

        self._run(request, None, warm_up, encode, reply)

    def sleep(self, request: pb.SleepRequest, reply: ReplyCallbacks[pb.SleepResponse]) -> None:
        """Give memory back until `wake`; refused while calls wait for their turn: there is a step behind them."""
        if waiting := self._order.num_waiting:
            raise WrongState(f"the shard cannot sleep: {waiting} calls wait for their turn")

        def sleep() -> int:
            freed = self._executor.sleep(request.level)
            self._warmed = None
            return freed

        self._run(request, None, sleep, lambda freed: pb.SleepResponse(freed_bytes=freed), reply)

    def wake(self, request: pb.WakeRequest, reply: ReplyCallbacks[pb.WakeResponse]) -> None:
        """Put back what sleep took away, but for the pool."""
        self._run(request, None, self._executor.wake, lambda _: pb.WakeResponse(), reply)

    def look(self) -> pb.TakeOverResponse:
        """The number of the newest numbered call that was begun, and the newest calls. From any thread, at once.

        From here on no other is begun, until `take_over` or `clear_cache`: calls of an earlier router may still come.
        """
        last, latest = self._order.look()
        calls = (NumberedCall(seq, _method(call), call.SerializeToString()) for seq, call in latest)
        return takeover_wire.encode_state(TakeOverState(last, tuple(calls)))

    def take_over(self, request: pb.TakeOverRequest, reply: ReplyCallbacks[pb.TakeOverResponse]) -> None:
        """Begin the calls that are missing here, and tell another router of all rows once every call is finished.

        Calls that wait for their turn are given up. All that happens too if the router is refused then; it may clear
        the cache, and no rank waits for another meanwhile.

        Raises:
            InvalidRequest: calls are missing that cannot be made here; nothing was begun. Or, as the answer: rows are
                not such that another router can go on with them.
        """
        missing = [(each, *self._parsed(each)) for each in takeover_wire.decode_missing(request)]
        self._order.check_missing([each.step_seq for each, _, _ in missing])
        self._order.open()
        self._order.give_up()
        for _, call, message in missing:
            self.make(call, message, NOWHERE)
        last, wanted = self._order.skip_ahead(), _identity(request.warmup)

        def encode(batches: tuple[HeldBatch, ...]) -> pb.TakeOverResponse:
            if self._warmed is None:
                raise InvalidRequest("warmup: there was none here since the shard was started or slept", "warmup")
            known, warmed = self._warmed
            if wanted != known:
                raise InvalidRequest("warmup: the last one here was another", "warmup")
            if self._has_failed:
                raise InvalidRequest("a step has failed here: ClearCache comes next")
            response = takeover_wire.encode_state(TakeOverState(last, batches=batches))
            response.warmup.CopyFrom(warmed)
            return response

        self._run(request, None, self._executor.hold, encode, reply)

    def _parsed(self, call: NumberedCall) -> tuple[Callable[..., None], Numbered]:
        try:
            parse, make = self._numbered[call.method]
            message = parse(call.payload)
        except (KeyError, DecodeError):
            raise InvalidRequest(f"missing: call {call.step_seq} is no message of {call.method!r}", "missing") from None
        if not message.HasField("step_seq") or message.step_seq != call.step_seq:
            raise InvalidRequest(f"missing: call {call.step_seq} has another number", "missing")
        return make, message

    def prefill(self, request: pb.PrefillRequest, reply: ReplyCallbacks[pb.PrefillResponse]) -> None:
        """Take a batch in and run one step."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        cached = wire.decode_cached(request.cached_batch) if request.HasField("cached_batch") else None
        rows, copies = wire.decode_rows(request.rows), wire.decode_copies(request.copies)
        step_seq, batch_id = _step_seq(request), request.batch.id
        self._run(
            request,
            step_seq,
            lambda: self._executor.compute_prefill(
                batch_id, starts, cached, rows, copies, is_ahead=step_seq is not None
            ),
            lambda step: _encoded(step, pb.PrefillResponse(), request.takes_columns),
            reply,
        )

    def decode(self, request: pb.DecodeRequest, reply: ReplyCallbacks[pb.DecodeResponse]) -> None:
        """Run one step of cached batches."""
        cached = [wire.decode_cached(message) for message in request.batches]
        rows, copies = wire.decode_rows(request.rows), wire.decode_copies(request.copies)
        step_seq = _step_seq(request)
        self._run(
            request,
            step_seq,
            lambda: self._executor.compute_decode(cached, rows, copies, is_ahead=step_seq is not None),
            lambda step: _encoded(step, pb.DecodeResponse(), request.takes_columns),
            reply,
        )

    def _run(
        self,
        request: Request,
        step_seq: int | None,
        call: Callable[[], T],
        encode: Callable[[T], R],
        reply: ReplyCallbacks[R],
    ) -> None:
        """Run `call` on the compute thread in its turn, then `encode` on its result where the runner does that."""

        def compute() -> T:
            self._begun, is_sound = time.monotonic_ns(), False
            try:
                result = call()
                is_sound = True
                return result
            except UNCHANGED:
                is_sound = True
                raise
            finally:
                self._begun = None
                if not is_sound:
                    self._has_failed = True

        def finish(computed: T) -> R:
            self._answering, is_sound = time.monotonic_ns(), False
            try:
                result = encode(computed)
                is_sound = True
                return result
            except UNCHANGED:
                is_sound = True
                raise
            finally:
                self._answering = None
                if not is_sound:
                    self._has_failed = True

        def fail(error: Exception) -> None:
            reply.refuse(self._failure(error))

        self._order.begin(step_seq, request, lambda: self._runner.run(compute, finish, reply.answer, fail), fail)

    def _failure(self, error: Exception) -> FunitelError:
        """The error that a caller gets for an exception; a fatal one is reported here."""
        if isinstance(error, FunitelError):
            if isinstance(error, ShardFailed):
                self._on_fatal(error)
            return error
        logger.error("step failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        if self._world_size == 1:
            return ResourceExhausted(reason) if is_out_of_memory(error) else StepFailed(reason)
        lost = ShardUnsound(reason)  # the other ranks may be waiting inside a collective, until this one ends
        self._on_fatal(lost)
        return lost


def _step_seq(request: Request) -> int | None:
    """The number of a call; None for one that is not numbered. To drop all batches is not: numbers start again then."""
    if isinstance(request, NOT_NUMBERED) or not request.HasField("step_seq"):
        return None
    return None if isinstance(request, pb.ClearCacheRequest) and not request.HasField("id") else request.step_seq


def _method(call: Message) -> str:
    return type(call).__name__.removesuffix("Request")


def _identity(warmup: pb.WarmupRequest) -> bytes:
    return warmup.SerializeToString(deterministic=True)


def _encoded(step: PendingStep, response: Response, in_columns: bool) -> Response:
    wire.encode_result(step.describe(), response, in_columns=in_columns)
    return response
