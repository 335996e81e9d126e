"""The scheduler replayed without a model: budgets hold, blocks are never shared, every request ends as it must."""

import itertools
import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import BLOCK, FakeShard, make_sequence, next_token

from funitel.proto.step import (
    Generation,
    SamplingParams,
    SequenceStart,
    StepResult,
    StoppingParams,
    Tokens,
)
from funitel.router.core.request import Request, Sequence, background_key
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.cost.chunk_budget import StepLoad, attended
from funitel.router.scheduler.cost.step_cost import StepCostModel
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler


def replay(
    scheduler: Scheduler,
    arrivals: dict[int, list[Sequence]],
    leaving: dict[int, int],
    steps: int = 3000,
    forces_spans: bool = False,
    ends: frozenset[int] = frozenset(),
    late: Seq[bool] = (False,),
    num_opening: int = 0,
) -> dict[int, list[int]]:
    """Run until nothing is left. `arrivals` by step; `leaving` maps a sequence to the step it is cancelled in.

    `late` says of each step, over and over, whether its result comes only after the next step is planned.
    """
    shard = FakeShard(forces_spans=forces_spans, ends=ends, num_opening=num_opening)
    outputs, everyone = {}, {s.id: s for batch in arrivals.values() for s in batch}
    in_flight: deque[tuple[StepPlan, set[int]]] = deque()
    is_late = itertools.cycle(late)

    def answer() -> None:
        plan, kept = in_flight.popleft()
        shard.retain(kept)
        for sequence, generation in scheduler.commit(plan, shard.step(plan), 0.01):
            if generation.finished is not None:
                outputs[sequence.id] = list(sequence.output_ids)

    for step in range(steps):
        for sequence in arrivals.get(step, []):
            scheduler.add(sequence)
        for sequence_id, when in leaving.items():
            if when == step:
                scheduler.remove(everyone[sequence_id])
        scheduler.preempt()
        kept = set(scheduler.running)  # rows of all others are dropped by a call sent before the step
        plan = scheduler.schedule()
        if plan is None:
            if in_flight:
                answer()
            elif step > max(arrivals, default=0) and not scheduler.waiting:
                break
            continue
        in_flight.append((plan, kept))
        assert plan.load.num_prompt_tokens <= scheduler.policy.max_batch_prefill_tokens
        assert sum(plan.computed.values()) <= scheduler.policy.max_batch_prefill_tokens + len(scheduler.running)
        for sequence_id, count in plan.computed.items():
            assert count > 0 or scheduler.running[sequence_id].num_pending > 1, "a running stream was left out"
        if scheduler.policy.max_batch_size is not None:
            assert len(scheduler.running) <= scheduler.policy.max_batch_size
        while len(in_flight) > (1 if next(is_late) else 0):
            answer()
    assert not scheduler.waiting, "a request never ended"
    assert not scheduler.running
    blocks = scheduler.blocks
    assert blocks.num_used == 0
    assert blocks.num_free == blocks.num_blocks
    return outputs


