"""What an answer can say of its own speed."""

from dataclasses import astuple, dataclass
from typing import Self

from funitel.router.core.request_context import drawn
from funitel.router.core.stream import Timings


@dataclass(frozen=True, slots=True)
class AnswerTimings:
    """Times of an answer in seconds. `None`: it was aborted before its first token.

    Attributes:
        queue_seconds: in the queue, until its first step.
        time_to_first_token_seconds: from the arrival of the request.
        total_seconds: from the arrival to the last token.
        tokens_per_second: completion tokens of all choices, by the seconds from the first step to the last token.
    """

    queue_seconds: float
    time_to_first_token_seconds: float | None
    total_seconds: float
    tokens_per_second: float | None

    @classmethod
    def of(cls, validation_seconds: float, life: Timings, num_tokens: int) -> Self:
        """The timings of an answer that has ended.

        Args:
            validation_seconds: arrival until queued.
            life: of its sequences together.
            num_tokens: of all of them.
        """
        first = None if life.first_token is None else validation_seconds + life.first_token - life.submitted
        total = validation_seconds + life.queue_seconds + life.inference_seconds
        speed = None if first is None else num_tokens / max(life.inference_seconds, 1e-6)
        return cls(life.queue_seconds, first, total, speed)

    def told(self) -> Self:
        """These timings, to be told in the answer; of a request that is replayed those that an earlier router told."""
        return type(self)(*drawn("timings", lambda: list(astuple(self))))
