"""Queries that advance a step at a time, in which the caller chooses every token; what computes is elsewhere."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import FinishReason, Generation
from funitel.router.core.request import Request

MAX_QUERIES = 16
MAX_STEP_TOKENS = 256
MAX_ID = 10_000
IDLE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a step gave for one query.

    Attributes:
        token_id: the token that the query's sampling chose.
        text: its text.
        logprob: its log-probability under the model.
        candidates: the likeliest tokens, as many as the query asks for: ids, texts, log-probabilities.
        is_end: whether it ends the text: the model's end of text, a stop, or the last token that the query may have.
    """

    query_id: int
    token_id: int
    text: str
    logprob: float
    candidates: tuple[tuple[int, str, float], ...]
    is_end: bool


@dataclass(slots=True, eq=False)
class _Query:
    request: Request
    tokens: list[int] = field(default_factory=list)  # committed
    num_computed: int = 0  # tokens that earlier steps have computed
    awaits_commit: bool = False
    used: float = field(default_factory=time.monotonic)  # when a call last named or advanced it

    @property
    def num_known(self) -> int:
        return len(self.request.input_ids) + len(self.tokens)

    @property
    def max_new_tokens(self) -> int:
        return self.request.stopping.max_new_tokens


@dataclass(frozen=True, slots=True)
class PlannedQuery:
    """What a step computes of one query: `request` brings one token."""

    query_id: int
    request: Request
    count: int  # of tokens computed
    query: _Query


class QueryTable:
    """Queries that advance together. A step is what `plan` says, computed by the caller and given to `settle`.

    What a query has computed is found again in the prefix cache; its blocks are free between two steps.
    """

    def __init__(self, *, max_queries: int = MAX_QUERIES, max_step_tokens: int = MAX_STEP_TOKENS) -> None:
        """Begin without queries.

        Args:
            max_queries: that are there at once.
            max_step_tokens: of all queries in one step; longer prompts take several.
        """
        for name, value in (("max_queries", max_queries), ("max_step_tokens", max_step_tokens)):
            if value < 1:
                raise InvalidRequest(f"{name} must be an integer >= 1, given {value!r}", name)
        self.max_queries = max_queries
        self._max_step_tokens = max_step_tokens
        self._queries: dict[int, _Query] = {}
        self._last_id = 0

    @property
    def is_full(self) -> bool:
        """Whether there are `max_queries`."""
        return len(self._queries) >= self.max_queries

    def add(self, request: Request) -> int:
        """Add a query; return its id, which is > 0, or 0 where there are `max_queries`.

        Raises:
            InvalidRequest: the sampling has a memory beside the tokens.
        """
        strategy = request.sampling.strategy
        if strategy is not None and strategy.mirostat:
            raise InvalidRequest(
                f"mirostat must be 0 for a query: its memory is of the tokens it chose, given {strategy.mirostat}",
                "mirostat",
            )
        if self.is_full:
            return 0
        while True:
            self._last_id = self._last_id % MAX_ID + 1
            if self._last_id not in self._queries:
                break
        self._queries[self._last_id] = _Query(request)
        return self._last_id

    def plan(self, ids: Collection[int] | None = None) -> list[PlannedQuery]:
        """Plan one step of some queries, or of all, in the order of their ids, within `max_step_tokens`.

        Raises:
            InvalidRequest: a query is not there.
        """
        unknown = next((query_id for query_id in ids or () if query_id not in self._queries), None)
        if unknown is not None:
            raise InvalidRequest(f"there is no query {unknown}", "ids")
        left = self._max_step_tokens
        planned = []
        for query_id, query in sorted(self._queries.items()):
            if ids is not None and query_id not in ids:
                continue
            query.used = time.monotonic()
            pending = 1 if query.awaits_commit else query.num_known - query.num_computed
            count = min(pending, left)
            if count <= 0 or len(query.tokens) >= query.max_new_tokens:
                continue
            left -= count
            planned.append(PlannedQuery(query_id, _request(query, count), count, query))
        return planned

    def settle(self, planned: Sequence[PlannedQuery], generations: Sequence[Generation]) -> list[QueryResult]:
        """Note a computed step; return the results of those queries that have one.

        A query has no result before its prompt is computed. A result that was not committed comes again.
        """
        results = []
        for each, generation in zip(planned, generations, strict=True):
            query = each.query
            if self._queries.get(each.query_id) is not query or not generation.tokens.ids:  # removed, or aborted
                continue
            if not query.awaits_commit:
                query.num_computed += each.count
            if query.num_computed == query.num_known:
                query.awaits_commit = True
                results.append(_result(each.query_id, query, generation))
        return results

    def commit(self, tokens: Mapping[int, tuple[int, bool]], vocab_size: int) -> None:
        """Go on with the tokens that the caller chose: by query, the token and whether it is the last.

        A query that has its last token is removed.

        Raises:
            InvalidRequest: a query is not there, has no result that was not committed, or a token is unknown; nothing
                was committed.
        """
        for query_id, (token_id, _) in tokens.items():
            query = self._queries.get(query_id)
            if query is None or not query.awaits_commit:
                raise InvalidRequest(f"query {query_id} has no result to commit a token for", "tokens")
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"query {query_id}: tokens must be within 0..{vocab_size - 1}, given {token_id}", "tokens"
                )
        for query_id, (token_id, is_end) in tokens.items():
            query = self._queries[query_id]
            query.tokens.append(token_id)
            query.awaits_commit = False
            query.used = time.monotonic()
            if is_end:
                del self._queries[query_id]

    def remove(self, query_id: int) -> bool:
        """Remove a query; whether it was there."""
        return self._queries.pop(query_id, None) is not None

    def remove_unused(self, since: float) -> None:
        """Remove the queries that no call has used since an instant of the monotonic clock."""
        for query_id in [query_id for query_id, query in self._queries.items() if query.used < since]:
            del self._queries[query_id]

    def __len__(self) -> int:
        return len(self._queries)