def expected_output(sequence: Sequence, ends: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(sequence.request.input_ids)
    for _ in range(sequence.request.stopping.max_new_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(sequence.request.input_ids) :]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.integers(1, 40),
            st.integers(1, 24),
            st.sampled_from([b"", b"a", b"b", background_key(b"a"), background_key(b"")]),
            st.integers(-3, 3),
        ),
        min_size=1,
        max_size=14,
    ),
    st.dictionaries(st.integers(0, 13), st.integers(0, 40), max_size=5),
    st.integers(16, 40),
    st.sampled_from([8, 16, 64]),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.booleans(), min_size=1, max_size=7),
    st.sampled_from([frozenset(), frozenset(range(0, 97, 6))]),
)
def test_every_request_ends_with_its_own_tokens_whatever_the_pool(
    specs: list[tuple[int, int, int, bytes, int]],
    leaving: dict[int, int],
    num_blocks: int,
    budget: int,
    max_batch_size: int | None,
    is_chunked: bool,
    has_prefix_cache: bool,
    forces_spans: bool,
    late: list[bool],
    ends: frozenset[int],
) -> None:
    if not is_chunked:
        budget = 64  # whole prompts must fit
    policy = SchedulerPolicy(
        max_batch_prefill_tokens=budget,
        max_batch_size=max_batch_size,
        is_chunked=is_chunked,
        has_prefix_cache=has_prefix_cache,
    )
    scheduler = Scheduler(policy, BlockPool(num_blocks, BLOCK))
    arrivals: dict[int, list[Sequence]] = {}
    for i, (when, prompt_len, max_new_tokens, key, priority) in enumerate(specs):
        sequence = make_sequence(i, prompt_len, max_new_tokens, key=key, priority=priority)
        sequence.arrived = when / 10
        arrivals.setdefault(when, []).append(sequence)
    sequences = {s.id: s for batch in arrivals.values() for s in batch}
    leaving = {i: step for i, step in leaving.items() if i in sequences}
    outputs = replay(scheduler, arrivals, leaving, forces_spans=forces_spans, ends=ends, late=late)
    for sequence_id, sequence in sequences.items():
        if sequence_id in leaving:
            continue
        assert outputs[sequence_id] == expected_output(sequence, ends)


def test_the_same_arrivals_give_the_same_plans() -> None:
    def plans() -> list[StepPlan]:
        scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=16), BlockPool(30, BLOCK))
        shard, seen = FakeShard(), []
        for i in range(5):
            scheduler.add(make_sequence(i, 10 + i, 6))
        for _ in range(60):
            scheduler.preempt()
            shard.retain(set(scheduler.running))
            plan = scheduler.schedule()
            if plan is None:
                break
            seen.append(plan)
            scheduler.commit(plan, shard.step(plan), 0.01)
        return seen

    assert plans() == plans()


def test_a_long_prompt_is_chunked_beside_a_running_sequence() -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=8), BlockPool(100, BLOCK))
    shard = FakeShard()
    scheduler.add(make_sequence(0, 4, 50))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, shard.step(plan), 0.01)
    scheduler.step_time.observe(StepLoad(1, 5), 0.01)
    scheduler.add(make_sequence(1, 30, 2))
    counts = []
    while 1 not in scheduler.running or scheduler.running[1].num_pending > 1:
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.computed[0] == 1
        counts.append(plan.computed[1])
        scheduler.commit(plan, shard.step(plan), 0.01)
    assert counts == [8, 8, 8, 6]


def test_the_newest_is_preempted_and_resumes_where_it_was() -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=64), BlockPool(6, BLOCK))
    outputs = replay(scheduler, {0: [make_sequence(0, 8, 12), make_sequence(1, 6, 12)]}, {})
    assert scheduler.num_preempted > 0
    assert outputs == {0: expected_output(make_sequence(0, 8, 12)), 1: expected_output(make_sequence(1, 6, 12))}


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_tokens_that_shards_put_behind_prompts_have_places_of_their_own(is_chunked: bool, late: bool) -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=8, is_chunked=is_chunked), BlockPool(12, BLOCK))
    # The prompts fill their blocks to the last place.
    sequences = [replace(make_sequence(i, 2 * BLOCK, 12), num_opening=1) for i in range(3)]
    outputs = replay(scheduler, {0: sequences}, {}, late=(late,), num_opening=1)
    assert outputs == {i: expected_output(make_sequence(i, 2 * BLOCK, 12)) for i in range(3)}
    assert (scheduler.num_preempted > 0) == is_chunked


