"""What becomes known of one HTTP request on its way, for those who tell of it at its end: traces and the log.

Whoever learns something writes it down in the note of the request that is being answered. It holds no words of the
prompt or of the answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from funitel.proto.errors import FunitelError
from funitel.router.core.request import Request
from funitel.router.core.stream import Timings


@dataclass(slots=True)
class RequestContext:
    """One request; what was not found out has its default."""

    request_id: str = ""
    trace_id: str | None = None  # where it is traced
    key_name: str | None = None  # of the API key it was let in by
    operation: str = ""  # GenAI's word for what it asks: `chat`, `text_completion`, `embeddings`
    model: str | None = None  # that it is asked of
    response_id: str | None = None
    request: Request | None = None  # the first prompt, and how it is sampled
    num_choices: int = 1
    prompt_tokens: int | None = None  # of all prompts, each counted once
    cached_tokens: int = 0  # of those, found computed
    tokens: int = 0  # generated, of all sequences
    finish_reasons: Sequence[str] = ()
    validation_seconds: float = 0.0
    timings: Timings | None = None
    error: FunitelError | None = None  # what it was answered with, or ended by; Cancelled when its client left

    def name_answer(self, response_id: str, model: str) -> None:
        """Write down what the answer calls itself, and the model."""
        self.response_id, self.model = response_id, model

    @property
    def first_token_seconds(self) -> float | None:
        """Arrival until the first token was there."""
        timings = self.timings
        if timings is None or timings.first_token is None:
            return None
        return self.validation_seconds + timings.first_token - timings.submitted


_current: ContextVar[RequestContext | None] = ContextVar("note", default=None)


def current() -> RequestContext:
    """The note of the request that the caller works for; one that nobody reads where there is none."""
    return _current.get() or RequestContext()


@contextmanager
def noting(request_id: str) -> Iterator[RequestContext]:
    """Answer a request within the `with`; what is learnt of it is in its note."""
    note = RequestContext(request_id)
    token = _current.set(note)
    try:
        yield note
    finally:
        _current.reset(token)
