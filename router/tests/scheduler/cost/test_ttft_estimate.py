"""First tokens are foreseen, and whoever would wait longer for its own than the target is refused."""

import asyncio
import math
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from fleets import expected, request, run, running
from sequences import make_sequence
from simulations import costs, measures, simulation, trace

from funitel.proto.errors import Overloaded
from funitel.router.core.request import Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.admission import Admission, InFlight
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.cost.throughput import MAX_LATENESS, Throughput
from funitel.router.scheduler.cost.ttft_estimate import TtftEstimator
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.serving.arrival import incoming_request

TARGET = 2.0
SECONDS_OF_A_TOKEN = 0.01  # of a prompt
BEGIN = 6.0  # of the flood
A, B = b"a", b"b"


class PrefillOfNoPrefix:
    """A planner of prefills that has room, and no cached prefix."""

    def all_fit(self, sequences: Collection[Sequence]) -> bool:
        return True

    def may_share(self, sequence: Sequence) -> bool:
        return False

    def cached_prefix_len(self, sequence: Sequence) -> int:
        return 0


def scheduler_of(*sequences: Sequence, is_measured: bool = True, **policy: Any) -> Scheduler:
    """A scheduler where some wait, whose shard has shown what a token of a prompt takes, or has shown nothing."""
    policy = {"max_batch_prefill_tokens": 4096, "has_prefix_cache": True} | policy
    scheduler = Scheduler(SchedulerPolicy(**policy), BlockPool(10_000, 16))
    if is_measured:
        measure_prompts(scheduler, SECONDS_OF_A_TOKEN)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


def measure_prompts(scheduler: Scheduler, seconds_of_a_token: float) -> None:
    for i in range(100):
        load = StepLoad()
        load.add_chunk(0, 5 + i)
        scheduler.step_time.observe(load, seconds_of_a_token * load.num_prompt_tokens)


def check(scheduler: Scheduler, sequence: Sequence, admission: Admission | None = None) -> None:
    holder, shares = scheduler, scheduler.shares
    in_flight = InFlight(len(holder.waiting), shares.sequences_of(sequence.request.key))
    admission = admission or Admission(100, target_seconds=TARGET)
    admission.check(sequence, in_flight, holder)


def refusal(scheduler: Scheduler, sequence: Sequence, admission: Admission | None = None) -> Overloaded:
    with pytest.raises(Overloaded, match="its first token would come after") as caught:
        check(scheduler, sequence, admission)
    assert caught.value.reason == "first_token"
    return caught.value


def crowd(count: int, prompt_len: int, first: int = 0, **fields: Any) -> list[Sequence]:
    return [make_sequence(first + i, prompt_len, 10, **fields) for i in range(count)]


def test_what_is_ahead_counts_and_so_does_its_own_prompt() -> None:
    check(scheduler_of(), make_sequence(50, 180, 10))
    check(scheduler_of(*crowd(4, 20)), make_sequence(50, 10, 10))
    error = refusal(scheduler_of(), make_sequence(50, 300, 10))
    assert error.message == ": its first token would come after 3.0 s, the target is 2 s"
    error = refusal(scheduler_of(*crowd(10, 20)), make_sequence(50, 10, 10))
    assert error.position == 11
    assert error.wait_seconds is not None
    assert error.wait_seconds > 0.5
    refusal(scheduler_of(*crowd(3, 20)), make_sequence(50, 100, 10))


def sequence_of(prompt_len: int, num_pending: int, num_generated: int = 0) -> Sequence:
    sequence = make_sequence(0, prompt_len, 10)
    sequence.output_ids = [7] * num_generated
    sequence.num_computed = sequence.num_known - num_pending
    return sequence


def test_what_is_ahead_is_the_prompts_that_are_not_computed_and_the_streams_of_all() -> None:
    scheduler = scheduler_of()
    streams = {0: sequence_of(10, 1, num_generated=3), 1: sequence_of(20, 2)}
    ahead = [sequence_of(30, 30), sequence_of(1, 1)]
    estimate = TtftEstimator(scheduler.step_time, PrefillOfNoPrefix(), scheduler.shares, streams).behind(ahead)
    assert estimate.load == StepLoad(4, 13 + 20 + 30 + 1)
    assert estimate.prompt_seconds == pytest.approx((2 + 30) * SECONDS_OF_A_TOKEN, rel=0.02)
    assert estimate.has_room