@pytest.mark.parametrize(("ratio", "max_waiting", "joins_at"), [(1.0, 20, 1), (3.0, 5, 6), (3.0, 2, 3)])
def test_without_chunks_waiting_requests_join_by_ratio_or_by_patience(
    ratio: float, max_waiting: int, joins_at: int
) -> None:
    policy = SchedulerPolicy(
        max_batch_prefill_tokens=64, is_chunked=False, waiting_served_ratio=ratio, max_waiting_tokens=max_waiting
    )
    scheduler = Scheduler(policy, BlockPool(100, BLOCK))
    shard = FakeShard()
    scheduler.add(make_sequence(0, 4, 50))
    joined = None
    for step in range(20):
        plan = scheduler.schedule()
        assert plan is not None
        if step == 0:
            scheduler.add(make_sequence(1, 4, 5))
        elif plan.starts:
            assert plan.is_alone
            joined = step
            break
        scheduler.commit(plan, shard.step(plan), 0.01)
    assert joined == joins_at


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "joins"), [(1, 1, True), (4, 1, False), (4, 2, True), (10, 3, True)]
)
def test_without_chunks_waiting_requests_join_from_a_share_of_the_running_ones(
    num_running: int, num_waiting: int, joins: bool
) -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=200, is_chunked=False, waiting_served_ratio=0.3)
    scheduler = Scheduler(policy, BlockPool(200, BLOCK))
    for i in range(num_running):
        scheduler.add(make_sequence(i, 4, 9))
    assert scheduler.schedule()
    with pytest.raises(AssertionError, match="^steps in flight come first"):
        scheduler.preempt_all()
    for i in range(num_waiting):
        scheduler.add(make_sequence(100 + i, 4, 9))
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.is_alone, len(plan.starts)) == (joins, num_waiting if joins else 0)
    assert plan.load.num_prompt_tokens == (4 * num_waiting if joins else 0)


@pytest.mark.parametrize(
    ("is_chunked", "reasons"),
    [(True, ["chunking"] * 3), (False, ["backpressure", "backpressure", "wait_exceeded"])],
)
def test_why_requests_join_those_that_run(is_chunked: bool, reasons: list[str]) -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=64, is_chunked=is_chunked, max_waiting_tokens=1)
    scheduler, shard = Scheduler(policy, BlockPool(50, BLOCK)), FakeShard()
    scheduler.add(make_sequence(0, 6, 9))
    found = [scheduler.reason_to_join]
    for _ in reasons[1:]:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, shard.step(plan), 0.01)
        found.append(scheduler.reason_to_join)
    assert found == reasons


def test_a_plain_peer_gets_whole_requests_with_slots_and_text() -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=64, is_chunked=False, is_plain=True)
    scheduler = Scheduler(policy, BlockPool(100, BLOCK))
    scheduler.add(make_sequence(0, 6, 5))
    plan = scheduler.schedule()
    assert plan is not None
    (start,) = plan.starts
    assert start.input_ids == ()
    assert start.chunk_len is None
    assert len(start.blocks) == 3
    assert len(start.slots) == 6 + 5 - 1
    assert start.slots[:4] == tuple(start.blocks[0] * BLOCK + i for i in range(4))


def test_without_chunks_a_sequence_that_outgrew_the_budget_resumes() -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=8, is_chunked=False), BlockPool(20, BLOCK))
    sequence, shard = make_sequence(0, 6, 8), FakeShard()
    scheduler.add(sequence)
    for _ in range(5):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, shard.step(plan), 0.01)
    scheduler.preempt_all()
    shard.retain(set())
    run_to_end(scheduler, shard)
    assert not scheduler.waiting
    assert sequence.output_ids == expected_output(sequence)


@pytest.mark.parametrize(("num_keys", "chunk"), [(1, 500), (2, 100), (3, 100)])
def test_where_several_keys_have_requests_a_prompt_takes_shorter_steps(num_keys: int, chunk: int) -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=5000), BlockPool(3000, BLOCK))
    load = StepLoad()
    load.add_chunk(0, 1000)
    for _ in range(20):
        scheduler.step_time.observe(load, 1.0)
    for i in range(num_keys):
        scheduler.add(make_sequence(i, 2000, 5, key=bytes([i])))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.load.num_prompt_tokens == pytest.approx(chunk, rel=0.2)


def test_a_step_that_lacked_memory_is_planned_again_with_half_the_tokens() -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=100), BlockPool(50, BLOCK))
    scheduler.add(make_sequence(0, 40, 5))
    for num_tokens in (40, 20, 10):
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.computed == {0: num_tokens}
        assert scheduler.bisector.fail(scheduler.goals(plan), plan.num_tokens, lacks_memory=True) is None
        scheduler.abandon()


