"""The token stream of one request, and its timings. Event loop only."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from funitel.proto.errors import Cancelled, FunitelError, Incomplete
from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens
from funitel.proto.takeover.state import OutputStep
from funitel.router.core.request import Request
from funitel.router.core.request_trace import RequestTrace


@dataclass(slots=True)
class Timings:
    """Instants of a request on the monotonic clock, in seconds."""

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None  # first step that computes its tokens was planned
    first_token: float | None = None
    latest: float | None = None  # token
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


Event = Generation | FunitelError
Listener = Callable[[Event, float], None]  # takes an event, and the instant of its delivery


def total_by_tier(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up `TokenStream.cached_by_tier` of several prompts."""
    found: dict[str, int] = {}
    for each in counts:
        for tier, count in each.items():
            found[tier] = found.get(tier, 0) + count
    return found


class TokenStream:
    """The answer of one request: listen to it, or iterate over its generations; leaving `async with` early cancels it.

    The last generation carries `finished`. A request that ends otherwise ends with a FunitelError, which iteration
    raises. A listener is called with each event as it is delivered, without a task that wakes up.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self.request = request
        self.timings = Timings()
        self.num_cached_tokens = 0  # of the prompt, in the cached prefix
        self.cached_by_tier: dict[str, int] = {}  # the same by where they were found, if there are several tiers
        self.sequence_id = -1  # in the table that has it
        self._cancel = cancel
        self.trace = RequestTrace.of_caller()
        self.num_tokens = 0  # delivered
        self._listener: Listener | None = None
        # One task iterates, so a deque and a future suffice; asyncio.Queue costs several times as much per token.
        self._events: deque[Event] = deque()
        self._recorded: deque[OutputStep] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._done = False
        self._is_exhausted = False

    @property
    def has_ended(self) -> bool:
        """Whether the last event was delivered, or the reader has left."""
        return self._done

    def move(self, cancel: Callable[[], None], why: str = "moved") -> None:
        """Continue the answer elsewhere, where `cancel` ends it; `why` as `RequestTrace.wait_again` takes it."""
        self._cancel = cancel
        if self.trace is not None:
            self.trace.wait_again(why)

    def stop(self) -> None:
        """End the answer now with the tokens it has, wherever its sequence is; does nothing once it has ended."""
        if self._done:
            return
        self._cancel()
        sampling = self.request.sampling
        seed = sampling.seed if sampling.is_sampled else None
        ending = GeneratedText("", self.num_tokens, FinishReason.ABORT, seed)
        self.deliver(Generation(self.sequence_id, Tokens((), (), ()), finished=ending))

    def record(self, steps: Iterable[OutputStep]) -> None:
        """Put the generations of an earlier router before all others; nothing was delivered yet.

        The answer has ended if the last of them has.
        """
        now = time.monotonic()
        self._recorded.extend(steps)
        if not self._recorded:
            return
        self.num_tokens += sum([len(each.generation.tokens.ids) for each in self._recorded])
        timings = self.timings
        timings.started = timings.first_token = timings.latest = now
        if self._recorded[-1].generation.finished is not None:
            self._end(now)

    def take_recorded(self) -> list[OutputStep]:
        """Take the generations of an earlier router out, before anything listens: siblings have theirs in turns."""
        taken = list(self._recorded)
        self._recorded.clear()
        return taken

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every event, at once with earlier ones; instead of iteration.

        It is called by the engine, between two steps: it must neither raise nor take long.
        """
        while self._recorded:
            listener(self._recorded.popleft().generation, time.monotonic())
        if self._done and not self._events:
            return  # it would refer back to this for good
        self._listener = listener
        while self._events:
            listener(self._events.popleft(), time.monotonic())

    def deliver(self, event: Event, now: float | None = None) -> None:
        """Hand over the next event; called by the engine on the event loop, with one instant for a whole step."""
        if now is None:
            now = time.monotonic()
        if isinstance(event, FunitelError):
            self._end(now, event)
        else:
            num_tokens = len(event.tokens.ids)
            self.num_tokens += num_tokens
            if num_tokens:
                timings = self.timings
                if timings.first_token is None:
                    timings.first_token = now
                timings.latest = now
                if self.trace is not None:
                    self.trace.deliver(num_tokens)
            if event.finished is not None:
                self._end(now)
        if self._listener is not None:
            listener = self._listener
            if self._done:
                self._listener = None  # it refers back to this
            listener(event, now)
            return
        self._events.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def leave(self, why: FunitelError) -> None:
        """Cancel the request; nothing is delivered any more. It must not have ended."""
        self._listener = None  # it may refer back to this
        self._end(time.monotonic(), why)
        self._cancel()

    def _end(self, now: float, error: FunitelError | None = None) -> None:
        self._done = True
        self.timings.finished = now
        if self.trace is not None:
            self.trace.end(error)

    async def __aenter__(self) -> "TokenStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._done:
            self.leave(error if isinstance(error, FunitelError) else Cancelled("left early"))  # a sibling has failed

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Generation:
        if self._is_exhausted:
            raise StopAsyncIteration
        while not self._events and not self._recorded:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        event = self._recorded.popleft().generation if self._recorded else self._events.popleft()
        if isinstance(event, FunitelError):
            self._is_exhausted = True
            raise event
        self._is_exhausted = event.finished is not None
        return event

    async def last(self) -> Generation:
        """Run to the end and return the last generation."""
        async for generation in self:
            if generation.finished is not None:
                return generation
        raise Incomplete("the stream ended without its last token")
