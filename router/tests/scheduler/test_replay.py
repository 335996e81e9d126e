"""The replay tool in small: traces, virtual time, what is measured, and the program itself."""

import json
import math
import subprocess
import sys
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from simulations import BENCHMARKS, costs, measures, run, simulation, trace

from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.scheduler import Scheduler

COSTS = costs.StepCosts(base=1.0, prompt_token=0.1, decode_row=0.01, context_token=0.001, prompt_pair=0.0001)


def arrival(at: float, prompt_tokens: int, completion_tokens: int, **fields: Any) -> Any:
    fields = {"max_new_tokens": completion_tokens} | fields
    return trace.Arrival(at=at, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, **fields)


def simulate(arrivals: list[Any], num_blocks: int = 100, num_replicas: int = 1, steps: int = 2, **policy: Any) -> Any:
    """Measures of a replay with blocks of four tokens."""
    policy = {"max_batch_prefill_tokens": 64, "has_prefix_cache": True} | policy
    found = measures.Measures()
    replicas = [
        simulation.SimulatedReplica(Scheduler(SchedulerPolicy(**policy), BlockPool(num_blocks, 4)), COSTS, found, steps)
        for _ in range(num_replicas)
    ]
    simulation.simulate(arrivals, replicas, lambda count: None)
    assert all(replica.load_tokens == replica.scheduler.blocks.num_used == 0 for replica in replicas)
    return found


def about(value: float) -> Any:
    """Within the width of a histogram's bin."""
    return pytest.approx(value, rel=0.003)


def test_one_request_takes_the_time_of_its_steps() -> None:
    found = simulate([arrival(5.0, 10, 3)])
    prefill = 1.0 + 0.1 * 10 + 0.0001 * 55
    decodes = [1.0 + 0.01 + 0.001 * length for length in (11, 12)]
    assert found.to_first_token.percentile(0.5) == about(prefill)
    assert [found.between_tokens.percentile(share) for share in (0.4, 1.0)] == [about(each) for each in decodes]
    assert found.ended == pytest.approx(5.0 + prefill + sum(decodes))
    assert (found.num_steps, found.completion_tokens, found.computed_tokens) == (3, 3, 10)


def test_who_comes_during_a_step_joins_the_next_and_waits_for_it() -> None:
    """The first plain step of all is not joined: what prompts may add to it is yet to be known."""
    prefill, plain = 1.0 + 0.1 * 10 + 0.0001 * 55, 1.0 + 0.01 + 0.001 * 11
    found = simulate([arrival(0.0, 10, 30), arrival(prefill + 0.5, 4, 1)], steps=1)
    second = 1.0 + 0.1 * 4 + 0.0001 * 10 + 0.01 + 0.001 * 12
    assert found.to_first_token.percentile(0.4) == about(plain - 0.5 + second)
    assert found.between_tokens.percentile(1.0) == about(second)


def test_a_prefix_of_a_group_is_found_and_so_is_the_answer_of_the_turn_before() -> None:
    shared = [arrival(100.0 * i, 20, 2, prefix_group=7, prefix_tokens=12) for i in range(2)]
    stranger = arrival(300.0, 20, 2, prefix_group=8, prefix_tokens=12)
    chat = [arrival(400.0 + 100 * i, n, 9, prefix_group=9, prefix_tokens=n) for i, n in enumerate((10, 24))]
    assert simulate(shared).cached_tokens == 12
    assert simulate([*shared, stranger]).cached_tokens == 12
    assert simulate(chat).cached_tokens == 16  # 18 of the first turn are computed
    assert simulate(chat, has_prefix_cache=False).cached_tokens == 0


def test_what_can_never_fit_is_refused_and_counted() -> None:
    found = simulate([arrival(0.0, 30, 10), arrival(0.0, 30, 11)], num_blocks=10)
    assert (found.num_requests, found.num_refused, found.num_finished) == (2, 1, 1)