def test_a_plan_says_what_moves_to_the_host_and_back() -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=64, has_prefix_cache=True)
    scheduler, shard = Scheduler(policy, BlockPool(6, BLOCK, host_blocks=6)), FakeShard()
    scheduler.add(make_sequence(0, 16, 1, cache_salt="old"))
    run_to_end(scheduler, shard)
    scheduler.add(make_sequence(1, 20, 1, cache_salt="new"))
    plan = scheduler.schedule()
    assert plan is not None
    assert [copy.is_load for copy in plan.copies] == [False] * 3
    scheduler.commit(plan, shard.step(plan), 0.01)
    scheduler.add(make_sequence(2, 17, 1, cache_salt="old"))
    plan = scheduler.schedule()
    assert plan is not None
    (start,) = plan.starts
    assert (start.cache_len, len(start.blocks), scheduler.blocks.num_used) == (16, 5, 5)
    assert [copy.block for copy in plan.copies if copy.is_load] == list(start.blocks[1:4])


def test_a_plan_says_what_its_step_is_predicted_to_take() -> None:
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=64), BlockPool(20, BLOCK)), FakeShard()
    scheduler.add(make_sequence(0, 6, 9))
    predicted = []
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.predicted_seconds == scheduler.step_time.seconds(plan.load)
        predicted.append(plan.predicted_seconds)
        scheduler.commit(plan, shard.step(plan), 0.5)
    assert predicted == [0.0, 0.0, pytest.approx(0.5, rel=0.1)]


@pytest.mark.parametrize(("total_ns", "measured"), [(2_000_000_000, 2.0), (0, 9.0)])
def test_a_step_takes_what_the_ranks_measured_else_what_the_router_did(total_ns: int, measured: float) -> None:
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=8), BlockPool(20, BLOCK)), FakeShard()
    scheduler.add(make_sequence(0, 6, 8))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, replace(shard.step(plan), total_ns=total_ns), 9.0)
    expected = StepCostModel()
    expected.observe(plan.load, measured)
    assert scheduler.step_time.seconds(plan.load) == expected.seconds(plan.load) > 0.0


def test_results_are_taken_in_the_order_of_the_plans_only() -> None:
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=8), BlockPool(20, BLOCK)), FakeShard()
    scheduler.add(make_sequence(0, 6, 8))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    result = shard.step(first)
    with pytest.raises(AssertionError, match="^results come in the order of their plans$"):
        scheduler.commit(second, result, 0.01)
    scheduler.commit(first, result, 0.01)
    scheduler.commit(second, shard.step(second), 0.01)
    with pytest.raises(AssertionError, match="^no step is in flight$"):
        scheduler.commit(second, result, 0.01)


def test_one_that_has_left_since_a_step_was_planned_keeps_no_other_from_its_token() -> None:
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=20), BlockPool(20, BLOCK)), FakeShard()
    gone, other = make_sequence(0, 6, 8), make_sequence(1, 6, 8)
    for sequence in (gone, other):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.remove(gone)
    assert [sequence for sequence, _ in scheduler.commit(plan, shard.step(plan), 0.01)] == [other]
    assert (gone.num_computed, other.num_computed, len(other.output_ids)) == (0, 6, 1)


# The prefix cache


def cached_scheduler(num_blocks: int = 100, **policy: Any) -> Scheduler:
    policy = {"max_batch_prefill_tokens": 64, "has_prefix_cache": True} | policy
    return Scheduler(SchedulerPolicy(**policy), BlockPool(num_blocks, BLOCK))


