"""The journal of one HTTP request: facts that its answer depends on, and that its bytes and tokens do not tell. Pure.

Such facts are the seed, ids, times of creation, and counts of cached tokens. Another router that takes the request over
reads them, and renders the same bytes again.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")  # of JSON


class RequestJournal:
    """The journal of a request that no keeper knows: each fact is made when it is asked for, and not kept."""

    key = ""  # of the request among all that are kept; empty: it is not kept

    def draw(self, name: str, make: Callable[[], T]) -> T:
        """Return a fact, a JSON value; `make` makes it unless an earlier router did. One name is drawn once."""
        return make()

    def flush(self) -> None:
        """Hand new facts to the keeper. To be called before bytes that depend on them are written."""

    def output_key(self, place: int) -> str:
        """The key under which shards keep the outputs of a sequence of the request, by its place among all of it."""
        return ""


class KeptJournal(RequestJournal):
    """The journal of a request that a keeper knows.

    Args:
        key: of the request; no other request has ever had it.
        known: facts that an earlier router has drawn.
        put: hands facts to the keeper; they survive this process once it has returned.
    """

    def __init__(self, key: str, known: dict[str, Any], put: Callable[[dict[str, Any]], None]) -> None:
        self.key = key
        self._known = known
        self._put = put
        self._fresh: dict[str, Any] = {}  # not handed to the keeper yet

    def draw(self, name: str, make: Callable[[], T]) -> T:
        """See RequestJournal."""
        if name in self._known:
            found: T = self._known[name]
            return found
        made = self._known[name] = self._fresh[name] = make()
        return made

    def flush(self) -> None:
        """See RequestJournal."""
        if self._fresh:
            fresh, self._fresh = self._fresh, {}
            self._put(fresh)

    def output_key(self, place: int) -> str:
        """See RequestJournal."""
        return f"{self.key}/{place}"


UNKEPT = RequestJournal()
