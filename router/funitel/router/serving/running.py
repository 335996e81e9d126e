"""The HTTP requests that run: found by id, listed, aborted, paused and resumed. Event loop only."""

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from funitel.router.core.request import is_background
from funitel.router.core.request_context import RequestContext
from funitel.router.core.stream import TokenStream
from funitel.router.engine.paused import PausedRequests


class RunningState(Enum):
    """What a request that has not ended does."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One HTTP request and the streams of its sequences."""

    context: RequestContext
    owner: bytes  # of its API key; empty where none is asked for
    streams: Sequence[TokenStream]
    paused: PausedRequests
    began: float = field(default_factory=time.monotonic)

    def has_id(self, request_id: str) -> bool:
        """Whether it has an id: that of the HTTP request, or of the answer."""
        return request_id in (self.context.request_id, self.context.response_id)

    @property
    def is_background(self) -> bool:
        """Whether it is one of a batch."""
        return any(is_background(stream.request.key) for stream in self.streams)

    @property
    def state(self) -> RunningState:
        """What its sequences do, those that have not ended."""
        streams = [stream for stream in self.streams if not stream.has_ended]
        if streams and all(stream in self.paused for stream in streams):
            return RunningState.PAUSED
        has_begun = any(stream.timings.started is not None for stream in self.streams)
        return RunningState.RUNNING if has_begun else RunningState.WAITING

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, of all sequences."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompts; one that several sequences share counts once."""
        prompts = {id(stream.request.input_ids): len(stream.request.input_ids) for stream in self.streams}
        return sum(prompts.values())

    def abort(self) -> None:
        """End every sequence with what it has; the client gets its answer up to here."""
        for stream in self.streams:
            stream.stop()

    def pause(self) -> None:
        """Compute nothing more until it is resumed; raises as `PausedRequests.pause`."""
        for stream in self.streams:
            self.paused.pause(stream)

    def resume(self) -> None:
        """Go on."""
        for stream in self.streams:
            self.paused.resume(stream)


class RunningRequests:
    """The requests that run, in the order in which they began."""

    def __init__(self) -> None:
        self._requests: dict[ActiveRequest, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def entered(self, request: ActiveRequest) -> Iterator[None]:
        """List a request as long as the block lasts."""
        self._requests[request] = None
        try:
            yield
        finally:
            del self._requests[request]

    def of(self, owners: Container[bytes] | None) -> list[ActiveRequest]:
        """The requests of the API keys of owners; None for all."""
        return [request for request in self._requests if owners is None or request.owner in owners]