def run_to_end(scheduler: Scheduler, shard: FakeShard) -> list[SequenceStart]:
    """Run what waits; returns how each sequence entered."""
    entered: list[SequenceStart] = []
    while True:
        scheduler.preempt()
        shard.retain(set(scheduler.running))
        plan = scheduler.schedule()
        if plan is None:
            return entered
        entered += plan.starts
        scheduler.commit(plan, shard.step(plan), 0.01)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_prefix_is_computed_once_whoever_asks_and_its_last_token_always(is_chunked: bool) -> None:
    scheduler, shard = cached_scheduler(is_chunked=is_chunked), FakeShard()
    for i, prompt_len in enumerate((18, 18, 16, 17, 3)):
        scheduler.add(make_sequence(i, prompt_len, 1))
        entered = run_to_end(scheduler, shard)
        assert entered[0].cache_len == [0, 16, 12, 16, 0][i]


@pytest.mark.parametrize(("has_prefix_cache", "num_kept"), [(False, 0), (True, 5)])
def test_content_is_kept_for_others_where_there_is_a_prefix_cache(has_prefix_cache: bool, num_kept: int) -> None:
    scheduler, shard = cached_scheduler(has_prefix_cache=has_prefix_cache), FakeShard()
    scheduler.add(make_sequence(0, 18, 5))
    run_to_end(scheduler, shard)
    assert scheduler.blocks.num_cached == num_kept


def test_the_load_of_a_step_counts_a_cached_prefix_as_context() -> None:
    scheduler, shard = cached_scheduler(), FakeShard()
    scheduler.add(make_sequence(0, 18, 1))
    run_to_end(scheduler, shard)
    scheduler.add(make_sequence(1, 19, 1))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.load == StepLoad(0, 0, 3, attended(16, 3), 16)


def test_the_next_turn_of_a_chat_begins_behind_the_answer() -> None:
    scheduler, shard = cached_scheduler(), FakeShard()
    first = make_sequence(0, 10, 9)
    scheduler.add(first)
    run_to_end(scheduler, shard)
    request = Request(
        input_ids=(*first.request.input_ids, *first.output_ids, 7, 7, 7),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=2),
    )
    scheduler.add(Sequence(1, request))
    (entered,) = run_to_end(scheduler, shard)
    assert entered.cache_len == 16  # 18 tokens were computed: the answer's last one is not


def test_salts_part_tenants_and_logprobs_of_the_prompt_need_computing() -> None:
    scheduler, shard = cached_scheduler(), FakeShard()
    lengths = []
    for i, fields in enumerate(({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {})):
        scheduler.add(make_sequence(i, 18, 1, **fields))
        lengths.append(run_to_end(scheduler, shard)[0].cache_len)
    scheduler.add(make_sequence(9, 18, 1, prefill_logprobs=True))
    lengths.append(run_to_end(scheduler, shard)[0].cache_len)
    assert lengths == [0, 0, 16, 0, 16, 0]


def test_a2_owners_share_nothing_whatever_their_salts() -> None:
    scheduler, shard = cached_scheduler(), FakeShard()
    a, b = bytes(32), b"b" * 32
    asked: list[tuple[dict[str, object], int]] = [
        ({"cache_owner": a}, 0),
        ({"cache_owner": b}, 0),
        ({"cache_owner": a}, 16),
        ({"cache_owner": b}, 16),
        ({}, 0),
        ({"cache_owner": a, "cache_salt": "s"}, 0),
        ({"cache_owner": b, "cache_salt": "s"}, 0),
        ({"cache_salt": "s"}, 0),
        ({"cache_owner": b, "cache_salt": "s"}, 16),
    ]
    for i, (fields, expected) in enumerate(asked):
        scheduler.add(make_sequence(i, 18, 1, **fields))
        assert (run_to_end(scheduler, shard)[0].cache_len, i) == (expected, i)


def test_a2_owners_share_nothing_in_the_host_tier() -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=64, has_prefix_cache=True)
    scheduler, shard = Scheduler(policy, BlockPool(8, BLOCK, host_blocks=20)), FakeShard()
    for i, (owner, num_prompt) in enumerate(((b"a", 17), (b"c", 30))):
        scheduler.add(make_sequence(i, num_prompt, 1, cache_owner=owner * 32))
        run_to_end(scheduler, shard)
    assert scheduler.blocks.host.num_saved >= 4
    asked = {owner: make_sequence(9, 17, 1, cache_owner=owner * 32) for owner in (b"a", b"b", b"")}
    found = {owner: scheduler._prefill.prefix(sequence) for owner, sequence in asked.items()}
    assert {owner: len(prefix) for owner, prefix in found.items()} == {b"a": 4, b"b": 0, b"": 0}
    assert found[b"a"].keys


