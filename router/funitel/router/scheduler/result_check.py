"""Result check: whether an answer can be one to its step: each sequence due a token got some, and no other. Pure."""

from collections.abc import Mapping

from funitel.proto.step import StepResult
from funitel.router.core.request import Sequence
from funitel.router.scheduler.plan import StepPlan


def check_result(
    plan: StepPlan, result: StepResult, ended: frozenset[int], running: Mapping[int, Sequence]
) -> str | None:
    """Return what is wrong with the answer to the oldest step in flight; None for nothing.

    Args:
        plan: the step.
        result: what all ranks together say of it.
        ended: ids of the rows that they have dropped with it.
        running: the sequences by id, before the answer is taken into account.
    """
    given = {generation.request_id: generation for generation in result.generations}
    if len(given) < len(result.generations):
        return "a request got tokens twice in one step"
    if not given.keys() <= plan.computed.keys():
        return f"request {min(given.keys() - plan.computed.keys())} got tokens, which computed nothing in the step"
    for generation in result.generations:
        if generation.num_accepted:
            accepted, sequence = generation.num_accepted, running.get(generation.request_id)
            if sequence is not None and accepted > min(sequence.request.speculate, len(generation.tokens.ids) - 1):
                most = sequence.request.speculate
                return f"request {sequence.id} had {accepted} drafts accepted, it may have {most} and one token more"
    updated = [*(start.request_id for start in plan.starts), *(row.request_id for row in plan.rows)]
    for i in updated:  # all others are due one
        if i in given and i in running and running[i].num_pending > plan.computed[i]:
            return f"request {i} got tokens before all of its prompt was computed"
    for i in plan.computed.keys() - given.keys():
        if i in running and running[i].num_pending == plan.computed[i]:
            return f"request {i} got no token"
    for i in ended:
        if i in running and (i not in given or given[i].finished is None):
            return f"request {i} was dropped before its end"
    return None
