"""Handles of requests that were started: their results, and what changes their course."""

import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Protocol

from funitel.llm.calls import CompletionJob
from funitel.llm.outputs import RequestOutput
from funitel.llm.results import RequestResults, RequestState
from funitel.proto.errors import Cancelled, FunitelError
from funitel.router.core.stream import Event, TokenStream
from funitel.router.engine.engine import Engine


class Posts(Protocol):
    """What runs calls on the engine's thread, in the order in which they were posted."""

    def post(self, call: Callable[[], None]) -> None:
        """Run a call soon; raises NotReady once the engine is closed."""

    def post_if_open(self, call: Callable[[], None]) -> None:
        """Run a call soon, unless the engine is closed; takes no lock."""


class StartedRequest:
    """The sequences of a request on the engine's thread, where all its methods are called."""

    def __init__(self, job: CompletionJob, results: RequestResults) -> None:
        self._job = job
        self._results = results
        self._streams: list[TokenStream] = []
        self._engine: Engine | None = None

    def begin(self, engine: Engine) -> None:
        """Queue all sequences or none."""
        self._engine = engine
        try:
            for request in self._job.requests:
                self._streams.append(engine.submit(request))
        except FunitelError as error:
            self._leave()
            self._results.fail(error)
            return
        self._results.begin(self._streams)
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._receive, index))

    def stop(self) -> None:
        """End every sequence with what it has."""
        for stream in self._streams:
            stream.stop()

    def abort(self) -> None:
        """End every sequence and drop what it has."""
        self._leave()
        self._results.drop()

    def pause(self) -> None:
        """Compute nothing more until it is resumed."""
        engine = self._engine
        changed = engine is not None and [stream for stream in self._streams if engine.paused.pause(stream)]
        self._results.carry_out(True if changed else None)

    def resume(self) -> None:
        """Go on."""
        engine = self._engine
        changed = engine is not None and [stream for stream in self._streams if engine.paused.resume(stream)]
        self._results.carry_out(False if changed else None)

    def _receive(self, index: int, event: Event, now: float) -> None:
        if isinstance(event, FunitelError):
            self._leave()
            self._results.fail(event)
        else:
            self._results.feed(index, event)

    def _leave(self) -> None:
        for stream in self._streams:
            if not stream.has_ended:
                stream.leave(Cancelled("aborted"))


class RequestHandle:
    """A request that was started. Every method may be called from any thread, and beside any event loop.

    `stop`, `abort`, `pause` and `resume` return at once. They take effect in their order, between two steps, and do
    nothing once the request has ended. A handle that is dropped aborts its request.
    """

    def __init__(
        self, request_id: str, started: StartedRequest, results: RequestResults, thread: Posts, model: object
    ) -> None:
        """Make the handle of a request that `thread` begins; `model` is kept from garbage collection."""
        self._model = model
        self.request_id = request_id
        self._started = started
        self._results = results
        self._thread = thread
        self._finalizer = weakref.finalize(self, thread.post_if_open, started.abort)
        self._finalizer.atexit = False

    # Results

    @property
    def state(self) -> RequestState:
        """What the request does now."""
        return self._results.state

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state.is_last

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, of all completions."""
        return self._results.num_tokens

    def get(self, timeout: float | None = None) -> RequestOutput | None:
        """Wait for what is new since the last output, in the form of `output_kind`.

        Args:
            timeout: seconds to wait at most; None: until there is something, or the request has ended.

        Returns:
            The output; None when there was nothing within the time, or nothing is left.

        Raises:
            FunitelError: the request has failed, and all it has was read.
        """
        return self._results.take(timeout)

    def get_nowait(self) -> RequestOutput | None:
        """As `get`, without waiting."""
        return self._results.take_nowait()

    async def get_async(self) -> RequestOutput | None:
        """As `get`, on the running event loop."""
        return await self._results.take_async()

    @property
    def output(self) -> RequestOutput:
        """Everything generated so far, whatever was read."""
        return self._results.whole()

    def __iter__(self) -> Iterator[RequestOutput]:
        while (output := self.get()) is not None:
            yield output

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while (output := await self.get_async()) is not None:
            yield output

    # Course

    def stop(self) -> None:
        """End the request now and keep what it has; its completions finish with `abort`."""
        self._results.ask()
        self._thread.post_if_open(self._started.stop)

    def abort(self) -> None:
        """End the request now and drop what was not read."""
        self._results.ask()
        self._thread.post_if_open(self._started.abort)

    def pause(self) -> None:
        """Compute nothing more until `resume`; the tokens stay, the blocks of the KV pool are given up.

        It takes no place of the batch and of the queue meanwhile.
        """
        self._results.ask()
        self._thread.post_if_open(self._started.pause)

    def resume(self) -> None:
        """Go on: the text is the one that it would have been without the pause."""
        self._results.ask()
        self._thread.post_if_open(self._started.resume)

    def sync(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended, or is paused and all its tokens are here; whether it is so in time."""
        return self._results.settled(timeout)

    async def sync_async(self, timeout: float | None = None) -> bool:
        """As `sync`, on the running event loop."""
        return await self._results.settled_async(timeout)

    def release(self) -> None:
        """Free the results, and abort the request unless it has ended."""
        self._finalizer()
        self._results.drop()