def test_a2_a_prompt_does_not_wait_for_the_same_prompt_of_another_owner() -> None:
    scheduler, shard = cached_scheduler(max_batch_prefill_tokens=8), FakeShard()
    for i in range(4):
        scheduler.add(make_sequence(i, 30, 3, cache_owner=bytes([i]) * 32))
    assert [start.cache_len for start in run_to_end(scheduler, shard)] == [0] * 4
    assert shard.num_computed == 4 * (30 + 2)


def test_siblings_wait_for_the_first_ones_prompt_and_others_pass_them() -> None:
    scheduler, shard = cached_scheduler(max_batch_prefill_tokens=8), FakeShard()
    for i in range(4):
        scheduler.add(make_sequence(i, 30, 3))
    stranger = make_sequence(4, 8, 3, cache_salt="stranger")
    scheduler.add(stranger)
    entered = run_to_end(scheduler, shard)
    assert [start.cache_len for start in entered if start.request_id in (1, 2, 3)] == [28, 28, 28]
    assert [start.request_id for start in entered][:2] == [0, 4]
    assert shard.num_computed == 30 + 3 * 2 + 4 * 2 + 8 + 2


@pytest.mark.parametrize(
    ("num_running", "budget", "num_waiting", "enters"),
    [
        pytest.param(30, 16, 21, False, id="its next block is being computed"),
        pytest.param(30, 16, 20, True, id="the last token of the block is to be computed in any case"),
        pytest.param(30, 16, 18, True, id="its prompt ends before the end of the block"),
        pytest.param(20, 18, 21, False, id="two tokens of the block are missing, and no more are known"),
        pytest.param(18, 16, 21, True, id="the block's content is not known"),
    ],
)
def test_which_siblings_wait_for_a_block(num_running: int, budget: int, num_waiting: int, enters: bool) -> None:
    scheduler, shard = cached_scheduler(max_batch_prefill_tokens=budget, target_gap_seconds=9.0), FakeShard()
    running = make_sequence(0, num_running, 9)
    scheduler.add(running)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, shard.step(plan), 0.01)
    scheduler.add(make_sequence(1, num_waiting, 3))
    plan = scheduler.schedule()
    assert plan is not None
    assert [start.request_id for start in plan.starts] == [1] * enters
    scheduler.commit(plan, shard.step(plan), 0.01)
    run_to_end(scheduler, shard)
    request = replace(running.request, input_ids=(*running.request.input_ids, *running.output_ids))
    assert scheduler.cached_prefix_len(Sequence(2, request)) == (num_running + 8) // BLOCK * BLOCK


def test_no_sibling_waits_for_the_last_token_of_a_block_that_is_decoded() -> None:
    scheduler, shard = cached_scheduler(target_gap_seconds=9.0), FakeShard()
    running = make_sequence(0, 15, 9)
    scheduler.add(running)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, shard.step(plan), 0.01)
    request = replace(running.request, input_ids=(*running.request.input_ids, *running.output_ids, 7, 7, 7))
    scheduler.add(Sequence(1, request))
    plan = scheduler.schedule()
    assert plan is not None
    assert [(start.request_id, start.cache_len) for start in plan.starts] == [(1, 12)]


def test_siblings_wait_for_a_prompt_whose_last_chunk_is_under_way() -> None:
    scheduler, shard = cached_scheduler(max_batch_prefill_tokens=64), FakeShard()
    scheduler.add(make_sequence(9, 8, 30, cache_salt="stranger"))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, shard.step(plan), 0.01)
    for i in range(3):
        scheduler.add(make_sequence(i, 30, 3))
    under_way, entered = [], []
    for _ in range(6):
        while len(under_way) < 2 and (plan := scheduler.schedule()) is not None:
            entered += plan.starts
            under_way.append(plan)
        plan = under_way.pop(0)
        scheduler.commit(plan, shard.step(plan), 0.01)
    assert [(start.request_id, start.cache_len) for start in entered] == [(0, 0), (1, 28), (2, 28)]


