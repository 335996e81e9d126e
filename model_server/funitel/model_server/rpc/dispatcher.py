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

from funitel.model_server.device.memory import is_out_of_memory
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.interface import PendingStep
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
    WrongState,
)

logger = logging.getLogger(__name__)

# A numbered call is refused when its predecessor is not done after this long: the longest step must fit.
ORDER_TIMEOUT_SECONDS = 300.0
MAX_WAITING = 64  # calls; a router has at most two steps in flight, and a few calls that drop rows


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that waits for its turn."""

    begin: Callable[[], None]
    refuse: Callable[[FunitelError], None]
    timeout: asyncio.TimerHandle


class CallOrder:
    """Begins numbered calls strictly in order, from 1; any number may be waiting.

    A call is begun when the one before it has *begun*: what they are handed to keeps them in that order.
    """

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, _Waiting] = {}

    def reset(self) -> None:
        """Start again from 1: a router has (re)connected. Calls still waiting are refused."""
        refused, self._waiting = self._waiting, {}
        self._next = 1
        for step_seq, waiting in refused.items():
            waiting.timeout.cancel()
            waiting.refuse(InvalidRequest(f"step_seq {step_seq} belongs to a numbering that was given up"))

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their predecessors."""
        return len(self._waiting)

    def begin(self, step_seq: int | None, begin: Callable[[], None], refuse: Callable[[FunitelError], None]) -> None:
        """Call `begin` in the turn of `step_seq`, at once for None.

        `refuse` is called instead, with InvalidRequest, when the number was used already, or its predecessors do not
        come in time.
        """
        if step_seq is None:
            begin()
        elif step_seq < self._next or step_seq in self._waiting:
            refuse(InvalidRequest(f"step_seq {step_seq} was executed already, {self._next} is next"))
        elif step_seq > self._next and len(self._waiting) >= MAX_WAITING:
            refuse(InvalidRequest(f"{MAX_WAITING} calls wait for step_seq {self._next}, and {step_seq} came"))
        elif step_seq > self._next:
            timeout = asyncio.get_running_loop().call_later(ORDER_TIMEOUT_SECONDS, self._refuse, step_seq)
            self._waiting[step_seq] = _Waiting(begin, refuse, timeout)
        else:
            self._next += 1
            begin()
            self._begin_due()

    def _begin_due(self) -> None:
        while (waiting := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            waiting.timeout.cancel()
            waiting.begin()

    def _refuse(self, step_seq: int) -> None:
        waiting = self._waiting.pop(step_seq)
        waiting.refuse(InvalidRequest(f"step_seq {step_seq} came, {self._next} did not"))


T = TypeVar("T")
R = TypeVar("R")
Response = TypeVar("Response", pb.PrefillResponse, pb.DecodeResponse)
Numbered = pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest | pb.ClearCacheRequest
Request = Numbered | pb.WarmupRequest | pb.SleepRequest | pb.WakeRequest
Q = TypeVar("Q", bound=Request)


@dataclass(frozen=True, slots=True)
class ReplyCallbacks(Generic[R]):
    """The callbacks of a call: one of the two is called, once, on the loop of the dispatcher."""

    answer: Callable[[R], object]
    refuse: Callable[[FunitelError], object]


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

            self._order.begin(_step_seq(request), refuse, refuse)

        attempt(partial(call, request, reply), lambda _: None, fail)

    def clear_cache(self, request: pb.ClearCacheRequest, reply: ReplyCallbacks[pb.ClearCacheResponse]) -> None:
        """Drop one or all cached batches; dropping all starts the numbering again."""
        if request.HasField("id"):
            batch_id = request.id
            self._run(
                _step_seq(request), lambda: self._executor.clear(batch_id), lambda _: pb.ClearCacheResponse(), reply
            )
            return

        def answer(response: pb.ClearCacheResponse) -> None:
            self._order.reset()
            reply.answer(response)

        then = ReplyCallbacks(answer, reply.refuse)
        self._run(None, self._executor.clear, lambda _: pb.ClearCacheResponse(), then)

    def filter_batch(self, request: pb.FilterBatchRequest, reply: ReplyCallbacks[pb.FilterBatchResponse]) -> None:
        """Keep some rows of a cached batch."""
        step_seq = _step_seq(request)
        self._run(
            step_seq,
            lambda: self._executor.begin_filter(request.batch_id, request.request_ids, is_ahead=step_seq is not None),
            lambda kept: pb.FilterBatchResponse(batch=wire.encode_cached(kept())),
            reply,
        )

    def warmup(self, request: pb.WarmupRequest, reply: ReplyCallbacks[pb.WarmupResponse]) -> None:
        """Size the pool."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        limits = wire.decode_warmup_limits(request)
        self._run(None, lambda: self._executor.warmup(starts, limits), wire.encode_warmup_result, reply)

    def sleep(self, request: pb.SleepRequest, reply: ReplyCallbacks[pb.SleepResponse]) -> None:
        """Give memory back until `wake`; refused while calls wait for their turn: there is a step behind them."""
        if waiting := self._order.num_waiting:
            raise WrongState(f"the shard cannot sleep: {waiting} calls wait for their turn")
        self._run(
            None,
            lambda: self._executor.sleep(request.level),
            lambda freed: pb.SleepResponse(freed_bytes=freed),
            reply,
        )

    def wake(self, request: pb.WakeRequest, reply: ReplyCallbacks[pb.WakeResponse]) -> None:
        """Put back what sleep took away, but for the pool."""
        self._run(None, self._executor.wake, lambda _: pb.WakeResponse(), reply)

    def prefill(self, request: pb.PrefillRequest, reply: ReplyCallbacks[pb.PrefillResponse]) -> None:
        """Take a batch in and run one step."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        cached = wire.decode_cached(request.cached_batch) if request.HasField("cached_batch") else None
        rows, copies = wire.decode_rows(request.rows), wire.decode_copies(request.copies)
        step_seq, batch_id = _step_seq(request), request.batch.id
        self._run(
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
            step_seq,
            lambda: self._executor.compute_decode(cached, rows, copies, is_ahead=step_seq is not None),
            lambda step: _encoded(step, pb.DecodeResponse(), request.takes_columns),
            reply,
        )

    def _run(
        self, step_seq: int | None, call: Callable[[], T], encode: Callable[[T], R], reply: ReplyCallbacks[R]
    ) -> None:
        """Run `call` on the compute thread in its turn, then `encode` on its result where the runner does that."""

        def compute() -> T:
            self._begun = time.monotonic_ns()
            try:
                return call()
            finally:
                self._begun = None

        def finish(computed: T) -> R:
            self._answering = time.monotonic_ns()
            try:
                return encode(computed)
            finally:
                self._answering = None

        def fail(error: Exception) -> None:
            reply.refuse(self._failure(error))

        self._order.begin(step_seq, lambda: self._runner.run(compute, finish, reply.answer, fail), fail)

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
    if isinstance(request, pb.WarmupRequest | pb.SleepRequest | pb.WakeRequest) or not request.HasField("step_seq"):
        return None
    return request.step_seq


def _encoded(step: PendingStep, response: Response, in_columns: bool) -> Response:
    wire.encode_result(step.describe(), response, in_columns=in_columns)
    return response
