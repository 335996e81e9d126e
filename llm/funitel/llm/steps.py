"""The class `StepQueries`: generation step by step, in which the caller chooses every token.

It has the calls of Inferflow's engine: add a query, infer a step, commit tokens, remove a query.
"""

import asyncio
from collections.abc import Mapping

from funitel.llm.llm import LLM
from funitel.llm.prompts import Prompt
from funitel.llm.sampling import SamplingParams
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import Generation
from funitel.router.core.request import Request
from funitel.router.engine.engine import Engine
from funitel.router.serving.step_queries import MAX_QUERIES, MAX_STEP_TOKENS, QueryResult, QueryTable

__all__ = ["QueryResult", "StepQueries"]


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
        self._table = QueryTable(max_queries=max_queries, max_step_tokens=max_step_tokens)
        self._llm = llm

    def add_query(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Add a query; return its id, which is > 0, or 0 where there are `max_queries`.

        Raises:
            InvalidRequest: the prompt or a parameter is invalid, or the sampling has a memory beside the tokens.
        """
        if self._table.is_full:
            return 0
        job = self._llm.prepared(prompt, sampling_params)
        if job.params.n != 1:
            raise InvalidRequest(f"n must be 1 for a query, given {job.params.n}", "n")
        return self._table.add(job.requests[0])

    def infer(self) -> list[QueryResult]:
        """Compute one step of all queries, in the order of their ids, within `max_step_tokens`.

        A query has no result before its prompt is computed. A result that was not committed comes again.

        Raises:
            FunitelError: the step failed, or the LLM was closed.
        """
        planned = self._table.plan()
        if not planned:
            return []
        requests = [each.request for each in planned]
        return self._table.settle(planned, self._llm.loaded.run(lambda engine: _step(engine, requests)))

    def commit(self, tokens: Mapping[int, tuple[int, bool]]) -> None:
        """Go on with the tokens that the caller chose: by query, the token and whether it is the last.

        A query that has its last token is removed.

        Raises:
            InvalidRequest: a query is not there, has no result that was not committed, or a token is unknown; nothing
                was committed.
        """
        self._table.commit(tokens, self._llm.loaded.vocab_size)

    def remove_query(self, query_id: int) -> bool:
        """Remove a query; whether it was there."""
        return self._table.remove(query_id)

    def __len__(self) -> int:
        return len(self._table)


async def _step(engine: Engine, requests: list[Request]) -> list[Generation]:
    async def first(request: Request) -> Generation:
        async with engine.submit(request) as stream:
            return await anext(stream)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(first(request)) for request in requests]
    return [task.result() for task in tasks]
