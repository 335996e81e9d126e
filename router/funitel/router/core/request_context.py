"""The context of one HTTP request: facts that are collected while it is answered, for the access log and traces.

It holds no text of the prompt or of the answer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from funitel.proto.errors import FunitelError
from funitel.router.core.journal import UNKEPT, RequestJournal
from funitel.router.core.request import Request
from funitel.router.core.stream import Timings

T = TypeVar("T")  # of JSON


@dataclass(slots=True)
class RequestContext:
    """Facts of one request; those that are not known have their defaults."""

    request_id: str = ""
    trace_id: str | None = None  # where it is traced
    key_name: str | None = None  # of its API key
    owner: bytes = b""  # of its API key or token, as a hash
    operation: str = ""  # GenAI's name of it: `chat`, `text_completion`, `embeddings`
    model: str | None = None
    served_model: str | None = None  # that was chosen of several
    load_seconds: float | None = None  # that it waited for the model
    response_id: str | None = None
    request: Request | None = None  # the first prompt, and how it is sampled
    num_choices: int = 1
    encoded_tokens: int = 0  # of long texts, which are charged even if they get no further
    prompt_tokens: int | None = None  # of all prompts, each counted once
    cached_tokens: int = 0  # of those, in the cached prefix
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)  # the same, see `TokenStream`
    tokens: int = 0  # generated, of all sequences
    finish_reasons: Sequence[str] = ()
    validation_seconds: float = 0.0
    timings: Timings | None = None
    error: FunitelError | None = None  # that it ended with; Cancelled when its client left
    journal: RequestJournal = UNKEPT

    def name_answer(self, response_id: str, model: str) -> None:
        """Set the id of the answer, and the model."""
        self.response_id, self.model = response_id, model

    @property
    def first_token_seconds(self) -> float | None:
        """Time to first token, from the arrival of the request."""
        timings = self.timings
        if timings is None or timings.first_token is None:
            return None
        return self.validation_seconds + timings.first_token - timings.submitted


_current: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def current() -> RequestContext:
    """Return the context of the request that is being answered; a new one, which is not kept, outside of requests."""
    return _current.get() or RequestContext()


def drawn(name: str, make: Callable[[], T]) -> T:
    """Return a fact of the request that is being answered, see `RequestJournal.draw`."""
    return current().journal.draw(name, make)


@contextmanager
def request_context(request_id: str) -> Iterator[RequestContext]:
    """Make a new context current while the block runs."""
    context = RequestContext(request_id)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