def test_prompts_ahead_cost_what_they_do_beside_the_streams_that_run() -> None:
    scheduler = scheduler_of()
    step_time = scheduler.step_time
    for i in range(100):
        load = StepLoad(1, 50)
        step_time.observe(load, 0.01)
        load.add_chunk(0, 5 + i)
        step_time.observe(load, 0.01 + 3 * SECONDS_OF_A_TOKEN * load.num_prompt_tokens)
    for streams, factor in (({}, 1), ({0: sequence_of(10, 1, num_generated=3)}, 3)):
        estimator = TtftEstimator(step_time, PrefillOfNoPrefix(), scheduler.shares, streams)
        estimate = estimator.behind([sequence_of(30, 30)])
        assert estimate.prompt_seconds == pytest.approx(factor * 30 * SECONDS_OF_A_TOKEN, rel=0.02)


def test_prompts_of_one_key_alone_shorten_the_estimate_as_they_do_the_steps() -> None:
    scheduler = scheduler_of()
    streams = {0: sequence_of(10, 1, num_generated=3)}
    estimator = TtftEstimator(scheduler.step_time, PrefillOfNoPrefix(), scheduler.shares, streams)
    ahead = [sequence_of(30, 30) for _ in range(5)]
    assert estimator.behind(ahead).num_queued == 5
    for key in (A, B):
        scheduler.shares.join(key)
    assert estimator.behind(ahead).num_queued == 0


def test_where_nothing_was_measured_nor_is_ahead_nothing_is_estimated() -> None:
    estimator = scheduler_of(is_measured=False).ttft_estimator
    assert estimator.seconds(make_sequence(0, 400, 10), estimator.behind([])) == 0.0


def test_without_a_target_everybody_may_wait() -> None:
    check(scheduler_of(*crowd(50, 100)), make_sequence(50, 300, 10), Admission(100))


def test_nobody_is_refused_before_anything_was_measured_unless_somebody_is_ahead() -> None:
    check(scheduler_of(is_measured=False), make_sequence(50, 4000, 10))
    check(scheduler_of(*crowd(1, 10), is_measured=False), make_sequence(50, 10, 10))
    refusal(scheduler_of(*crowd(4, 100), is_measured=False), make_sequence(50, 10, 10))


def test_at_the_door_what_is_ahead_is_known_and_the_prompt_is_not() -> None:
    stranger = Sequence(50, incoming_request())
    check(scheduler_of(*crowd(4, 20)), stranger)
    refusal(scheduler_of(*crowd(10, 20)), stranger)


def test_the_more_urgent_and_keys_that_were_given_less_have_fewer_ahead() -> None:
    flood = crowd(10, 20, key=A)
    refusal(scheduler_of(*flood), make_sequence(50, 10, 10, key=A))
    check(scheduler_of(*flood), make_sequence(50, 10, 10, key=A, priority=-1))
    check(scheduler_of(*flood), make_sequence(50, 10, 10, key=B))


def test_a_prompt_that_is_found_computed_takes_no_time() -> None:
    scheduler, earlier = scheduler_of(), make_sequence(0, 400, 10)
    for i in range(25):
        scheduler.blocks.publish(scheduler.blocks.allocate(1)[0], earlier.block_key(i, 16))
    refusal(scheduler_of(), make_sequence(50, 420, 10))
    check(scheduler, make_sequence(50, 420, 10))


def test_siblings_have_one_prompt_where_they_find_it() -> None:
    first = make_sequence(0, 80, 10)
    siblings = [first, *(Sequence(i, first.request) for i in range(1, 4))]
    check(scheduler_of(*siblings), make_sequence(50, 1, 10))
    refusal(scheduler_of(*siblings, has_prefix_cache=False), make_sequence(50, 1, 10))


