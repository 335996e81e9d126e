"""The results of one request: written on the engine's thread, read by any thread or event loop."""

import asyncio
import threading
import time
from collections.abc import Sequence
from enum import Enum

from funitel.llm.calls import CompletionJob
from funitel.llm.completions import CompletionBuilder, Mark
from funitel.llm.outputs import RequestMetrics, RequestOutput
from funitel.llm.sampling import RequestOutputKind
from funitel.proto.errors import FunitelError
from funitel.proto.step import Generation
from funitel.router.core.stream import TokenStream
from funitel.router.serving.run import spanning


class RequestState(Enum):
    """The state of a request. It goes from one to a later one only, but for PAUSED, which it may leave."""

    WAITING = "waiting"  # for its first token
    GENERATING = "generating"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"  # by `stop`; its results stay
    ABORTED = "aborted"  # by `abort` or `release`; it has no results
    FAILED = "failed"  # reading raises the error

    @property
    def is_last(self) -> bool:
        """Whether a request stays in this state."""
        return self not in (RequestState.WAITING, RequestState.GENERATING, RequestState.PAUSED)


class RequestResults:
    """What a request has come to, and how far it was read."""

    def __init__(self, job: CompletionJob, request_id: str) -> None:
        self._job = job
        self._request_id = request_id
        self._builders = [CompletionBuilder(index, job.params) for index in range(job.params.n)]
        self._marks = [Mark()] * job.params.n
        self._kind = job.params.output_kind
        self._streams: Sequence[TokenStream] = ()
        self._is_paused = False
        self._num_asked = 0  # pauses, resumptions and ends that the engine's thread has yet to carry out
        self._ending: RequestState | None = None
        self._error: FunitelError | None = None
        self._has_news = False
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    # Written by the engine's thread

    def begin(self, streams: Sequence[TokenStream]) -> None:
        """The request is queued."""
        self._streams = streams

    def feed(self, index: int, generation: Generation) -> bool:
        """Take what a step brought for one completion; whether it was the last of the request."""
        with self._changed:
            if self._ending is not None:
                return False
            self._builders[index].feed(generation)
            has_ended = all(builder.finished is not None for builder in self._builders)
            if has_ended:
                was_stopped = any(builder.output().finish_reason == "abort" for builder in self._builders)
                self._ending = RequestState.STOPPED if was_stopped else RequestState.FINISHED
            if has_ended or self._kind is not RequestOutputKind.FINAL_ONLY:
                self._has_news = True
                self._wake()
            return has_ended

    def fail(self, error: FunitelError) -> None:
        """The request has failed; what it has can still be read."""
        self._end(RequestState.FAILED, error)

    def drop(self) -> None:
        """The request was aborted: what it has is of no use."""
        with self._changed:
            self._has_news = False
            self._builders = [CompletionBuilder(index, self._job.params) for index in range(self._job.params.n)]
        self._end(RequestState.ABORTED, None)

    def ask(self) -> None:
        """A pause, a resumption or an end is on its way to the engine's thread; called by any thread."""
        with self._changed:
            self._num_asked += 1

    def carry_out(self, is_paused: bool | None) -> None:
        """A pause or a resumption was carried out: the request is paused, or goes on, or (None) nothing changed."""
        with self._changed:
            self._num_asked -= 1
            if is_paused is not None:
                self._is_paused = is_paused
            self._wake()

    def _end(self, state: RequestState, error: FunitelError | None) -> None:
        with self._changed:
            if self._ending is None:
                self._ending, self._error = state, error
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, waiter)

    # Read by anyone

    @property
    def state(self) -> RequestState:
        """The state of the request."""
        with self._changed:
            return self._state

    @property
    def _state(self) -> RequestState:
        if self._ending is not None:
            return self._ending
        if self._is_paused:
            return RequestState.PAUSED
        has_begun = any(builder.num_tokens for builder in self._builders)
        return RequestState.GENERATING if has_begun else RequestState.WAITING

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, of all completions."""
        with self._changed:
            return sum(builder.num_tokens for builder in self._builders)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing more can be read."""
        with self._changed:
            return self._ending is not None and not self._has_news and self._error is None

    def take_nowait(self) -> RequestOutput | None:
        """Return what is new, or None; raises the error of a request that has failed, once the rest was read."""
        with self._changed:
            return self._take()

    def take(self, timeout: float | None = None) -> RequestOutput | None:
        """Wait for something new; None when there is nothing within `timeout` seconds, or nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news or self._ending is not None, timeout)
            return self._take()

    async def take_async(self) -> RequestOutput | None:
        """Wait on the running event loop for something new; None when there is nothing more."""
        while True:
            with self._changed:
                if self._has_news or self._ending is not None:
                    return self._take()
                waiter = self._waiter()
            await waiter

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended, or is paused by the last that was asked; whether it is by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_settled, timeout)

    async def settled_async(self, timeout: float | None = None) -> bool:
        """As `settled`, on the running event loop."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                if self._is_settled:
                    return True
                waiter = self._waiter()
            try:
                async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                    await waiter
            except TimeoutError:
                return False

    @property
    def _is_settled(self) -> bool:
        return self._ending is not None or (self._is_paused and not self._num_asked)

    def _waiter(self) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters = [(each, other) for each, other in self._waiters if not other.cancelled()]
        self._waiters.append((loop, waiter))
        return waiter

    def whole(self) -> RequestOutput:
        """Everything so far, whatever was read."""
        with self._changed:
            return self._output([Mark()] * len(self._builders))

    def _take(self) -> RequestOutput | None:
        if not self._has_news:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return None
        self._has_news = False
        if self._kind is not RequestOutputKind.DELTA:
            return self._output([Mark()] * len(self._builders))
        found = self._output(self._marks, only_new=True)
        self._marks = [builder.end for builder in self._builders]
        return found

    def _output(self, marks: Sequence[Mark], *, only_new: bool = False) -> RequestOutput:
        job, builders, streams = self._job, self._builders, self._streams
        num_tokens = sum(builder.num_tokens for builder in builders)
        metrics = RequestMetrics.of(spanning([stream.timings for stream in streams]), num_tokens) if streams else None
        return RequestOutput(
            job.prompt.text,
            job.prompt.ids,
            tuple(
                builder.output(mark)
                for builder, mark in zip(builders, marks, strict=True)
                if not only_new or builder.end != mark or builder.finished is not None
            ),
            request_id=self._request_id,
            finished=self._ending is not None,
            metrics=metrics,
            num_cached_tokens=min((stream.num_cached_tokens for stream in streams), default=0),
            prompt_logprobs=builders[0].prompt_logprobs,
        )


def _resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