def test_blocks_that_run_out_show_as_preempted_sequences_and_as_tokens_computed_again() -> None:
    arrivals = [arrival(0.0, 8, 16) for _ in range(6)]
    roomy, tight = simulate(arrivals), simulate(arrivals, num_blocks=8, has_prefix_cache=False)
    assert roomy.num_finished == tight.num_finished == 6
    assert roomy.completion_tokens == tight.completion_tokens == 6 * 16
    assert roomy.computed_tokens == 6 * 8 < tight.computed_tokens
    assert tight.pool_used_queued.mean is not None
    assert 0.5 < tight.pool_used_queued.mean <= tight.pool_used.most <= 1.0


def test_reserving_admits_fewer_at_a_time_than_growing() -> None:
    arrivals = [arrival(0.0, 8, 24, max_new_tokens=56) for _ in range(24)]
    grow = simulate(arrivals, num_blocks=40)
    reserve = simulate(arrivals, num_blocks=40, is_chunked=False, has_prefix_cache=False)
    assert grow.num_finished == reserve.num_finished == 24
    assert reserve.running.most == 2  # sixteen blocks each
    assert grow.running_queued.mean > 2 * reserve.running_queued.mean


def test_a_step_sent_ahead_lets_nobody_in_whom_it_does_not_know() -> None:
    arrivals = [arrival(0.0, 10, 30), arrival(2.5, 4, 1, key="late")]  # the second step is computed, the third sent
    ends = []
    for steps in (1, 2):
        found = simulate(arrivals, steps=steps)
        ends.append(found.to_first_token_of["late"].percentile(1.0))
    assert ends[1] - ends[0] == pytest.approx(1.0 + 0.01 + 0.001 * 13, rel=0.05)


def test_an_end_before_its_time_shows_a_step_later() -> None:
    early, late = (simulate([arrival(0.0, 10, 5, max_new_tokens=most)]) for most in (9, 5))
    assert early.completion_tokens == late.completion_tokens == 5
    assert (early.num_steps, late.num_steps) == (6, 5)


def test_keys_are_told_apart_and_served_fairly() -> None:
    flood = [arrival(0.0, 16, 8, key="flood") for _ in range(40)]
    report = simulate([*flood, arrival(1.0, 16, 8, key="one")], num_blocks=40).report()
    assert report["ttft_of_keys"]["one"]["p99"] < 0.5 * report["ttft_of_keys"]["flood"]["p50"]


@pytest.mark.parametrize(
    ("flood", "prompt_tokens"),
    [((180, 64), 183), ((180, 64), 600), ((20, 150), 183), ((1000, 1), 183)],
    ids=["usual", "a longer prompt", "short prompts", "long prompts and no streams"],
)
def test_a_key_that_asks_now_and_then_hardly_notices_the_flood_of_another(
    flood: tuple[int, int], prompt_tokens: int
) -> None:
    """Its time to first token over that of an idle server, whatever the flood is made of."""

    def first_token(*others: Any) -> float:
        asks = [arrival(10.03 + 2.1 * i, prompt_tokens, 8, key="other") for i in range(7)]
        warm_up = [arrival(0.0, 4, 8), *(arrival(1.0 + i, 183, 8) for i in range(3))]
        found = measures.Measures()
        policy = SchedulerPolicy(max_batch_prefill_tokens=4096, has_prefix_cache=True, max_batch_size=8)
        replica = simulation.SimulatedReplica(Scheduler(policy, BlockPool(2500, 16)), costs.DEMO_COSTS, found, 2)
        simulation.simulate([*warm_up, *sorted([*others, *asks], key=lambda a: a.at)], [replica], lambda count: None)
        return float(found.to_first_token_of["other"].percentile(0.5))

    at_once = [arrival(9.0, *flood, key="flood") for _ in range(100)]
    assert first_token(*at_once) < 1.9 * first_token()


