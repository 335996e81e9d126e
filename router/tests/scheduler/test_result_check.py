"""Answers that cannot be are told from those that can, and say what is wrong with them."""

from dataclasses import replace

import pytest
from sequences import BLOCK, make_sequence

from funitel.proto.step import FinishReason, GeneratedText, Generation, StepResult, Tokens
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.result_check import check_result
from funitel.router.scheduler.scheduler import Scheduler


def token(request_id: int) -> Generation:
    return Generation(request_id, Tokens((5,), (-1.0,), ("x",), (False,)))


def drafted(request_id: int) -> Generation:
    tokens = Tokens((5, 6), (-1.0, -1.0), ("x", "y"), (False, False))
    return Generation(request_id, tokens, num_accepted=1)


def last(request_id: int) -> Generation:
    return replace(token(request_id), finished=GeneratedText("x", 1, FinishReason.LENGTH))


@pytest.fixture
def planned() -> tuple[Scheduler, StepPlan]:
    """Requests 0 and 1 get their first token, 2 computes a part of its prompt."""
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=16), BlockPool(20, BLOCK))
    for i, length in enumerate((4, 5, 30)):
        scheduler.add(make_sequence(i, length, 3))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.computed[2] == 7
    return scheduler, plan


@pytest.mark.parametrize(
    ("generations", "ended", "problem"),
    [
        ((token(0), token(1)), (), None),
        ((token(0), last(1)), (1,), None),
        ((token(0),), (), "request 1 got no token"),
        ((token(0), token(1), token(1)), (), "a request got tokens twice in one step"),
        ((token(0), token(1), token(9)), (), "request 9 got tokens, which computed nothing in the step"),
        ((token(0), token(1), token(2)), (), "request 2 got tokens before all of its prompt was computed"),
        (
            (token(0), drafted(1)),
            (),
            "request 1 had 1 drafts accepted, it may have 0 and one token more",
        ),
        ((token(0), token(1)), (0,), "request 0 was dropped before its end"),
        ((token(0), token(1)), (2,), "request 2 was dropped before its end"),
    ],
)
def test_what_cannot_be(
    planned: tuple[Scheduler, StepPlan], generations: tuple[Generation, ...], ended: tuple[int, ...], problem: str
) -> None:
    scheduler, plan = planned
    found = check_result(plan, StepResult(generations, None), frozenset(ended), scheduler.running)
    assert found == problem


def test_of_those_that_have_left_nothing_is_wrong(planned: tuple[Scheduler, StepPlan]) -> None:
    scheduler, plan = planned
    for sequence in tuple(scheduler.running.values()):
        scheduler.remove(sequence)
    assert check_result(plan, StepResult((token(0),), None), frozenset({0, 1, 2}), scheduler.running) is None