def _request(query: _Query, count: int) -> Request:
    """What computes so many more tokens of a query, and one new one."""
    request = query.request
    known = query.num_known if query.awaits_commit else query.num_computed + count
    num_prompt = len(request.input_ids)
    if known < num_prompt:  # its token is of no use
        return replace(
            request,
            input_ids=request.input_ids[:known],
            stopping=replace(request.stopping, max_new_tokens=1),
            top_n_tokens=0,
            speculate=0,
        )
    output_ids = tuple(islice(query.tokens, known - num_prompt))
    stopping = replace(request.stopping, max_new_tokens=len(output_ids) + 1)
    return replace(request, output_ids=output_ids, stopping=stopping, speculate=0)


def _result(query_id: int, query: _Query, generation: Generation) -> QueryResult:
    tokens, finished = generation.tokens, generation.finished
    is_end = len(query.tokens) + 1 >= query.max_new_tokens
    if finished is not None and (finished.finish_reason is not FinishReason.LENGTH or finished.stop_start is not None):
        is_end = True
    top = generation.top_tokens[0] if generation.top_tokens else None
    candidates = () if top is None else tuple(zip(top.ids, top.texts, top.logprobs, strict=True))
    return QueryResult(query_id, tokens.ids[0], tokens.texts[0], tokens.logprobs[0], candidates, is_end)


class StepSession:
    """The queries of one API key; what works on them holds `lock`."""

    def __init__(self) -> None:
        self.queries = QueryTable()
        self.lock = asyncio.Lock()


class StepSessions:
    """The queries of all API keys. Those that no call has used for `IDLE_SECONDS` are removed. Event loop only."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[bytes, str], StepSession] = {}

    def of(self, owner: bytes, model: str = "") -> StepSession:
        """The queries of an owner with a model: the hash of its key, or empty where no key is asked for."""
        place = owner, model
        since = time.monotonic() - IDLE_SECONDS
        for known, session in list(self._sessions.items()):
            if session.lock.locked():
                continue
            session.queries.remove_unused(since)
            if known != place and not len(session.queries):
                del self._sessions[known]
        return self._sessions.setdefault(place, StepSession())
