"""The chunk policy against simulated machines: running streams keep flowing, prompts always advance."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from funitel.router.scheduler.cost.chunk_budget import MIN_CHUNK_TOKENS, StepLoad
from funitel.router.scheduler.cost.step_cost import (
    FIRST_ALONE_TOKENS,
    FIRST_SHARED_TOKENS,
    GAP_FACTOR,
    IDLE_STEP_SECONDS,
    IDLE_STEP_SECONDS_OF_SEVERAL,
    LEAST_GAP_SECONDS,
    MEDIA_GAP_FACTOR,
    PROBE_STEPS,
    SHARED_GROWTH,
    URGENT_FACTOR,
    StepCostModel,
    gap_factor,
)

Noise = Callable[[], float]


def quiet() -> float:
    return 1.0


def constant(factor: float) -> Noise:
    return lambda: factor


def noisy(seed: int) -> Noise:
    """A shared machine: a few percent either way, and 1 step in 200 several times as long."""
    source = random.Random(seed)
    return lambda: max(0.9, source.gauss(1.0, 0.05)) * (source.uniform(2, 8) if source.random() < 0.005 else 1.0)


@dataclass
class Machine:
    """A shard whose steps take a known time, and a model that learns it; 8 streams run beside prompts."""

    base: float = 0.004
    per_decode: float = 0.0015
    per_decode_context: float = 2e-6
    per_token: float = 0.0005
    per_attended: float = 0.43e-6
    per_context: float = 1.5e-6
    per_chunk_step: float = 0.0
    noise: Noise = quiet
    target: float | None = None
    model: StepCostModel = field(init=False)
    steps: list[tuple[StepLoad, float, float]] = field(default_factory=list)  # load, true seconds, measured seconds

    def __post_init__(self) -> None:
        self.model = StepCostModel(self.target)

    def seconds(self, load: StepLoad) -> float:
        chunk = self.per_token * load.num_prompt_tokens + self.per_attended * load.num_attended
        chunk += self.per_context * load.chunk_context + (self.per_chunk_step if load.num_prompt_tokens else 0.0)
        return self.base + self.per_decode * load.num_decodes + self.per_decode_context * load.decode_context + chunk

    def run(self, load: StepLoad) -> None:
        true = self.seconds(load)
        measured = true * self.noise()
        self.steps.append((load, true, measured))
        self.model.observe(load, measured)

    def knows_plain(self, num_decodes: int) -> bool:
        """Whether the last step was a plain one of so many sequences, so that the next has no reason to be."""
        last = self.steps[-1][0] if self.steps else StepLoad()
        return last.num_prompt_tokens == 0 and last.num_decodes == num_decodes

    def decode(self, num_steps: int = 30, num_decodes: int = 8, context: int = 200) -> None:
        for _ in range(num_steps):
            self.run(StepLoad(num_decodes, num_decodes * context))

    def prompt(self, num_tokens: int, num_decodes: int = 8, context: int = 200) -> list[tuple[StepLoad, float, float]]:
        """Compute a prompt beside streams; returns its steps."""
        done, first = 0, len(self.steps)
        while done < num_tokens:
            budget = self.model.budget(4096, StepLoad(num_decodes, num_decodes * context))
            count = budget.take(done, num_tokens - done)
            is_probe = count == 0 and self.target is None and not self.knows_plain(num_decodes)
            assert is_probe or count >= min(MIN_CHUNK_TOKENS, num_tokens - done), "a prompt must advance"
            self.run(budget.load)
            done += count
        return self.steps[first:]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# decode step of 8 streams and seconds a prompt token: a CPU, a small GPU, a large one
@pytest.mark.parametrize(
    "costs",
    [
        {},
        {"base": 0.04, "per_token": 0.0015, "per_attended": 1e-6},
        {
            "base": 0.005,
            "per_decode": 1e-5,
            "per_decode_context": 0,
            "per_token": 2e-5,
            "per_attended": 2e-10,
            "per_context": 1e-8,
        },
        {"base": 0.03, "per_chunk_step": 0.02},  # a step with any prompt token pays the same again
    ],
)
def test_gaps_stay_within_the_default_and_most_of_it_is_used(costs: dict[str, float]) -> None:
    machine = Machine(**costs)  # type: ignore[arg-type]
    machine.decode()
    plain = machine.seconds(StepLoad(8, 1600))
    machine.prompt(7000)
    steps = machine.prompt(7000)
    times = [true for _, true, _ in steps]
    assert percentile(times, 0.99) < max(3 * plain, 1.1 * LEAST_GAP_SECONDS)
    usual = max(GAP_FACTOR * plain, LEAST_GAP_SECONDS)
    assert statistics.median(times) > 0.85 * min(usual, machine.seconds(StepLoad(8, 1600, 2048)))


def test_a_prompt_with_media_makes_shorter_gaps_and_is_never_urgent() -> None:
    machine = Machine(base=0.02)
    machine.decode()
    machine.prompt(1000)
    plain = machine.seconds(StepLoad(8, 1600))
    counts = {}
    for has_media in (False, True):
        for is_urgent in (False, True):
            budget = machine.model.budget(4096, StepLoad(8, 1600), has_media=has_media)
            counts[has_media, is_urgent] = budget.take(0, 4096, is_urgent=is_urgent)
            if has_media:
                assert 1.2 * plain < machine.seconds(budget.load) < 1.1 * MEDIA_GAP_FACTOR * plain
    assert counts[True, True] == counts[True, False] < counts[False, False] < counts[False, True]


@pytest.mark.parametrize("num_streams", [1, 8, 64])
@pytest.mark.parametrize(
    ("num_prompts", "factor"),
    [(1, GAP_FACTOR), (2, GAP_FACTOR + 1), (3, GAP_FACTOR + 2), (4, URGENT_FACTOR), (40, URGENT_FACTOR)],
)
def test_prompts_that_wait_behind_others_make_longer_gaps_but_not_those_of_other_keys(
    num_streams: int, num_prompts: int, factor: float
) -> None:
    assert gap_factor(num_prompts) == factor
    machine = Machine(base=0.05)
    load = StepLoad(num_streams, num_streams * 200)
    machine.decode(num_decodes=num_streams)
    machine.prompt(3000, num_decodes=num_streams)
    plain = machine.seconds(load)
    for has_several_keys, expected in ((False, factor), (True, GAP_FACTOR)):
        for _ in range(6):  # chunks grow step by step
            budget = machine.model.budget(
                4096, replace(load), num_prompts=num_prompts, has_several_keys=has_several_keys
            )
            budget.take(0, 4096)
            machine.run(budget.load)
        assert 0.85 * expected * plain < machine.seconds(budget.load) < 1.1 * expected * plain


def test_the_time_of_queued_prompts_is_estimated_with_the_longer_gaps_they_are_given() -> None:
    machine = Machine(base=0.05)
    machine.decode()
    machine.prompt(3000)
    load = StepLoad(16, 16 * 200)
    for num_prompts, factor in ((1, GAP_FACTOR), (5, gap_factor(3)), (400, URGENT_FACTOR)):
        plain, costs = machine.model.plain_seconds(load), machine.model.prompts_seconds(load, 60.0, num_prompts)
        assert costs == pytest.approx(60.0 * factor / (factor - 1), rel=0.1)
        assert costs > 60.0 + plain


@pytest.mark.parametrize("num_steps", [1, 30])
def test_gaps_stay_within_the_default_where_first_chunks_seemed_to_cost_nothing(num_steps: int) -> None:
    machine = Machine(noise=constant(4.0))
    machine.decode()
    machine.noise = constant(1.0)  # the machine is faster now: a step with a chunk takes less than one without did
    for _ in range(num_steps):
        machine.run(StepLoad(8, 1600, 8, 36))
    machine.decode()
    plain = machine.seconds(StepLoad(8, 1600))
    times = [true for _, true, _ in machine.prompt(7000)]
    assert max(times) < 1.25 * GAP_FACTOR * plain
    assert statistics.median(times) > 0.85 * GAP_FACTOR * plain


def test_no_larger_chunk_follows_one_that_took_far_longer_than_predicted() -> None:
    def next_chunk(noise: float) -> int:
        machine = Machine()
        machine.decode()
        for _ in range(10):
            machine.run(StepLoad(8, 1600, 8, 36))
        machine.noise = constant(noise)
        machine.run(StepLoad(8, 1600, 12, 78))
        return machine.model.budget(4096, StepLoad(8, 1600)).take(0, 4096)

    assert next_chunk(1.0) == SHARED_GROWTH * 12
    assert next_chunk(5.0) < SHARED_GROWTH * 8


def test_a_single_slow_step_of_prompts_alone_changes_little() -> None:
    machine, load = Machine(), StepLoad(0, 0, 64, 2080)
    for _ in range(50):
        machine.run(load)
    machine.noise = constant(10.0)
    machine.run(load)
    assert machine.model.seconds(load) == pytest.approx(machine.seconds(load), rel=0.05)


def test_late_chunks_of_a_long_prompt_are_smaller() -> None:
    machine = Machine()
    machine.decode()
    steps = machine.prompt(7000)
    counts = [load.num_prompt_tokens for load, *_ in steps]
    assert max(counts) > 4 * statistics.median(counts[-20:-1])


def test_the_next_prompt_starts_small_again_where_only_late_chunks_are_remembered() -> None:
    machine = Machine()
    machine.decode()
    for _ in range(3):
        steps = machine.prompt(7000)
        times = [true for _, true, _ in steps]
        assert max(times) < 1.15 * GAP_FACTOR * machine.seconds(StepLoad(8, 1600))


@pytest.mark.parametrize("target", [0.035, 0.05, 0.1])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_target_holds_at_the_99th_percentile_on_a_noisy_machine(target: float, seed: int) -> None:
    machine = Machine(target=target, noise=noisy(seed))
    machine.decode(200)
    machine.prompt(2500)
    within: list[float] = []
    while len(within) < 400:
        within += [measured for *_, measured in machine.prompt(2500)]
    assert percentile(within, 0.97) < target  # the outliers alone, 1 in 200, no plan can avoid
    assert statistics.median(within) > 0.7 * target, "the room that the target leaves is used"


def test_the_default_is_a_multiple_of_the_step_that_the_streams_at_hand_take() -> None:
    machine = Machine()
    for num_decodes in (1, 8, 32, 1, 8, 32):
        machine.decode(60, num_decodes)
    for num_decodes in (1, 32):
        machine.prompt(400, num_decodes)  # grown to size
        times = [true for _, true, _ in machine.prompt(2000, num_decodes)[:-1]]
        gap = max(GAP_FACTOR * machine.seconds(StepLoad(num_decodes, num_decodes * 200)), LEAST_GAP_SECONDS)
        assert 0.8 * gap < statistics.median(times) < 1.1 * gap


@pytest.mark.parametrize("num_decodes", [1, 64, 256])
@pytest.mark.parametrize("per_chunk_step", [0.0, 0.015])
def test_on_a_fast_device_prompts_take_what_makes_no_gap_that_is_noticed(
    num_decodes: int, per_chunk_step: float
) -> None:
    """Steps of 5 to 15 ms; those with prompts may take three times as much to launch, whatever is in them."""
    machine = Machine(0.005, 1.2e-5, 3.2e-8, 3e-5, 3e-10, 0.0, per_chunk_step)
    machine.decode(60, num_decodes, context=1000)
    machine.prompt(20_000, num_decodes, context=1000)  # grown to size
    steps = machine.prompt(8000, num_decodes, context=1000)
    times = [true for _, true, _ in steps[:-1]]
    assert 0.85 * LEAST_GAP_SECONDS < statistics.median(times)
    assert percentile(times, 0.99) < 1.2 * LEAST_GAP_SECONDS
    least = 250 if per_chunk_step else 600  # of 4,096: what is left of 40 ms, at 30 us a token
    assert statistics.median(load.num_prompt_tokens for load, *_ in steps[:-1]) > least
    budget = machine.model.budget(4096, StepLoad(num_decodes, num_decodes * 1000))
    assert budget.fit(0, 4096, is_urgent=True) >= budget.fit(0, 4096)


def test_a_server_that_is_busy_from_its_first_step_learns_what_decoding_takes() -> None:
    machine = Machine()
    chunks = []
    for num_decodes in range(1, 65):  # a burst of 64 prompts of 100 tokens
        chunks += [load.num_prompt_tokens for load, *_ in machine.prompt(100, num_decodes)]
    plain = machine.seconds(StepLoad(64, 64 * 200))
    assert machine.model.plain_seconds(StepLoad(64, 64 * 200)) == pytest.approx(plain, rel=0.2)
    assert 0 < chunks.count(0) < 16


def test_what_decoding_takes_is_measured_now_and_then_beside_a_long_prompt() -> None:
    machine = Machine()
    machine.decode()
    steps = machine.prompt(7000)
    probes = [i for i, (load, *_) in enumerate(steps) if load.num_prompt_tokens == 0]
    assert len(steps) // PROBE_STEPS - 2 <= len(probes) <= len(steps) // PROBE_STEPS
    given = Machine(target=0.04)  # with a target nothing depends on it
    given.decode()
    assert all(load.num_prompt_tokens for load, *_ in given.prompt(3000))


def test_one_very_slow_step_changes_little() -> None:
    machine = Machine()
    machine.decode()
    machine.prompt(4000)
    before = machine.model.budget(4096, StepLoad(8, 1600)).fit(1000, 4096)
    machine.model.observe(StepLoad(8, 1600, before, before * 1000, 1000), 5.0)
    machine.model.observe(StepLoad(8, 1600), 5.0)
    after = machine.model.budget(4096, StepLoad(8, 1600)).fit(1000, 4096)
    assert 0.6 * before < after < 1.5 * before


def test_a_machine_that_becomes_twice_as_slow_is_followed() -> None:
    machine = Machine(target=0.08)
    machine.decode()
    machine.prompt(3000)
    machine.noise = lambda: 2.0
    machine.decode(10)
    late = [measured for *_, measured in machine.prompt(3000)[20:]]
    assert percentile(late, 0.95) < 0.08 * 1.02


def test_an_impossible_target_is_told_and_prompts_advance_at_the_floor() -> None:
    machine = Machine(target=0.001)
    assert machine.model.longest_plain_seconds is None
    machine.decode()
    steps = machine.prompt(400)
    assert {load.num_prompt_tokens for load, *_ in steps[5:-1]} == {MIN_CHUNK_TOKENS}
    assert machine.model.longest_plain_seconds == pytest.approx(machine.seconds(StepLoad(8, 1600)), rel=0.01)
    possible = Machine(target=0.1)
    possible.decode()
    possible.prompt(400)
    assert possible.model.longest_plain_seconds is None


def test_chunks_beside_streams_grow_from_the_smallest() -> None:
    machine = Machine()
    for _ in range(5):  # what prompts cost alone says nothing about them
        machine.run(StepLoad(0, 0, 400, 400 * 200, 0))
    machine.decode()
    counts = [load.num_prompt_tokens for load, *_ in machine.prompt(500)]
    assert counts[0] == FIRST_SHARED_TOKENS
    assert all(b <= SHARED_GROWTH * a for a, b in zip(counts, counts[1:], strict=False))


def test_before_anything_is_measured_the_first_chunk_is_modest() -> None:
    assert StepCostModel().budget(4096, StepLoad()).fit(0, 4096) == FIRST_ALONE_TOKENS
    assert StepCostModel().budget(10, StepLoad()).fit(0, 4096) == 10
    assert StepCostModel(0.02).budget(4096, StepLoad(1, 10)).fit(0, 4096) == FIRST_SHARED_TOKENS


def test_alone_a_prompt_takes_big_chunks_but_bounded_steps() -> None:
    machine = Machine(base=0.03, per_token=0.001, target=0.001)  # no stream, no gap: the target says nothing
    steps = machine.prompt(7000, num_decodes=0)
    assert len(steps) < 70
    assert max(true for _, true, _ in steps) < 1.15 * IDLE_STEP_SECONDS
    assert statistics.median(true for _, true, _ in steps[3:]) > 0.8 * IDLE_STEP_SECONDS


def test_where_several_keys_are_known_prompts_alone_leave_room_for_another() -> None:
    machine = Machine(base=0.005, per_token=0.001)
    machine.prompt(4000, num_decodes=0)
    usual = machine.model.budget(4096, StepLoad())
    several = machine.model.budget(4096, StepLoad(), has_several_keys=True)
    assert several.fit(0, 4096, is_urgent=True) == usual.fit(0, 4096) > 300
    assert several.take(0, 4096) < 100
    assert machine.seconds(several.load) < 1.1 * IDLE_STEP_SECONDS_OF_SEVERAL


def test_the_urgent_get_four_fifths_of_the_machine_unless_there_is_a_target() -> None:
    plain = StepLoad(8, 1600)
    for target, factor in ((None, URGENT_FACTOR), (0.04, 0.04 / Machine().seconds(plain))):
        machine = Machine(target=target)
        machine.decode()
        machine.prompt(2000)
        machine.prompt(200)  # of usual size, so that the urgent may have as many
        budget = machine.model.budget(4096, StepLoad(8, 1600))
        budget.take(0, 4096, is_urgent=True)
        assert machine.seconds(budget.load) < 1.1 * factor * machine.seconds(plain)
        assert machine.seconds(budget.load) > 0.8 * min(factor, 3.5) * machine.seconds(plain)


def test_a_step_of_any_kind_is_predicted() -> None:
    machine = Machine(per_chunk_step=0.002)
    assert machine.model.seconds(StepLoad(3, 60)) == machine.model.seconds(StepLoad(0, 0, 20, 210)) == 0.0
    machine.prompt(3000, num_decodes=0)
    machine.decode()
    machine.prompt(3000)
    for load in (StepLoad(8, 1600), StepLoad(0, 0, 300, 300 * 151), StepLoad(8, 1600, 32, 32 * 500, 484)):
        assert machine.model.seconds(load) == pytest.approx(machine.seconds(load), rel=0.1)


def test_a_step_of_a_single_stream_is_not_one_of_prompts_alone() -> None:
    machine = Machine()
    machine.decode(num_decodes=1)
    machine.prompt(3000, num_decodes=1)
    for load in (StepLoad(1, 200), StepLoad(1, 200, 32, 32 * 500, 484)):
        assert machine.model.seconds(load) == pytest.approx(machine.seconds(load), rel=0.1)
    assert machine.model.seconds(StepLoad(0, 0, 32, 32 * 500, 484)) == 0.0


@pytest.mark.parametrize("is_alone_first", [True, False])
def test_prompts_cost_what_they_did_beside_streams_or_alone_or_else_what_is_known(is_alone_first: bool) -> None:
    machine = Machine(per_token=0.001)
    model = machine.model
    assert model.prompt_costs(has_streams=True) is model.prompt_costs(has_streams=False) is None
    machine.decode()
    machine.prompt(1000, num_decodes=0 if is_alone_first else 8)
    assert model.prompt_costs(has_streams=True) == model.prompt_costs(has_streams=False)
    machine.per_token = 0.003
    machine.prompt(1000, num_decodes=8 if is_alone_first else 0)
    streams, alone = model.prompt_costs(has_streams=True), model.prompt_costs(has_streams=False)
    assert streams is not None
    assert alone is not None
    cheap, dear = (alone, streams) if is_alone_first else (streams, alone)
    assert dear.seconds(0, 32) > 2 * cheap.seconds(0, 32)


@pytest.mark.parametrize(
    ("target", "chunks", "num_decodes", "seconds", "predicted"),
    [
        # 10 ms a plain step, 5 ms more with a prompt: what is left of 40 ms is 25 ms.
        pytest.param(None, (4, 16, 40), 8, 0.055, 0.055 + 3 * 0.005 + 4 * 0.01, id="3 chunks, by the default"),
        pytest.param(0.05, (4, 16, 40), 8, 0.2, 0.2 + 6 * 0.005 + 7 * 0.01, id="6 chunks of 35 ms"),
        pytest.param(0.05, (2, 5, 8), 8, 0.2, 0.2 + 8 * 0.005 + 9 * 0.01, id="and 2 that grow from 16 ms"),
        pytest.param(0.05, (2, 5, 8), 8, 0.05, 0.05 + 4 * 0.005 + 5 * 0.01, id="2 chunks, and 2 that grow"),
        pytest.param(0.05, (2, 5, 8), 8, 0.01, 0.01 + 0.005 + 2 * 0.01, id="a single chunk need not grow"),
        pytest.param(0.005, (), 8, 0.01, 0.01 + 2 * 0.01, id="no time is left, and no prompt was measured"),
        pytest.param(None, (4, 16, 40), 0, 1.2, 1.2 + 3 * 0.015, id="3 steps without streams"),
    ],
)
def test_how_long_prompts_take_in_how_many_chunks(
    target: float | None, chunks: tuple[int, ...], num_decodes: int, seconds: float, predicted: float
) -> None:
    machine = Machine(0.01, 0.0, 0.0, 0.001, 0.0, 0.0, 0.005, target=target)
    if num_decodes:
        machine.decode(60)
    streams = StepLoad(num_decodes, 200 * num_decodes)
    for chunk in chunks * 40:
        load = replace(streams)
        load.add_chunk(0, chunk)
        machine.run(load)
    assert machine.model.prompts_seconds(streams, seconds) == pytest.approx(predicted, rel=0.02)


def test_how_long_prompts_take_in_chunks_of_a_multiple_of_plain_steps() -> None:
    """20 ms a plain step, 10 ms more with a prompt: what is left of 50 ms is 20 ms."""
    machine = Machine(0.02, 0.0, 0.0, 0.002, 0.0, 0.0, 0.01)
    machine.decode(60)
    for chunk in (4, 16, 40) * 40:
        load = StepLoad(8, 1600)
        load.add_chunk(0, chunk)
        machine.run(load)
    predicted = machine.model.prompts_seconds(StepLoad(8, 1600), 0.11)
    assert predicted == pytest.approx(0.11 + 6 * 0.01 + 7 * 0.02, rel=0.02)


@pytest.mark.parametrize("num_decodes", [0, 8])
def test_what_is_taken_of_a_budget_is_added_to_the_load_it_was_made_for(num_decodes: int) -> None:
    machine = Machine()
    machine.decode()
    load = StepLoad(num_decodes, 200 * num_decodes)
    machine.model.budget(4096, load).take(0, 4)
    assert load.num_prompt_tokens == 4


@pytest.mark.parametrize(
    ("num_steps", "num_decodes", "is_probe"),
    [
        pytest.param(PROBE_STEPS - 1, 8, False, id="a plain step was measured lately"),
        pytest.param(PROBE_STEPS, 8, True, id="or is measured anew"),
        pytest.param(1, 13, False, id="one of nearly as many sequences was measured"),
        pytest.param(1, 14, True, id="or far fewer"),
    ],
)
def test_when_a_plain_step_is_measured(num_steps: int, num_decodes: int, is_probe: bool) -> None:
    machine = Machine()
    machine.decode()
    for _ in range(num_steps):
        load = StepLoad(8, 1600)
        load.add_chunk(0, 20)
        machine.run(load)
    budget = machine.model.budget(4096, StepLoad(num_decodes, 200 * num_decodes))
    assert (budget.take(0, 100) == 0) == is_probe


@pytest.mark.parametrize(
    ("outlier", "plain_outlier", "least", "most"),
    [
        pytest.param(1.0, 1.0, 14, 16, id="no noise"),
        pytest.param(1.45, 1.0, 4, 10, id="of steps with prompts"),
        pytest.param(1.45, 1.45, 13, 20, id="of all steps"),
    ],
)
def test_noise_that_plain_steps_lack_makes_chunks_smaller(
    outlier: float, plain_outlier: float, least: int, most: int
) -> None:
    machine = Machine(0.02, 0.0, 0.0, 0.002, 0.0, 0.0)
    machine.decode(60)
    for i in range(200):
        load = StepLoad(8, 1600)
        machine.noise = constant(plain_outlier if i % 5 == 0 else 1.0)
        machine.run(load)
        load = replace(load)
        load.add_chunk(0, 10 + i % 7)
        machine.noise = constant(outlier if i % 5 == 0 else 1.0)
        machine.run(load)
    assert least <= machine.model.budget(4096, StepLoad(8, 1600)).take(0, 4096) <= most


def test_what_plain_steps_cost_is_worked_out_for_every_fourth() -> None:
    machine, load = Machine(), StepLoad(8, 1600)
    machine.decode(40)
    changed = []
    for number in range(41, 49):
        before = machine.model.plain_seconds(load)
        machine.model.observe(load, number / 100)
        changed.append(machine.model.plain_seconds(load) != before)
    assert changed == [False, False, False, True] * 2


def test_a_step_with_prompts_may_be_the_first() -> None:
    model, load = StepCostModel(0.02), StepLoad(1, 10, 8, 36)
    model.observe(load, 0.01)
    assert model.seconds(load) == pytest.approx(0.01, rel=0.01)


def test_a_plain_step_that_just_keeps_to_the_target_is_not_too_long() -> None:
    machine = Machine()
    machine.decode()
    load = StepLoad(8, 1600)
    for factor, is_too_long in ((1.0, False), (0.99, True)):
        machine.model.target_gap_seconds = factor * machine.model.plain_seconds(load)
        machine.model.budget(4096, load)
        assert (machine.model.longest_plain_seconds is not None) == is_too_long


def test_a_prompt_of_many_chunks_shares_its_step_with_short_ones() -> None:
    machine = Machine()
    machine.decode()
    machine.prompt(2000)
    budget = machine.model.budget(4096, StepLoad(8, 1600))
    first, *rest = [budget.take(0, 6) for _ in range(40)]
    assert first == 6
    assert 6 in rest
    assert rest[-1] == 0, "the time is spent"
    assert budget.is_spent
    assert machine.seconds(budget.load) < 1.1 * GAP_FACTOR * machine.seconds(StepLoad(8, 1600))
