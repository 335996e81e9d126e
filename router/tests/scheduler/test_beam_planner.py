"""Beams in the scheduler: their blocks and states, over a made-up model that reads what is in them."""

import random
from dataclasses import dataclass, field, replace
from math import log, nan
from typing import Any

import pytest

from funitel.proto.step import (
    FinishReason,
    GeneratedText,
    Generation,
    SamplingParams,
    SequenceStart,
    StepResult,
    StoppingParams,
    Tokens,
)
from funitel.router.core.beam_group import BeamEnding
from funitel.router.core.beam_search import BeamParams, BeamSearch
from funitel.router.core.request import Request, Sequence, background_key
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.background import BackgroundShare
from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.cost.step_cost import StepCostModel
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.result_check import check_result
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.serving.beam_request import needed_blocks

BLOCK, VOCAB, LONGEST = 4, 9, 14
ENDS = frozenset({8})


def top_of(tokens: list[int], count: int) -> Tokens:
    """The likeliest tokens after others, by a made-up model."""
    weights = [random.Random(hash((*tokens, token_id))).random() + 0.01 for token_id in range(VOCAB)]
    best = sorted(range(VOCAB), key=lambda token_id: -weights[token_id])[:count]
    return Tokens(tuple(best), tuple(log(weights[i] / sum(weights)) for i in best), ("",) * len(best))


def expected(request: Request) -> list[tuple[int, ...]]:
    """What a search comes to by itself."""
    assert request.beams is not None
    search = BeamSearch(request.beams)
    while not search.is_over:
        count = request.beams.num_candidates
        search.advance([top_of([*request.input_ids, *beam.ids], count) for beam in search.beams])
    return [each.ids for each in search.hypotheses()]


