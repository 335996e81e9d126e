"""What an earlier router has left on the shards of all replicas: outputs of sequences, and rows. Event loop only.

Requests that are replayed claim both by their output keys, which begin with the key of their journal. Rows compute
nothing until each was claimed or its request has ended, at most for `HOLD_SECONDS`.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum

from funitel.proto.takeover.state import SequenceOutputs
from funitel.router.engine.engine import Engine

logger = logging.getLogger(__name__)

START_SECONDS = 30.0  # for replays to begin, once the shards are ready
HOLD_SECONDS = 5.0  # for them to claim what they have


class TakenUp(StrEnum):
    """How a sequence of an earlier router goes on."""

    ENDED = "ended"  # it had ended: its outputs are delivered
    HELD = "held"  # in its row
    RESUMED = "resumed"  # behind its tokens, which are computed again
    RECOMPUTED = "recomputed"  # from its beginning


def journal_key(output_key: str) -> str:
    """The key of the journal of the request that an output key belongs to."""
    return output_key.rpartition("/")[0]


class KeptSequences:
    """The sequences of an earlier router that no request has claimed.

    Args:
        outputs: by output key.
        engines: those that may hold rows.
        release: takes output keys that are not needed any more.
    """

    def __init__(
        self,
        outputs: Mapping[str, SequenceOutputs] | None = None,
        engines: Sequence[Engine] = (),
        release: Callable[[Iterable[str]], None] = lambda keys: None,
    ) -> None:
        self._outputs = dict(outputs or {})
        self._engines = engines
        self._release = release
        self._awaited: set[str] | None = None  # journals of requests that are replayed, once they are known
        self._began = time.monotonic()
        self._counts: Counter[TakenUp] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._is_settled = not self._outputs and not any(engine.held for engine in engines)
        if not self._is_settled:
            self._timer = asyncio.get_running_loop().call_later(START_SECONDS, self._settle)

    def claim(self, output_key: str) -> SequenceOutputs | None:
        """Take the outputs of a sequence; None where none are kept."""
        return self._outputs.pop(output_key, None)

    def count(self, how: TakenUp) -> None:
        """Count a sequence that goes on."""
        self._counts[how] += 1
        self._settle_if_complete()

    def begin(self, journals: Collection[str]) -> None:
        """The requests of these journals are replayed from now on: what belongs to no other one is not needed."""
        if self._awaited is not None:
            return
        self._awaited = set(journals)
        self._drop_unawaited()
        if self._is_settled:
            return
        assert self._timer is not None, "it is set until all is settled"
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._settle)
        self._settle_if_complete()

    def end(self, journal: str) -> None:
        """The request of a journal has ended: what it has not claimed is not needed."""
        if self._awaited is None or journal not in self._awaited:
            return
        self._awaited.remove(journal)
        self._drop_unawaited()
        self._settle_if_complete()

    def _drop_unawaited(self) -> None:
        assert self._awaited is not None, "replays have begun"
        left = [key for key in self._outputs if journal_key(key) not in self._awaited]
        for key in left:
            del self._outputs[key]
        self._release(left)
        for engine in self._engines:
            engine.held.drop_all_but([key for key in engine.held.keys if journal_key(key) in self._awaited])

    def _settle_if_complete(self) -> None:
        if self._awaited is None or self._is_settled:
            return
        if not self._outputs and not any(engine.held for engine in self._engines):
            self._settle()

    def _settle(self) -> None:
        """Let steps begin: rows that no request has claimed are dropped."""
        self._is_settled = True
        if self._timer is not None:
            self._timer.cancel()
        for engine in self._engines:
            engine.begin()
        numbers = " ".join(f"{how}={self._counts[how]}" for how in TakenUp)
        seconds = time.monotonic() - self._began
        logger.info("took over sequences=%d %s seconds=%.3f", self._counts.total(), numbers, seconds)
