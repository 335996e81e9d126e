"""The encoder queue: texts that wait to be encoded, and the next batch of them. Pure.

The request with the fewest tokens served is next, so that a request of thousands of texts does not delay one of a
single text. An incoming request begins level with the others, a step of priority before or behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from funitel.proto.step import EncoderInput, EncoderTask

PRIORITY_TOKENS = 1024  # of a step of priority


@dataclass(eq=False, slots=True)
class Submission:
    """The texts of one request. `waiting` are the places of those not in a batch yet, the longest last."""

    id: int
    task: EncoderTask
    inputs: Sequence[EncoderInput]
    priority: int = 0
    waiting: list[int] = field(default_factory=list)
    is_gone: bool = False
    num_losses: int = 0  # replicas that were lost, in a row, while they had texts of it
    lost_with: object = None  # the last of them, which may have had several batches of it

    def __post_init__(self) -> None:
        self.waiting = sorted(range(len(self.inputs)), key=lambda place: (len(self.inputs[place].input_ids), -place))

    @property
    def num_tokens(self) -> int:
        """Tokens of all its texts."""
        return sum(len(text.input_ids) for text in self.inputs)


class QueuedText(NamedTuple):
    """One text of a submission, by its place there."""

    submission: Submission
    place: int

    @property
    def input(self) -> EncoderInput:
        """The input of the shard."""
        return self.submission.inputs[self.place]


class EncoderQueue:
    """Submissions with waiting texts.

    Args:
        max_tokens: maximum of tokens in a batch; a longer text is alone in one.
        max_texts: maximum of texts in a batch; None for no limit.
    """

    def __init__(self, max_tokens: int, max_texts: int | None = None) -> None:
        self.num_tokens = 0  # of all that waits
        self.num_texts = 0
        self._max_tokens = max_tokens
        self._max_texts = max_texts
        self._turns: list[tuple[int, int, Submission]] = []  # tokens got, id; a heap
        self._now = 0  # where incoming ones begin: tokens each has got; grows while only those are served

    def add(self, submission: Submission) -> None:
        """Queue a submission, which must have a text."""
        self._count(submission, submission.waiting, 1)
        heappush(self._turns, (self._now + submission.priority * PRIORITY_TOKENS, submission.id, submission))

    def remove(self, submission: Submission) -> None:
        """Forget the waiting texts of a submission that has ended."""
        submission.is_gone = True
        self._count(submission, submission.waiting, -1)
        submission.waiting.clear()

    def give_back(self, texts: Sequence[QueuedText]) -> None:
        """Queue texts of a lost batch again, at the head of their submissions."""
        for submission, place in texts:
            if submission.is_gone:
                continue
            if not submission.waiting:
                heappush(self._turns, (self._now, submission.id, submission))
            submission.waiting.append(place)
            self._count(submission, [place], 1)

    def plan(self) -> list[QueuedText]:
        """Return the texts of the next batch, all of one task; none when nothing waits."""
        batch: list[QueuedText] = []
        passed = []  # those that are next and have another task
        left = self._max_tokens
        while self._turns and (self._max_texts is None or len(batch) < self._max_texts):
            got, id, submission = self._turns[0]
            if not submission.waiting or (batch and submission.task is not batch[0].submission.task):
                heappop(self._turns)
                if submission.waiting:
                    passed.append((got, id, submission))
                continue
            place = submission.waiting[-1]
            length = len(submission.inputs[place].input_ids)
            if batch and length > left:
                break
            heappop(self._turns)
            submission.waiting.pop()
            self._count(submission, [place], -1)
            batch.append(QueuedText(submission, place))
            left -= length
            self._now = max(self._now, got) - (-length // (len(self._turns) + 1))
            if submission.waiting:
                heappush(self._turns, (got + length, id, submission))
        for turn in passed:
            heappush(self._turns, turn)
        return batch

    def _count(self, submission: Submission, places: Sequence[int], sign: int) -> None:
        self.num_texts += sign * len(places)
        self.num_tokens += sign * sum(len(submission.inputs[place].input_ids) for place in places)
