"""The class `StepQueries`: generation step by step, in which the caller chooses every token.

It has the calls of Inferflow's engine: add a query, infer a step, commit tokens, remove a query.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from funitel.llm.llm import LLM
from funitel.llm.prompts import Prompt, room_for
from funitel.llm.sampling import SamplingParams
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import FinishReason, Generation
from funitel.router.core.request import Request
from funitel.router.engine.engine import Engine

MAX_QUERIES = 16
MAX_STEP_TOKENS = 256
MAX_ID = 10_000


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What a step gave for one query.

    Attributes:
        token_id: the token that the query's sampling chose.
        text: its text.
        logprob: its log-probability under the model.
        candidates: the likeliest tokens, as many as the query's `logprobs`: ids, texts, log-probabilities.
        is_end: whether it ends the text: the model's end of text, a stop, or the last token that the context holds.
    """

    query_id: int
    token_id: int
    text: str
    logprob: float
    candidates: tuple[tuple[int, str, float], ...]
    is_end: bool


@dataclass(slots=True)
class _Query:
    request: Request
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)  # committed
    num_computed: int = 0  # tokens that earlier steps have computed
    awaits_commit: bool = False

    @property
    def num_known(self) -> int:
        return len(self.request.input_ids) + len(self.tokens)


class StepQueries:
    """Queries over an `LLM` that advance together, a step at a time. To be used by one thread.

    What a query has computed is found again in the prefix cache; its blocks are free between two steps.
    """

    def __init__(self, llm: LLM, *, max_queries: int = MAX_QUERIES, max_step_tokens: int = MAX_STEP_TOKENS) -> None:
        """Begin without queries.

        Args:
            llm: computes; it may be used otherwise at the same time.
            max_queries: that are there at once.
            max_step_tokens: of all queries in one step; longer prompts take several.
        """
        for name, value in (("max_queries", max_queries), ("max_step_tokens", max_step_tokens)):
            if value < 1:
                raise InvalidRequest(f"{name} must be an integer >= 1, given {value!r}", name)
        self._llm = llm
        self._max_queries = max_queries
        self._max_step_tokens = max_step_tokens
        self._queries: dict[int, _Query] = {}
        self._last_id = 0

    def add_query(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Add a query; return its id, which is > 0, or 0 where there are `max_queries`.

        Raises:
            InvalidRequest: the prompt or a parameter is invalid, or the sampling has a memory beside the tokens.
        """
        if len(self._queries) >= self._max_queries:
            return 0
        job = self._llm.prepared(prompt, sampling_params)
        params = job.params
        if params.n != 1:
            raise InvalidRequest(f"n must be 1 for a query, given {params.n}", "n")
        if params.mirostat:
            raise InvalidRequest(
                f"mirostat must be 0 for a query: its memory is of the tokens it chose, given {params.mirostat}",
                "mirostat",
            )
        query = _Query(job.requests[0], room_for(job.prompt, params.max_tokens, self._llm.loaded.limits))
        while True:
            self._last_id = self._last_id % MAX_ID + 1
            if self._last_id not in self._queries:
                break
        self._queries[self._last_id] = query
        return self._last_id

    def infer(self) -> list[QueryResult]:
        """Compute one step of all queries, in the order of their ids, within `max_step_tokens`.

        A query has no result before its prompt is computed. A result that was not committed comes again.

        Raises:
            FunitelError: the step failed, or the LLM was closed.
        """
        left = self._max_step_tokens
        planned: list[tuple[int, _Query, int]] = []
        for query_id, query in sorted(self._queries.items()):
            pending = 1 if query.awaits_commit else query.num_known - query.num_computed
            count = min(pending, left)
            if count <= 0 or len(query.tokens) >= query.max_new_tokens:
                continue
            left -= count
            planned.append((query_id, query, count))
        requests = [_request(query, count) for _, query, count in planned]
        generations = self._llm.loaded.run(lambda engine: _step(engine, requests)) if requests else []
        results = []
        for (query_id, query, count), generation in zip(planned, generations, strict=True):
            if not query.awaits_commit:
                query.num_computed += count
            if query.num_computed == query.num_known:
                query.awaits_commit = True
                results.append(_result(query_id, query, generation))
        return results

    def commit(self, tokens: Mapping[int, tuple[int, bool]]) -> None:
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
            if not 0 <= token_id < self._llm.loaded.vocab_size:
                raise InvalidRequest(
                    f"query {query_id}: tokens must be within 0..{self._llm.loaded.vocab_size - 1}, given {token_id}",
                    "tokens",
                )
        for query_id, (token_id, is_end) in tokens.items():
            query = self._queries[query_id]
            query.tokens.append(token_id)
            query.awaits_commit = False
            if is_end:
                del self._queries[query_id]

    def remove_query(self, query_id: int) -> bool:
        """Remove a query; whether it was there."""
        return self._queries.pop(query_id, None) is not None

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
        )
    output_ids = tuple(islice(query.tokens, known - num_prompt))
    stopping = replace(request.stopping, max_new_tokens=len(output_ids) + 1)
    return replace(request, output_ids=output_ids, stopping=stopping)


def _result(query_id: int, query: _Query, generation: Generation) -> QueryResult:
    tokens, finished = generation.tokens, generation.finished
    is_end = len(query.tokens) + 1 >= query.max_new_tokens
    if finished is not None and (finished.finish_reason is not FinishReason.LENGTH or finished.stop_start is not None):
        is_end = True
    top = generation.top_tokens[0] if generation.top_tokens else None
    candidates = () if top is None else tuple(zip(top.ids, top.texts, top.logprobs, strict=True))
    return QueryResult(query_id, tokens.ids[0], tokens.texts[0], tokens.logprobs[0], candidates, is_end)


async def _step(engine: Engine, requests: list[Request]) -> list[Generation]:
    async def first(request: Request) -> Generation:
        async with engine.submit(request) as stream:
            return await anext(stream)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(first(request)) for request in requests]
    return [task.result() for task in tasks]
