"""The stream the answer of one request arrives on, and the instants of its life. Event loop only."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType

from funitel.proto import tracing
from funitel.proto.errors import FunitelError, Incomplete
from funitel.proto.step import Generation
from funitel.router.sequence import Request


@dataclass(slots=True)
class Timings:
    """Instants of a request's life on the monotonic clock, in seconds."""

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None  # first step that computes its tokens was planned
    first_token: float | None = None
    finished: float | None = None

    @property
    def queue_seconds(self) -> float:
        """Submitted until started."""
        return (self.started or time.monotonic()) - self.submitted

    @property
    def inference_seconds(self) -> float:
        """Started until finished."""
        end = self.finished or time.monotonic()
        return end - (self.started or end)


class TokenStream:
    """The answer of one request: iterate for its generations; leaving the `async with` early cancels it.

    The last generation carries `finished`. Iteration raises the FunitelError that ended the request otherwise.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self.request = request
        self.timings = Timings()
        self.num_cached_tokens = 0  # of the prompt, found computed by an earlier request
        self._cancel = cancel
        self._place = tracing.current()
        self._events: asyncio.Queue[Generation | FunitelError] = asyncio.Queue()
        self._done = False

    def deliver(self, event: Generation | FunitelError) -> None:
        """Hand over the next event; called by the engine on the event loop."""
        now = time.monotonic()
        if isinstance(event, FunitelError):
            self._end(now)
        else:
            self.timings.first_token = self.timings.first_token or now
            if event.finished is not None:
                self._end(now)
        self._events.put_nowait(event)

    def _end(self, now: float) -> None:
        self._done = True
        self.timings.finished = now
        self._trace(now)

    def _trace(self, now: float) -> None:
        """Record what this request waited for, and how long it was computed."""
        submitted, started = self.timings.submitted, self.timings.started
        tracing.record("queued", self._place, submitted, started or now)
        if started is not None:
            tracing.record("infer", self._place, started, now)

    async def __aenter__(self) -> "TokenStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            self._done = True
            self._trace(time.monotonic())
            self._cancel()

    async def __aiter__(self) -> AsyncIterator[Generation]:
        while True:
            event = await self._events.get()
            if isinstance(event, FunitelError):
                raise event
            yield event
            if event.finished is not None:
                return

    async def last(self) -> Generation:
        """Run to the end and return the last generation."""
        async for generation in self:
            if generation.finished is not None:
                return generation
        raise Incomplete("the stream ended without its last token")