def test_the_least_recently_used_content_goes_first_and_the_deepest_of_it() -> None:
    scheduler, shard = cached_scheduler(num_blocks=10), FakeShard()
    for i, (prompt_len, salt) in enumerate(((16, "old"), (16, "new"), (24, "big"))):
        scheduler.add(make_sequence(i, prompt_len, 1, cache_salt=salt))
        run_to_end(scheduler, shard)
    assert scheduler.blocks.num_evicted == 4  # 8 were cached, 2 free, 6 needed
    lengths = []
    for i, salt in enumerate(("new", "old")):
        scheduler.add(make_sequence(10 + i, 17, 1, cache_salt=salt))
        lengths.append(run_to_end(scheduler, shard)[0].cache_len)
    assert lengths == [16, 0]


def test_a_preempted_sequence_finds_what_it_had_computed() -> None:
    scheduler, shard = cached_scheduler(num_blocks=7), FakeShard()
    for i, salt in enumerate("ab"):
        scheduler.add(make_sequence(i, 8, 14, cache_salt=salt))
    entered = run_to_end(scheduler, shard)
    assert scheduler.num_preempted > 0
    assert any(start.output_ids and start.cache_len for start in entered)


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_tokens_computed_again_are_counted(has_prefix_cache: bool) -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=64, has_prefix_cache=has_prefix_cache)
    scheduler, shard = Scheduler(policy, BlockPool(7, BLOCK)), FakeShard()
    asked = [make_sequence(i, 8, 14, cache_salt=salt) for i, salt in enumerate("ab")]
    for sequence in asked:
        scheduler.add(sequence)
    run_to_end(scheduler, shard)
    assert scheduler.num_preempted > 0
    needed = sum(sequence.num_known - 1 for sequence in asked)
    assert scheduler.shares.num_repeated == shard.num_computed - needed > 0


def test_a_full_pool_is_used_but_for_a_small_reserve() -> None:
    """Many short sequences: a free block for each of them would be a third of the pool."""
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=64), BlockPool(100, BLOCK)), FakeShard()
    for i in range(200):
        scheduler.add(make_sequence(i, 4 + i % 3, 8 + i % 11))
    shares = []
    while scheduler.waiting or scheduler.running:
        scheduler.preempt()
        shard.retain(set(scheduler.running))
        plan = scheduler.schedule()
        assert plan is not None
        shares.append((scheduler.blocks.num_used / 100, bool(scheduler.waiting)))
        scheduler.commit(plan, shard.step(plan), 0.01)
    full = next(i for i, (share, _) in enumerate(shares) if share > 0.9)
    later = [share for share, has_waiting in shares[full:] if has_waiting]
    assert full < 10
    assert len(later) > 20
    assert sum(later) / len(later) > 0.93
    assert min(later) > 0.85


def test_forced_tokens_are_a_chunk_that_takes_its_share_of_the_budget() -> None:
    scheduler = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=8), BlockPool(100, BLOCK))
    for i in range(2):
        scheduler.add(make_sequence(i, 2, 60))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.step_time.observe(StepLoad(2, 4), 0.01)
    spans = tuple(Generation(i, Tokens((7,) * 11, (0.0,) * 11, ("",) * 11)) for i in range(2))
    scheduler.commit(plan, StepResult(spans, None), 0.01)
    for counts in ((9, 1), (2, 8), (1, 2), (1, 1)):
        scheduler.preempt()
        plan = scheduler.schedule()
        assert plan is not None
        assert tuple(plan.computed.values()) == counts
        done = [i for i in (0, 1) if scheduler.running[i].num_pending == counts[i]]
        answers = tuple(Generation(i, Tokens((9,), (0.0,), ("",))) for i in done)
        scheduler.commit(plan, StepResult(answers, None), 0.01)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_load_of_forced_tokens_is_of_those_behind_the_one_that_decodes(is_chunked: bool) -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=8, is_chunked=is_chunked)
    scheduler, shard = Scheduler(policy, BlockPool(100, BLOCK)), FakeShard()
    scheduler.add(make_sequence(0, 2, 60))
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, shard.step(plan), 0.01)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, StepResult((Generation(0, Tokens((7,) * 6, (0.0,) * 6, ("",) * 6)),), None), 0.01)
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.computed, scheduler.running[0].num_computed) == ({0: 6}, 4)
    assert plan.load == StepLoad(1, 10, 5, attended(5, 5), 5)