@dataclass
class Shard:
    """What rows hold, read back out of the blocks and the states before each token."""

    rows: dict[int, SequenceStart] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    memory: dict[int, dict[int, int]] = field(default_factory=dict)  # token by place, of each block
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the tokens that a state has read

    def retain(self, keep: set[int]) -> None:
        for row in set(self.rows) - keep:
            for table in (self.rows, self.tokens, self.cached, self.blocks):
                del table[row]

    def step(self, plan: StepPlan) -> StepResult:
        starts = [*plan.starts, *(plan.beams.starts if plan.beams else ())]
        for copy in plan.beams.copies if plan.beams else ():
            assert copy.to_block is not None
            self.memory[copy.to_block] = dict(self.memory[copy.block])
        for start in starts:
            i = start.request_id
            self.rows[i], self.cached[i] = start, start.cache_len
            self.tokens[i], self.blocks[i] = [*start.input_ids, *start.output_ids], list(start.blocks)
            if start.state_slot:
                self.states[start.state_slot] = self.states[start.state_from] if start.state_from else ()
        for update in plan.rows:
            self.blocks[update.request_id] += update.blocks
        saves = {each.request_id: each.state_saves for each in (*starts, *plan.rows)}
        owners: dict[int, int] = {}
        generations = []
        for i, count in plan.computed.items():
            written = {self.blocks[i][place // BLOCK] for place in range(self.cached[i], self.cached[i] + count)}
            for block in written:
                assert owners.setdefault(block, i) == i, "a block is written by two rows"
            generation = self._compute(i, count, dict((s.position, s.slot) for s in saves.get(i, ())))
            if generation is not None:
                generations.append(generation)
        return StepResult(tuple(generations), None)

    def _compute(self, i: int, count: int, saves: dict[int, int]) -> Generation | None:
        start = self.rows[i]
        for _ in range(count):
            place = self.cached[i]
            self.memory.setdefault(self.blocks[i][place // BLOCK], {})[place % BLOCK] = self.tokens[i][place]
            self.cached[i] = place + 1
            if start.state_slot:
                self.states[start.state_slot] += (self.tokens[i][place],)
                if place + 1 in saves:
                    self.states[saves[place + 1]] = self.states[start.state_slot]
        read = [self.memory[self.blocks[i][place // BLOCK]][place % BLOCK] for place in range(self.cached[i])]
        assert read == self.tokens[i][: self.cached[i]], "a row reads what it has not written"
        if start.state_slot:
            assert list(self.states[start.state_slot]) == read
        if self.cached[i] < len(self.tokens[i]):
            return None
        top = top_of(self.tokens[i], start.top_n_tokens or 1)
        self.tokens[i].append(top.ids[0])
        num_new = len(self.tokens[i]) - len(start.input_ids)
        finished = None
        if num_new >= start.stopping.max_new_tokens:
            finished = GeneratedText("", num_new, FinishReason.LENGTH)
        tokens = Tokens(top.ids[:1], top.logprobs[:1], ("",))
        return Generation(i, tokens, (top,) if start.top_n_tokens else (), finished=finished)


def request(seed: int, width: int = 0, max_new_tokens: int = LONGEST, **changes: Any) -> Request:
    chosen = random.Random(seed)
    ids = tuple(chosen.randrange(VOCAB) for _ in range(chosen.randint(1, 14)))
    beams = None
    if width:
        beams = BeamParams(width=width, num_returned=width, max_new_tokens=max_new_tokens, eos_token_ids=ENDS)
    stopping = StoppingParams(max_new_tokens=max_new_tokens)
    return Request(
        input_ids=ids, sampling=SamplingParams(), stopping=stopping, beams=replace(beams, **changes) if beams else None
    )


class Bench:
    """A scheduler and its shard, with `depth` steps in flight."""

    def __init__(self, num_blocks: int = 60, depth: int = 1, state_slots: int = 0, **policy: Any) -> None:
        self.blocks = BlockPool(num_blocks, BLOCK, state_slots=state_slots)
        chosen = {"max_batch_prefill_tokens": 8, "has_prefix_cache": True} | policy
        self.scheduler = Scheduler(SchedulerPolicy(**chosen), self.blocks)
        self.shard, self.depth = Shard(), depth
        self.in_flight: list[tuple[StepPlan, StepResult]] = []
        self.answers: dict[int, list[Generation]] = {}
        self.plans: list[StepPlan] = []

    def add(self, number: int, asked: Request) -> Sequence:
        sequence = Sequence(number, asked)
        self.scheduler.add(sequence)
        return sequence

    def turn(self) -> bool:
        """Send a step, or take the oldest answer; whether there was either."""
        scheduler = self.scheduler
        scheduler.preempt()
        if len(self.in_flight) < self.depth and (plan := scheduler.schedule()) is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.shard.step(plan)))
            return True
        if not self.in_flight:
            return False
        plan, result = self.in_flight.pop(0)
        assert check_result(plan, result, frozenset(), scheduler.running) is None
        for sequence, generation in scheduler.commit(plan, result, 0.01):
            self.answers.setdefault(sequence.id, []).append(generation)
        flying = {i for plan, _ in self.in_flight for i in plan.computed}
        self.shard.retain(set(scheduler.running) | flying)
        return True

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.turn():
                break
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.blocks.num_used == 0
        assert self.blocks.num_free == self.blocks.num_blocks
        if self.blocks.states is not None:
            assert self.blocks.states.num_used == 0

    def found(self, number: int) -> list[tuple[int, ...]]:
        (ending,) = self.answers[number]
        assert isinstance(ending, BeamEnding)
        return [each.ids for each in ending.hypotheses]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("state_slots", [0, 40])
def test_searches_beside_others_find_what_they_find_alone(depth: int, state_slots: int) -> None:
    bench = Bench(depth=depth, state_slots=state_slots, num_blocks=400)
    asked = {i: request(i, width=i % 5) for i in range(8)}
    for number, each in asked.items():
        bench.add(number, each)
    bench.finish()
    alone = Bench(num_blocks=400)
    for number, each in asked.items():
        if each.beams is not None:
            assert bench.found(number) == expected(each)
        else:
            alone.add(number, each)
    alone.finish()
    for number, generations in alone.answers.items():
        assert [g.tokens.ids for g in bench.answers[number]] == [g.tokens.ids for g in generations]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("state_slots", [0, 40])
def test_a_search_of_a_batch_sits_out_until_another_has_its_first_token(depth: int, state_slots: int) -> None:
    bench = Bench(depth=depth, state_slots=state_slots, num_blocks=400)
    asked = replace(request(5, width=3, eos_token_ids=frozenset()), key=background_key(b"a"))
    search = bench.add(0, asked)
    while not search.is_searching or bench.in_flight:
        bench.turn()
    before = search.num_computed
    other = bench.add(1, replace(request(6), input_ids=tuple(i % VOCAB for i in range(30)), key=b"b"))
    num_plans = len(bench.plans)
    while not other.output_ids:
        bench.turn()
    chunks = [plan for plan in bench.plans[num_plans:] if plan.computed.get(1, 1) > 1]
    assert [set(plan.computed) for plan in chunks] == [{1}] * 4
    assert all(plan.beams is None for plan in chunks)
    assert not any(row.request_id == 0 for plan in chunks for row in plan.rows)  # its own row has ended
    assert search.num_computed == before
    bench.finish()
    assert bench.found(0) == expected(asked)


def test_the_beams_of_a_batch_count_as_rows_beside_others() -> None:
    bench = Bench(num_blocks=400)
    searches = {i: replace(request(i, width=4, eos_token_ids=frozenset()), key=background_key(b"a")) for i in range(3)}
    for number, each in searches.items():
        bench.add(number, each)
    while any(not sequence.is_searching for sequence in bench.scheduler.running.values()) or bench.scheduler.waiting:
        bench.turn()
    while bench.in_flight:
        bench.turn()
    other = Sequence(9, replace(request(9), key=b"b"))
    costs = StepCostModel(None)
    for count in (1, 8, 2, 16, 4, 32, 1, 8) * 20:
        costs.observe(StepLoad(count, count * 10), 0.010 + 0.001 * count)
    share = BackgroundShare(costs)
    share.num_quiet_steps = 0
    rows, _ = share.max_rows([other, *bench.scheduler.running.values()])
    assert 2 <= rows <= 3  # a quarter of 11 ms
    part = bench.scheduler._running.decode(rows)
    assert part.num_held == 2  # the first goes on, whatever its rows
    assert part.held_searches == {1, 2}
    assert not part.updates
    part = bench.scheduler._running.decode(8)
    assert part.held_searches == {2}
    bench.finish()
    assert [bench.found(i) for i in range(3)] == [expected(each) for each in searches.values()]


def test_full_blocks_are_shared_and_only_the_last_is_copied() -> None:
    bench = Bench(num_blocks=100)
    asked = replace(request(1, width=4), input_ids=tuple(range(8)) + (1, 2))  # two blocks and a half
    bench.add(0, asked)
    bench.finish()
    first = next(plan for plan in bench.plans if plan.beams is not None)
    assert first.beams is not None
    tables = [start.blocks for start in first.beams.starts]
    assert [len(table) for table in tables] == [3] * 4
    assert len({table[:2] for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert [(copy.block, copy.to_block) for copy in first.beams.copies] == [(tables[0][2], t[2]) for t in tables[1:]]
    assert [start.cache_len for start in first.beams.starts] == [10] * 4
    assert bench.found(0) == expected(asked)


def test_a_search_takes_no_more_than_is_reckoned_for_it() -> None:
    for seed in range(30):
        asked = request(seed, width=1 + seed % 4)
        bench = Bench(num_blocks=needed_blocks(len(asked.input_ids), LONGEST, 1 + seed % 4, BLOCK))
        bench.add(0, asked)
        bench.finish()
        assert bench.found(0) == expected(asked)
        assert bench.scheduler.num_preempted == 0


def test_a_search_whose_scores_are_no_numbers_ends() -> None:
    bench = Bench()
    sequence = bench.add(0, request(3, width=3, eos_token_ids=frozenset()))
    while not sequence.is_searching or not bench.in_flight:
        bench.turn()
    plan, result = bench.in_flight.pop()
    broken = [replace(g, tokens=replace(g.tokens, logprobs=(nan,))) for g in result.generations]
    ((ended, _),) = bench.scheduler.commit(plan, StepResult(tuple(broken), None), 0.01)
    assert ended is sequence
    assert sequence.is_broken
    bench.finish()


def test_an_answer_without_the_likeliest_tokens_is_unsound() -> None:
    bench = Bench()
    sequence = bench.add(0, request(3, width=3, eos_token_ids=frozenset()))
    while not sequence.is_searching or not bench.in_flight:
        bench.turn()
    plan, result = bench.in_flight[0]
    assert plan.beams is not None
    row = plan.beams.starts[0].request_id
    bare = [replace(g, top_tokens=()) if g.request_id == row else g for g in result.generations]
    says = f"row {row} of a beam search got no likeliest tokens"
    for generations in (bare, result.generations[1:]):
        assert check_result(plan, StepResult(tuple(generations), None), frozenset(), bench.scheduler.running) == says


def test_a_group_enters_only_with_room_for_all_its_beams() -> None:
    bench = Bench(num_blocks=200, max_batch_size=5)
    for number in range(2):
        bench.add(number, request(number, width=3, eos_token_ids=frozenset()))
    most = 0
    while bench.turn():
        most = max(most, max((len(plan.computed) for plan, _ in bench.in_flight), default=0))
    assert most == 3
    assert [bench.found(i) for i in range(2)] == [
        expected(request(i, width=3, eos_token_ids=frozenset())) for i in range(2)
    ]


@pytest.mark.parametrize("state_slots", [0, 14])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_leaks_whatever_happens(seed: int, state_slots: int) -> None:
    """Sequences come, are cancelled, preempted for want of blocks or after a failed step, in a small pool."""
    chosen = random.Random(seed)
    bench = Bench(num_blocks=24, depth=chosen.choice([1, 2]), state_slots=state_slots)
    asked: dict[int, Request] = {}
    alive: dict[int, Sequence] = {}
    for number in range(25):
        asked[number] = request(100 * seed + number, width=chosen.choice([0, 1, 2, 4]))
        alive[number] = bench.add(number, asked[number])
        for _ in range(chosen.randrange(10)):
            bench.turn()
        left = [i for i in alive if i not in bench.answers or not bench.answers[i][-1].finished]
        if left and chosen.random() < 0.4:
            bench.scheduler.remove(alive.pop(chosen.choice(left)))
        if chosen.random() < 0.15:  # a step has failed
            bench.in_flight.clear()
            bench.scheduler.abandon()
            bench.scheduler.preempt_all()
            bench.shard.retain(set())
    bench.finish()
    assert bench.scheduler.num_preempted > 0
    for number in alive:
        if asked[number].beams is not None:
            assert bench.found(number) == expected(asked[number])