def test_prompts_that_come_at_once_get_most_of_a_fast_device() -> None:
    """A large model on a GPU: few streams decode in 5 ms, and a prompt costs as much as six of their steps."""
    gpu = costs.StepCosts(base=0.005, prompt_token=3e-5, decode_row=1.2e-5, context_token=3.2e-8, prompt_pair=3e-10)
    found = measures.Measures()
    policy = SchedulerPolicy(max_batch_prefill_tokens=4096, has_prefix_cache=True)
    replica = simulation.SimulatedReplica(Scheduler(policy, BlockPool(6000, 16)), gpu, found, 2)
    simulation.simulate([arrival(0.0, 1024, 150) for _ in range(64)], [replica], lambda count: None)
    prompts = 64 * gpu.seconds(1024, 1024 * 1025 / 2, 0, 0) - 64 * gpu.base
    assert found.to_first_token.percentile(1.0) < 1.4 * prompts
    assert found.between_tokens.percentile(0.99) < 0.045


def test_replicas_are_chosen_by_the_longest_prefix_that_is_there() -> None:
    turns = [arrival(40.0 * i, 24, 4, prefix_group=i % 3, prefix_tokens=20) for i in range(9)]
    found = simulate(turns, num_replicas=3)
    assert found.cached_tokens == 6 * 20


