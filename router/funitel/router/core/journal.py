"""The journal of one HTTP request: facts that its answer depends on, and that its bytes and tokens do not tell. Pure.

Such facts are the seed, ids, times of creation, and counts of cached tokens. Another router that takes the request over
reads them, and renders the same bytes again.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")  # of JSON

REQUEST_ID_FACT = "request_id"  # of the journal of a request
KEY = "key"  # of the facts: the key of the request
EARLIER = "funitel.earlier"  # in a request's scope: the facts that an earlier router has left of it


def earlier_facts(scope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts that an earlier router has left of the request of a scope; none where it has left no request."""
    found: Mapping[str, Any] = scope.get(EARLIER) or {}
    return found


def is_replayed(scope: Mapping[str, Any]) -> bool:
    """Whether an earlier router has begun to answer the request of a scope: it was admitted there."""
    return KEY in earlier_facts(scope)


class RequestJournal:
    """The journal of a request that no keeper knows: each fact is made when it is asked for, and not kept."""

    key = ""  # of the request among all that are kept; empty: it is not kept
    is_replayed = False  # an earlier router has begun to answer it

    @property
    def is_behind(self) -> bool:
        """Whether the client has further bytes of the answer, which an earlier router has written."""
        return False

    def draw(self, name: str, make: Callable[[], T]) -> T:
        """Return a fact, a JSON value; `make` makes it unless an earlier router did. One name is drawn once."""
        return make()

    def draw_next(self, name: str, make: Callable[[], T]) -> T:
        """Return the next fact of a name that is drawn several times, in the same order in every router."""
        return make()

    def knows(self, name: str) -> bool:
        """Whether a fact was drawn."""
        return False

    def flush(self) -> None:
        """Hand new facts to the keeper. To be called before bytes that depend on them are written."""

    def output_key(self) -> str:
        """The key under which shards keep the outputs of the next sequence of the request; empty: they keep none."""
        return ""

    def when_done(self, call: Callable[[], None]) -> None:
        """Call something once nothing of the answer can be needed again; never, of a request that is not kept."""

    def keep_no_outputs(self) -> None:
        """The answer depends on no output of a shard."""


class KeptJournal(RequestJournal):
    """The journal of a request that a keeper knows.

    Args:
        key: of the request; no other request has ever had it.
        known: facts that an earlier router has drawn.
        put: hands facts to the keeper; they survive this process once it has returned.
        is_replayed: an earlier router has begun to answer the request.
    """

    def __init__(
        self, key: str, known: dict[str, Any], put: Callable[[dict[str, Any]], None], *, is_replayed: bool = False
    ) -> None:
        self.key = key
        self.is_replayed = is_replayed
        self._on_done: list[Callable[[], None]] = []
        self._known = known
        self._put = put
        self._fresh: dict[str, Any] = {}  # not handed to the keeper yet
        self._num_outputs = 0
        self._keeps_outputs = True
        self._is_done = False
        self._num_drawn: Counter[str] = Counter()

    def draw(self, name: str, make: Callable[[], T]) -> T:
        """See RequestJournal."""
        if name in self._known:
            found: T = self._known[name]
            return found
        made = self._known[name] = self._fresh[name] = make()
        return made

    def draw_next(self, name: str, make: Callable[[], T]) -> T:
        """See RequestJournal."""
        self._num_drawn[name] += 1
        return self.draw(f"{name}.{self._num_drawn[name]}", make)

    def knows(self, name: str) -> bool:
        """See RequestJournal."""
        return name in self._known

    def flush(self) -> None:
        """See RequestJournal."""
        if self._fresh and not self._is_done:
            fresh, self._fresh = self._fresh, {}
            self._put(fresh)

    def keep_no_outputs(self) -> None:
        """See RequestJournal."""
        self._keeps_outputs = False

    def output_key(self) -> str:
        """See RequestJournal."""
        if not self._keeps_outputs:
            return ""
        self._num_outputs += 1
        return f"{self.key}/{self._num_outputs}"

    def when_done(self, call: Callable[[], None]) -> None:
        """See RequestJournal."""
        if self._is_done:
            call()
        else:
            self._on_done.append(call)

    def done(self) -> None:
        """Call what waits for the end of the answer; later facts, of work that goes on behind it, are not kept."""
        self._is_done = True
        calls, self._on_done = self._on_done, []
        for call in calls:
            call()


UNKEPT = RequestJournal()
