"""Whom failed steps are put down to, whatever fails them: only who fails alone, and after few steps that fail."""

from collections.abc import Callable
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.router.scheduler.cost.chunk_budget import MIN_CHUNK_TOKENS
from funitel.router.scheduler.fault_bisect import RECOVERY_STEPS, FaultBisector

PROMPT = 8  # tokens


def may_enter(bisector: FaultBisector, sequence_id: int) -> bool:
    """Whether a sequence may be in the next step, as the prefill planner decides it."""
    return not bisector.on_trial or sequence_id in bisector.on_trial


class Trial:
    """Sequences that compute one token a step, all that may in each, and a model that fails some of the steps."""

    def __init__(self, lengths: list[int], fails: Callable[[set[int], int], bool], *, lacks_memory: bool) -> None:
        self.bisector = FaultBisector(may_shrink=lacks_memory)
        self.fails = fails
        self.lacks_memory = lacks_memory
        self.known = dict.fromkeys(range(len(lengths)), PROMPT)  # tokens of each that has not ended
        self.ends = {i: PROMPT + length for i, length in enumerate(lengths)}
        self.computed: dict[int, int] = {}  # of those that run
        self.blamed: list[int] = []
        self.sizes_failed: list[int] = []
        self.has_had_witness: list[bool] = []  # at each blame

    def run(self) -> None:
        for _ in range(20_000):
            if not self.known:
                return
            self.step()
        raise AssertionError(f"{self.known} do not end")

    def step(self) -> None:
        while self.bisector.on_trial and self.bisector.has_passed(self.known_computed()):
            if self.bisector.has_other_half:
                self.computed.clear()
            self.bisector.try_other_half()
        most = self.bisector.max_sequences or len(self.known)
        for i in self.known:
            if len(self.computed) < most and may_enter(self.bisector, i):
                self.computed.setdefault(i, 0)
        assert self.computed, "nobody may enter"
        counts = {i: self.known[i] - done for i, done in self.computed.items()}
        budget = self.bisector.max_tokens or 1 << 30
        for i in counts:
            counts[i] = min(counts[i], max(1, budget))
            budget -= counts[i]
        if self.fails(set(counts), sum(counts.values())):
            self.sizes_failed.append(len(counts))
            goals = {i: self.computed[i] + count for i, count in counts.items()}
            found = self.bisector.fail(goals, sum(counts.values()), lacks_memory=self.lacks_memory)
            self.computed.clear()
            if found is not None:
                self.blamed.append(found)
                self.has_had_witness.append(self.bisector.has_succeeded_since)
                del self.known[found]
            return
        self.bisector.succeed()
        for i, count in counts.items():
            self.computed[i] += count
            if self.computed[i] == self.known[i]:
                self.known[i] += 1
            if self.known[i] == self.ends[i]:
                del self.known[i], self.computed[i]

    def known_computed(self) -> dict[int, int]:
        return {i: self.computed.get(i, 0) for i in self.known}


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=24)


def test_before_a_failure_all_may_be_in_a_step_of_any_size() -> None:
    bisector = FaultBisector(may_shrink=True)
    assert (bisector.max_sequences, bisector.max_tokens, bisector.on_trial) == (None, None, {})
    assert (bisector.has_succeeded_since, bisector.is_recovering, bisector.has_other_half) == (True, False, False)


