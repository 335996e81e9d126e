"""Drafts in a step: the forward that verifies them, the states of rejected ones, and what the drafter is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from funitel.model_server.executor.interface import ActiveRow
from funitel.model_server.executor.model_runner import ModelRunner
from funitel.model_server.executor.prompt_scores import Scored
from funitel.model_server.forward.batch import RowSpan
from funitel.model_server.sampling.sampler import SampledToken
from funitel.model_server.sequence.table import SequenceState
from funitel.model_server.speculation.speculator import Speculator, next_ids
from funitel.model_server.speculation.verify import num_accepted
from funitel.proto.step import StateSave, StepResult

Drafts = Mapping[int, Sequence[int]]
"""Draft tokens by the place of their row."""


def propose(speculator: Speculator, runner: ModelRunner, active: Sequence[ActiveRow]) -> Drafts:
    """The drafts of a step, by the places of their rows in `active`."""
    return speculator.propose(active, runner.table, runner.options.block_size, runner.spec.max_position_embeddings)


def of_due(active: Sequence[ActiveRow], drafts: Drafts) -> Drafts:
    """The same by the places among the rows that are due a token."""
    places = [i for i, (row, count) in enumerate(active) if row.num_pending == count]
    return {place: drafts[i] for place, i in enumerate(places) if i in drafts}


def forward_drafted(runner: ModelRunner, active: Sequence[ActiveRow], drafts: Drafts) -> Scored:
    """Run the forward of a step with drafts: logits behind each draft too, row by row of those that are due."""
    spans, slots = runner.spans(active), iter(runner.scratch_slots)
    for i, tokens in drafts.items():
        own = [next(slots) for _ in tokens] if runner.scratch_slots else []
        spans[i] = _drafted(active[i][0], spans[i], tokens, own)
    logits = runner.forward(spans)
    return Scored(logits, [row.num_pending == count for row, count in active], [], 1)


def _drafted(row: SequenceState, span: RowSpan, drafts: Sequence[int], slots: Sequence[int]) -> RowSpan:
    """What a row computes with drafts; the state before each of them goes to one of `slots`, if there are any."""
    saves = tuple(StateSave(span.end + i, slot) for i, slot in enumerate(slots))
    end = span.end + len(drafts)
    rotary = None if row.media is None else row.media.rotary_between(span.start, end)
    tokens = [*span.tokens, *drafts]
    return replace(span, tokens=tokens, logits="all", state_saves=(*span.state_saves, *saves), rotary=rotary)


def settle_drafts(
    speculator: Speculator,
    runner: ModelRunner,
    due: Sequence[SequenceState],
    following: Sequence[Sequence[SampledToken]],
    drafts: Drafts,
) -> None:
    """Learn what was accepted, and give rows of which some was not the state before it."""
    first = 0
    for place, own in drafts.items():
        row = due[place]
        count = num_accepted(own, [token.id for token in following[place]])
        speculator.note(row, len(own), count)
        if runner.scratch_slots:
            states = runner.pool.state_pool
            assert states is not None
            if count < len(own):
                states.copy(runner.scratch_slots[first + count], runner.rules.state_slot(row))
            first += len(own)


def with_drafts(result: StepResult, drafts: Drafts, accepted: int) -> StepResult:
    """The result of a step that verified drafts."""
    count = sum(map(len, drafts.values()))
    return replace(
        result,
        num_forward_tokens=result.num_forward_tokens + count,
        num_draft_tokens=count,
        num_accepted_tokens=accepted,
    )


def observe(
    speculator: Speculator,
    runner: ModelRunner,
    active: Sequence[ActiveRow],
    due: Sequence[SequenceState],
    following: Sequence[Sequence[SampledToken]],
    drafts: Drafts,
) -> None:
    """Show the drafter the forwards of a step; its rows count as computed what they did, without drafts.

    Rows that ask for no drafts are shown too: they may ask later, and their blocks may be the prefix of rows that do.
    """
    known: dict[int, tuple[Sequence[int], int]] = {row.index: (row.tokens, row.num_cached) for row, _ in active}
    for place, (row, tokens) in enumerate(zip(due, following, strict=True)):
        ids = [token.id for token in tokens]
        known[row.index] = [*row.tokens, *ids], row.num_cached + num_accepted(drafts.get(place, ()), ids)
    for batch, rows, hidden in runner.take_forwarded():
        found = [known[index] for index in rows]
        ids_behind = next_ids(batch, [tokens for tokens, _ in found], [count for _, count in found])
        speculator.drafter.observe(batch, ids_behind, hidden)
