"""Drafters that are right, wrong, or either: what they draft is known to the tests."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.speculation.interface import DraftRow
from funitel.proto.step import Generation, SequenceStart
from funitel_testing.executors import BLOCK_SIZE, collect, decode, keep_rows, prefill


class KnownDrafter:
    """Drafts the tokens that `texts` (by request: prompt and completion) have next, each spoilt at random.

    Args:
        texts: all tokens of each request.
        share: of drafts that are as in the text; 1.0: all, 0.0: none.
        vocab_size: spoilt tokens are below it.
        seed: of what is spoilt.
    """

    name = "known"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, texts: Mapping[int, Sequence[int]], share: float, vocab_size: int = 256, seed: int = 0) -> None:
        self.texts = texts
        self.num_proposed = 0
        self._share = share
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """See Drafter."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        return [self._drafts(row) for row in rows]

    def _drafts(self, row: DraftRow) -> list[int]:
        assert len(row.block_table) * BLOCK_SIZE >= len(row.tokens) + row.limit
        following = list(self.texts.get(row.request_id, ()))[len(row.tokens) :][: row.limit]
        following += [0] * (row.limit - len(following))
        self.num_proposed += len(following)
        return [self._spoilt(token_id) for token_id in following]

    def _spoilt(self, token_id: int) -> int:
        if self._random.random() < self._share:
            return token_id
        return (token_id + 1 + self._random.randrange(self._vocab_size - 1)) % self._vocab_size


class Always:
    """A gain that never turns drafts down."""

    def next_width(self, limit: int) -> int:
        """See RowGain."""
        return limit

    def observe(self, num_drafts: int, num_accepted: int, most: int) -> None:
        """See RowGain."""


def always_drafting(executor: Executor) -> Executor:
    """The executor, in which a row asks for drafts whatever became of those before."""
    assert executor.speculator is not None
    executor.speculator._gains.begin = lambda key, most: Always()  # type: ignore[method-assign,assignment,return-value]
    return executor


def run_drafted(
    executor: Executor, starts: Sequence[SequenceStart], most: int
) -> tuple[dict[int, list[Generation]], int, int]:
    """What sequences get together with drafts, how many drafts there were, and how many were accepted."""
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [replace(each, speculate=most) for each in starts])
    drafted = accepted = 0
    while True:
        collect(result, found)
        drafted += result.num_draft_tokens
        accepted += result.num_accepted_tokens
        if result.batch is None:
            return found, drafted, accepted
        finished = {g.request_id for g in result.generations if g.finished is not None}
        batch = result.batch
        if finished:
            batch = keep_rows(executor, batch.id, [i for i in batch.request_ids if i not in finished])
        result = decode(executor, [batch])


def watched(executor: Executor) -> list[tuple[DraftRow, list[int]]]:
    """The list to which the executor's drafter adds each row that it is asked for, as it was then, and its drafts."""
    calls: list[tuple[DraftRow, list[int]]] = []
    assert executor.speculator is not None
    drafter = executor.speculator.drafter
    propose = drafter.propose

    def watch(rows: Sequence[DraftRow]) -> list[list[int]]:
        drafts = propose(rows)
        calls.extend((replace(row, tokens=list(row.tokens)), own) for row, own in zip(rows, drafts, strict=True))
        return drafts

    drafter.propose = watch  # type: ignore[method-assign]
    return calls