def test_the_load_of_a_replica_is_what_its_scheduler_says(monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen = simulation.choose, []

    def choose(replicas: Any, sequence: Any) -> int:
        seen.extend((each.load_tokens, each.scheduler.load_tokens) for each in replicas)
        return int(place(replicas, sequence))

    monkeypatch.setattr(simulation, "choose", choose)
    simulate([arrival(1.7 * i, 8 + i, 30 - i) for i in range(20)], num_replicas=2, num_blocks=30)
    assert len(seen) == 40
    assert all(ours == theirs for ours, theirs in seen)
    assert any(ours for ours, _ in seen)


def test_replicas_share_the_load() -> None:
    arrivals = [arrival(0.0, 8, 20) for _ in range(8)]
    alone, shared = simulate(arrivals), simulate(arrivals, num_replicas=4)
    assert shared.num_finished == 8
    assert (alone.running.most, shared.running.most) == (8, 2)
    assert shared.ended < alone.ended


def test_a_synthetic_trace_is_its_seed_and_has_the_lengths_asked_for() -> None:
    drawn = trace.Synthetic(num_requests=4000, rate=50.0, seed=3, num_groups=5, prefix_tokens=100)
    arrivals = list(drawn)
    assert arrivals == list(drawn)
    assert arrivals != list(trace.Synthetic(num_requests=4000, rate=50.0, seed=4, num_groups=5, prefix_tokens=100))
    assert arrivals[-1].at == pytest.approx(80.0, rel=0.1)
    assert sum(a.prompt_tokens - a.prefix_tokens for a in arrivals) / 4000 == pytest.approx(215, rel=0.1)
    assert sum(a.completion_tokens for a in arrivals) / 4000 == pytest.approx(200, rel=0.1)
    assert sum(a.prefix_tokens == 100 for a in arrivals) / 4000 == pytest.approx(0.5, abs=0.05)
    assert {a.prefix_group for a in arrivals if a.prefix_tokens} == set(range(5))


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    drawn = trace.Synthetic(num_requests=50, rate=1.0, num_groups=2)
    assert trace.write(tmp_path / "trace.jsonl", drawn) == 50
    assert list(trace.read(tmp_path / "trace.jsonl")) == list(drawn)


LINE = {"at": 1.0, "prompt_tokens": 10, "completion_tokens": 5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "a JSON object is expected, not list"),
        ("{", "not JSON"),
        (json.dumps(LINE | {"at": 0.5}), "at is 0.5, before the line above (1.0)"),
        (json.dumps(LINE | {"at": math.nan}), "at is nan, must be a number >= 0"),
        (json.dumps(LINE | {"prompt_tokens": 0}), "prompt_tokens is 0, must be from 1 to 16777216"),
        (json.dumps(LINE | {"prompt_tokens": 1.5}), "prompt_tokens is 1.5, must be an integer"),
        (json.dumps(LINE | {"completion_tokens": True}), "completion_tokens is True, must be an integer"),
        (json.dumps(LINE | {"max_new_tokens": 4}), "completion_tokens is 5, must be from 1 to 4"),
        (json.dumps(LINE | {"prefix_tokens": 11}), "prefix_tokens is 11, must be from 0 to 10"),
        (json.dumps(LINE | {"text": "hello"}), "text is no field of a request"),
        (json.dumps({"at": 1.0, "completion_tokens": 5}), "prompt_tokens is missing"),
        (json.dumps({"at": 1.0, "prompt_tokens": 5}), "completion_tokens is missing"),
        (json.dumps(LINE | {"key": 7}), "key is 7, must be a string"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + line + "\n")
    with pytest.raises(trace.TraceError) as error:
        list(trace.read(path))
    assert str(error.value).startswith(f"{path}, line 2: ")
    assert message in str(error.value)


def test_percentiles_are_those_of_the_durations() -> None:
    histogram = measures.Histogram()
    for milliseconds in range(1, 1001):
        histogram.add(milliseconds / 1000)
    histogram.add(5.0, 10)
    assert histogram.percentile(0.5) == about(0.505)
    assert histogram.percentile(0.99) == about(1.0)
    assert histogram.percentile(1.0) == about(5.0)
    assert measures.Histogram().percentile(0.5) is None


def test_each_doubling_of_the_shards_keeps_its_share_of_the_speed() -> None:
    assert COSTS.divided(1, 0.9) == COSTS
    assert COSTS.divided(8, 0.9).base == pytest.approx(1 / (8 * 0.9**3))


def test_variants_in_processes_are_what_they_are_alone() -> None:
    policies = [
        run.Variant(
            policy=policy,
            num_replicas=num_replicas,
            trace=trace.Synthetic(num_requests=30, rate=0.1, mean_completion_tokens=20),
            num_requests=30,
            num_blocks=500,
            block_size=16,
            max_batch_prefill_tokens=4096,
            max_batch_size=None,
            has_prefix_cache=True,
            target_gap_seconds=None,
            pipeline_steps=2,
            costs=COSTS,
        )
        for policy, num_replicas in (("grow", 1), ("reserve", 1), ("grow", 3))
    ]
    for variant, report in zip(policies, run.replay_all(policies), strict=True):
        alone = run.replay(variant, lambda count: None)
        assert report | {"replayed_in": 0} == alone | {"replayed_in": 0}
        assert report["finished"] == 30


def replay(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / "replay.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_program_prints_a_table_and_json_and_takes_the_trace_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    drawn = ("--requests", "20", "--rate", "2", "--seed", "5")
    assert json.loads(replay(*drawn, "--write-trace", str(path)).stdout) == {"requests": 20, "file": str(path)}
    lines = []
    for source in (drawn, ("--trace", str(path))):
        answer = replay(*source, "--shards", "8")
        assert answer.returncode == 0, answer.stderr
        *table, last = answer.stdout.splitlines()
        lines.append(table)
        (report,) = json.loads(last)["runs"]
        assert report["finished"] == 20
        assert len(table) == 3
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--trace", "nowhere.jsonl"], 1, "No such file or directory: 'nowhere.jsonl'"),
        (
            ["--policy", "reserve", "--max-batch-prefill-tokens", "5"],
            1,
            "--max-batch-prefill-tokens 5 must be at least",
        ),
        (["--pool-tokens", "5"], 1, "the pool has 5 tokens, must be >= the block size of 16"),
        (["--costs", "/dev/null"], 1, "/dev/null does not hold what --calibrate prints"),
        (["--rate", "0"], 2, "argument --rate: 0 must be > 0"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(
    arguments: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = import_module("replay")
    try:
        found = program.main(arguments)
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_arrivals_are_drawn_one_at_a_time() -> None:
    endless = trace.Synthetic(num_requests=10**12)
    assert len(list(islice(endless, 3))) == 3