@given(lengths=lengths, data=st.data())
def test_only_culprits_are_blamed_and_each_after_few_steps(lengths: list[int], data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    trial = Trial(lengths, lambda ids, _: bool(ids & culprits), lacks_memory=False)
    trial.run()
    assert set(trial.blamed) == culprits
    assert len(trial.blamed) == len(culprits)
    assert len(trial.sizes_failed) <= len(culprits) * (ceil(log2(len(lengths))) + 1)


@given(lengths=lengths, most=st.integers(1, 24), lacks_memory=st.booleans())
def test_of_those_that_only_fail_together_nobody_is_blamed(lengths: list[int], most: int, lacks_memory: bool) -> None:
    trial = Trial(lengths, lambda ids, _: len(ids) > most, lacks_memory=lacks_memory)
    trial.run()
    assert trial.blamed == []
    # Either half passes, and then steps are of halves, or it happens once more before they are.
    assert len(trial.sizes_failed) <= (ceil(log2(len(lengths) + 1)) + 1) * (1 if lacks_memory else 2)


@given(lengths=lengths, most=st.integers(MIN_CHUNK_TOKENS, 64))
def test_where_memory_lacks_steps_have_fewer_tokens_until_they_fit(lengths: list[int], most: int) -> None:
    trial = Trial(lengths, lambda _, num_tokens: num_tokens > most, lacks_memory=True)
    trial.run()
    assert trial.blamed == []


def test_who_lacks_memory_in_the_smallest_step_is_to_blame_and_the_others_get_all_of_it_again() -> None:
    trial = Trial([3] * 6, lambda ids, _: 4 in ids, lacks_memory=True)
    trial.run()
    assert trial.blamed == [4]
    assert (trial.bisector.max_tokens, trial.bisector.max_sequences) == (None, None)


def test_a_whim_costs_nobody_anything_but_one_more_step() -> None:
    whims = [True]
    trial = Trial([9] * 8, lambda ids, _: len(ids) == 8 and bool(whims) and whims.pop(), lacks_memory=False)
    trial.run()
    assert trial.blamed == []
    assert trial.sizes_failed == [8]
    assert trial.bisector.max_sequences is None


@pytest.mark.parametrize(("may_shrink", "lacks_memory"), [(True, False), (False, True), (False, False)])
def test_one_that_fails_alone_is_tried_in_smaller_steps_only_where_that_may_help(
    may_shrink: bool, lacks_memory: bool
) -> None:
    assert FaultBisector(may_shrink=may_shrink).fail({7: 65}, 65, lacks_memory=lacks_memory) == 7
    assert FaultBisector(may_shrink=may_shrink).fail({7: 65}, 65) == 7


def test_steps_are_halved_down_to_the_smallest_chunk() -> None:
    bisector = FaultBisector(may_shrink=True)
    sizes, num_tokens = [], 65
    while bisector.fail({7: 65}, num_tokens, lacks_memory=True) is None:
        assert bisector.on_trial
        assert bisector.max_tokens is not None
        sizes.append(num_tokens := bisector.max_tokens)
    assert sizes == [32, 16, 8, 4]
    assert (MIN_CHUNK_TOKENS, bisector.max_tokens, bisector.on_trial) == (4, None, {})
    assert FaultBisector(may_shrink=True).fail({7: 65}, 4, lacks_memory=True) == 7
    assert all(map(isinstance, sizes, [int] * 4))


def test_the_bound_on_tokens_is_as_before_once_one_is_to_blame() -> None:
    bisector = FaultBisector(may_shrink=True)
    assert bisector.fail({7: 65}, 64, lacks_memory=True) is None
    assert bisector.has_passed({7: 65})
    bisector.try_other_half()
    assert not bisector.on_trial
    assert bisector.fail({1: 20, 2: 12}, 32, lacks_memory=True) is None
    assert (bisector.on_trial, bisector.has_other_half) == ({1: 20}, True)
    assert bisector.fail({1: 4}, 4, lacks_memory=True) == 1
    assert bisector.max_tokens == 32


def trial_that_passes(bisector: FaultBisector, *, lacks_memory: tuple[bool, bool] = (False, False)) -> list[int]:
    """Nine sequences fail together, then the first five; all pass in smaller parts, whose sizes are returned."""
    assert bisector.fail(dict.fromkeys(range(9), 5), 9, lacks_memory=lacks_memory[0]) is None
    assert bisector.fail(dict.fromkeys(range(5), 5), 5, lacks_memory=lacks_memory[1]) is None
    sizes = []
    while bisector.on_trial:
        sizes.append(len(bisector.on_trial))
        bisector.try_other_half()
    return sizes


@pytest.mark.parametrize("lacks_memory", [(True, False), (False, True)])
def test_steps_have_no_more_sequences_than_have_passed_where_memory_lacks(lacks_memory: tuple[bool, bool]) -> None:
    bisector = FaultBisector(may_shrink=True)
    assert trial_that_passes(bisector, lacks_memory=lacks_memory) == [3, 2]
    assert bisector.max_sequences == 3


def test_it_recovers_until_many_steps_have_succeeded() -> None:
    bisector = FaultBisector(may_shrink=True)
    assert not bisector.is_recovering
    trial_that_passes(bisector, lacks_memory=(True, True))
    for _ in range(RECOVERY_STEPS):
        assert bisector.is_recovering
        assert bisector.max_sequences == 3
        bisector.succeed()
    assert (bisector.is_recovering, bisector.max_sequences) == (False, None)
    assert trial_that_passes(bisector) == [3, 2]
    assert bisector.max_sequences is None, "the failure before was forgotten"


def test_a_second_failure_of_no_sequence_alone_bounds_steps_too() -> None:
    bisector = FaultBisector(may_shrink=True)
    assert trial_that_passes(bisector) == [3, 2]
    assert bisector.max_sequences is None
    assert trial_that_passes(bisector) == [3, 2]
    assert bisector.max_sequences == 3


def test_steps_are_large_again_after_many_that_succeed() -> None:
    bisector = FaultBisector(may_shrink=True)
    assert bisector.fail({1: 64}, 64, lacks_memory=True) is None
    assert bisector.max_tokens == 32
    assert bisector.has_passed({1: 64})
    bisector.try_other_half()
    for _ in range(RECOVERY_STEPS):
        assert bisector.max_tokens == 32
        bisector.succeed()
    assert bisector.max_tokens is None


@pytest.mark.parametrize("num_sequences", [1, 2, 9])
def test_where_nothing_succeeds_there_is_no_witness_against_anyone(num_sequences: int) -> None:
    trial = Trial([2] * num_sequences, lambda ids, _: True, lacks_memory=False)
    trial.run()
    assert trial.has_had_witness == [False] * num_sequences
    innocent = Trial([2] * num_sequences + [5], lambda ids, _: num_sequences in ids, lacks_memory=False)
    innocent.run()
    assert innocent.has_had_witness == [True]


def test_who_leaves_while_on_trial_holds_nobody_up() -> None:
    bisector = FaultBisector(may_shrink=False)
    assert bisector.fail({1: 5, 2: 5, 3: 5, 4: 5}, 4) is None
    assert [may_enter(bisector, i) for i in (1, 2, 3, 4, 9)] == [True, True, False, False, False]
    assert bisector.has_passed({3: 0, 4: 0})
    bisector.try_other_half()
    assert [may_enter(bisector, i) for i in (1, 2, 3, 4, 9)] == [False, False, True, True, False]
    assert bisector.has_passed({})
    bisector.try_other_half()
    assert not bisector.on_trial
