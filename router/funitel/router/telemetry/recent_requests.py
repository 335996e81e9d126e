"""The requests that ended last: what the access log says of each, kept for the console. Event loop only.

No word of a prompt or an answer is kept.
"""

import time
from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import count

from funitel.proto.errors import Cancelled
from funitel.router.core.request_context import RequestContext

MAX_REQUESTS = 500
_serials = count(1)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One request and its parts in seconds, None for one that was not reached.

    Attributes:
        ended: Unix time.
        arrival_seconds: until it was submitted: tokenized and validated.
        queue_seconds: until its first step.
        prefill_seconds: from there until the first token.
        decode_seconds: from the first token to the last.
        owner: of its API key, as a hash; empty where none is asked for.
    """

    route: str
    status: int
    total_seconds: float
    owner: bytes
    id: str
    model: str | None
    key: str | None
    error: str | None
    finish: str | None
    prompt_tokens: int | None
    cached_tokens: int
    tokens: int
    arrival_seconds: float
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    first_token_seconds: float | None
    ended: float = field(default_factory=time.time)
    serial: int = field(default_factory=lambda: next(_serials))

    @classmethod
    def of(cls, route: str, status: int, context: RequestContext, total_seconds: float) -> "EndedRequest":
        """What is known of a request at its end."""
        timings, error = context.timings, context.error
        started = first = last = None
        if timings is not None:
            started, first, last = timings.started, timings.first_token, timings.finished or timings.latest
        return cls(
            route=route,
            status=status or Cancelled.http_status,
            total_seconds=total_seconds,
            owner=context.owner,
            id=context.request_id,
            model=context.served_model or context.model,
            key=context.key_name,
            error=None if error is None else type(error).__name__,
            finish=",".join(context.finish_reasons) or None,
            prompt_tokens=context.prompt_tokens,
            cached_tokens=context.cached_tokens,
            tokens=context.tokens,
            arrival_seconds=context.validation_seconds,
            queue_seconds=None if timings is None or started is None else started - timings.submitted,
            prefill_seconds=None if started is None or first is None else first - started,
            decode_seconds=None if first is None or last is None else last - first,
            first_token_seconds=context.first_token_seconds,
        )


class RecentRequests:
    """The last requests to a model."""

    def __init__(self) -> None:
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)

    def add(self, request: EndedRequest) -> None:
        """Keep one that has ended."""
        self._requests.append(request)

    def of(self, owners: Container[bytes] | None) -> Iterator[EndedRequest]:
        """Those of the API keys of owners, the newest first; None for all."""
        return (each for each in reversed(self._requests) if owners is None or each.owner in owners)