def test_several_tokens_of_a_plain_peer_were_speculated_and_are_computed() -> None:
    policy = SchedulerPolicy(max_batch_prefill_tokens=64, is_chunked=False, is_plain=True)
    scheduler = Scheduler(policy, BlockPool(100, BLOCK))
    sequence = make_sequence(0, 6, 9)
    scheduler.add(sequence)
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult((Generation(0, Tokens((5, 6, 7), (0.0,) * 3, ("",) * 3)),), None), 0.01)
        assert sequence.num_pending == 1
    assert sequence.output_ids == [5, 6, 7, 5, 6, 7]


def broken(request_id: int) -> StepResult:
    return StepResult((Generation(request_id, Tokens((5,), (math.nan,), ("x",), (False,))),), None)


@pytest.mark.parametrize(("num_good_steps", "found_later"), [(0, 0), (4, 8)])
def test_what_was_computed_since_the_last_sound_token_is_not_found_again(num_good_steps: int, found_later: int) -> None:
    scheduler, shard = cached_scheduler(), FakeShard()
    scheduler.add(make_sequence(0, 9, 1))
    run_to_end(scheduler, shard)
    sequence = make_sequence(1, 18, 30)
    scheduler.add(sequence)
    assert scheduler.cached_prefix_len(sequence) == 8
    for _ in range(num_good_steps):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, shard.step(plan), 0.01)
    plan = scheduler.schedule()
    assert plan is not None
    [(ended, _)] = scheduler.commit(plan, broken(1), 0.01)
    assert (ended, sequence.is_broken) == (sequence, True)
    assert not scheduler.running
    assert scheduler.blocks.num_used == 0
    assert scheduler.cached_prefix_len(make_sequence(2, 18, 1)) == found_later


@pytest.mark.parametrize("logprob", [math.nan, math.inf])
def test_a_sequence_of_broken_scores_ends_and_no_other_does(logprob: float) -> None:
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=20), BlockPool(20, BLOCK)), FakeShard()
    first, second = make_sequence(0, 6, 8), make_sequence(1, 6, 8)
    for sequence in (first, second):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    sound = shard.step(plan).generations[1]
    result = StepResult((Generation(0, Tokens((5,), (logprob,), ("x",), (False,))), sound), None)
    assert [sequence for sequence, _ in scheduler.commit(plan, result, 0.01)] == [first, second]
    assert (first.is_broken, second.is_broken, list(scheduler.running)) == (True, False, [1])
    assert (first.output_ids, second.output_ids) == ([], list(sound.tokens.ids))


def test_the_goals_of_a_step_are_of_those_that_still_run() -> None:
    scheduler, shard = Scheduler(SchedulerPolicy(max_batch_prefill_tokens=16), BlockPool(50, BLOCK)), FakeShard()
    first, second = make_sequence(0, 6, 9), make_sequence(1, 14, 9)
    for sequence in (first, second):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.goals(plan) == {0: 6, 1: 10}
    scheduler.commit(plan, shard.step(plan), 0.01)
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.goals(plan) == {i: scheduler.running[i].num_computed + count for i, count in plan.computed.items()}
    assert scheduler.goals(plan)[0] == 7
    scheduler.remove(first)
    assert 0 not in scheduler.goals(plan)