@pytest.mark.parametrize("policy", [{"max_batch_size": 2}, {}])
def test_where_the_batch_is_full_it_waits_for_others_to_end(policy: dict[str, int]) -> None:
    scheduler, last = scheduler_of(*crowd(2, 5), **policy), make_sequence(50, 5, 10)
    admission = Admission(100, target_seconds=TARGET)
    admission.throughput.observe_step(1, 10.0, now=0.0)  # slow with completions
    if policy:
        refusal(scheduler, last, admission)
    else:
        check(scheduler, last, admission)


def test_it_is_more_cautious_after_first_tokens_were_late() -> None:
    throughput = Throughput()

    def tokens(seconds: float, count: int) -> None:
        for _ in range(count):
            sequence = make_sequence(0, 5, 5)
            sequence.estimated_seconds = 1.0
            throughput.observe_first_token(sequence, now=seconds)
            assert not sequence.estimated_seconds, "it is there"

    tokens(0.9, 10_000)
    assert throughput.cautious(1.0) == 1.0
    tokens(1.5, 11)
    assert 1.5 < throughput.cautious(1.0) < 1.6
    tokens(9.0, 100)
    assert throughput.cautious(1.0) == MAX_LATENESS


def flood(target: float | None, words: dict[str, Any]) -> Any:
    """Measures of ten times what the demo model can serve on two cores; it was hardly used before."""
    draw, at, arrivals = random.Random(1), BEGIN, []
    lengths = {"prompt_tokens": 42, "completion_tokens": 32, "max_new_tokens": 32}
    for i in range(5):
        arrivals.append(trace.Arrival(at=float(i), **lengths))
    while (at := at + draw.expovariate(100.0)) < BEGIN + 20.0:
        arrivals.append(trace.Arrival(at=at, **lengths))
    found = measures.Measures()
    policy = SchedulerPolicy(max_batch_prefill_tokens=4096, has_prefix_cache=True, **words)
    scheduler = Scheduler(policy, BlockPool(20_000, 16))
    admission = Admission(128, target_seconds=target)
    replica = simulation.SimulatedReplica(scheduler, costs.DEMO_COSTS, found, 2, admission)
    simulation.simulate(arrivals, [replica], lambda count: None)
    assert found.num_finished + found.num_turned_away == len(arrivals)
    return found


def share_within(found: Any, seconds: float) -> float:
    bins = found.to_first_token._bins
    bound = math.log(seconds) * measures.BINS_PER_UNIT
    return sum(count for place, count in bins.items() if place <= bound) / bins.total()


@pytest.mark.parametrize("words", [{}, {"target_gap_seconds": 0.5}, {"max_batch_size": 32}])
def test_at_ten_times_the_capacity_who_is_let_in_is_in_time_and_as_much_is_served(words: dict[str, Any]) -> None:
    free, bound = flood(None, words), flood(TARGET, words)
    assert share_within(free, TARGET) < 0.95
    assert share_within(bound, TARGET) > 0.98
    served = [found.completion_tokens / (found.ended - BEGIN) for found in (free, bound)]
    assert served[1] > 0.95 * served[0]


async def test_an_engine_refuses_who_would_wait_too_long(tmp_path: Path) -> None:
    async with running(tmp_path, 1, target_ttft_ms=1000.0) as run_of:
        engine, [[fake]], metrics = run_of.fleet, run_of.replicas, run_of.metrics
        scheduler = engine._serving[0].engine._scheduler
        assert await run(engine, request()) == expected(request())
        fake.pause.clear()
        measure_prompts(scheduler, SECONDS_OF_A_TOKEN)
        answer = asyncio.create_task(run(engine, request(20)))
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded, match="its first token would come after .* the target is 1 s"):
            engine.submit(request(80, first=50))
        engine.check_room(incoming_request())
        measure_prompts(scheduler, 5 * SECONDS_OF_A_TOKEN)
        with pytest.raises(Overloaded, match="its first token would come after"):
            engine.check_room(incoming_request(priority=1))
        assert metrics.registry.get_sample_value("funitel_refused_total", {"reason": "first_token"}) == 2.0
        fake.pause.set()
        assert await answer == expected(request(20))
        engine.check_room(incoming_request())
