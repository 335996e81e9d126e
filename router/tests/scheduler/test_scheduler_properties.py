"""What holds of the scheduler and its pool in any order of arrivals, cancellations, forced spans and failures.

A shard that keeps the content of every block stands in for the model, so a block in wrong hands shows as wrong content.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from funitel.proto.step import (
    FinishReason,
    GeneratedText,
    Generation,
    MediaInput,
    MediaKind,
    MediaSpan,
    SamplingParams,
    SequenceStart,
    StateSave,
    StepResult,
    StoppingParams,
    Tokens,
)
from funitel.router.core.request import Request, RequestMedia, Sequence, background_key
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler import state_checkpoints
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.scheduler import Scheduler

BLOCK = 4
BUDGET = 24
MOST_PROMPT, MOST_COMPLETION = 22, 18
STEPS_TO_END = 3000
SPANS = ((), (), (), ((2, 6),), ((1, 9), (12, 5)), ((4, 12),), ((0, 3), (3, 4)), ((5, 17),))  # of images
DISTANCES = state_checkpoints.FIRST_DISTANCE, state_checkpoints.DECODE_INTERVAL  # of checkpoints


@dataclass
class Wish:
    """What the model will say to one request: so many tokens, several at once where they are forced."""

    sequence: Sequence
    num_tokens: int
    has_spans: bool

    @property
    def outputs(self) -> list[int]:
        tokens = list(self.sequence.request.input_ids)
        for _ in range(self.num_tokens):
            tokens.append(next_token(tokens))
        return tokens[len(self.sequence.request.input_ids) :]


def next_token(tokens: list[int]) -> int:
    return (sum(tokens[-7:]) * 31 + len(tokens)) % 97


def content(request: Request, tokens: Sequence_[int], position: int) -> int:
    """What a slot holds: the token, and of a media item which one it is and the place in it."""
    for each in request.media:
        if each.span.position <= position < each.span.end:
            return 1000 * (1 + each.span.key[0]) + position - each.span.position
    return tokens[position]


@dataclass
class ShardRow:
    wish: Wish
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    state_slot: int
    speculate: int
    saves: list[StateSave] = field(default_factory=list)
    has_ended: bool = False


@dataclass
class Shard:
    """Rows and the content of blocks; refuses what a shard could not do."""

    wishes: dict[int, Wish]
    rows: dict[int, ShardRow] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> token
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by slot, the tokens that made it
    has_whole_spans: bool = False
    num_drafts: int = 0  # of the latest step
    num_accepted: int = 0

    def step(self, plan: StepPlan) -> StepResult:
        asked: dict[int, int | None] = {}
        saves = {each.request_id: each.state_saves for each in (*plan.starts, *plan.rows)}
        for update in plan.rows:
            assert update.request_id in self.rows, "an update of a row that is not there"
            self.rows[update.request_id].blocks += update.blocks
            asked[update.request_id] = update.chunk_len
            if update.speculate is not None:
                assert update.speculate in (0, self.wishes[update.request_id].sequence.request.speculate)
                self.rows[update.request_id].speculate = update.speculate
        for start in plan.starts:
            assert start.request_id not in self.rows, "a row enters twice"
            self.rows[start.request_id] = self._enter(start)
            asked[start.request_id] = start.chunk_len
        for sequence_id, count in plan.computed.items():
            assert asked.get(sequence_id, 1) in (count, None)
            assert asked.get(sequence_id) is not None or count == 1 or plan.is_alone
        self.num_drafts = self.num_accepted = 0
        given = [self._compute(self.rows[i], count, saves.get(i, ())) for i, count in plan.computed.items()]
        return StepResult(
            tuple(generation for generation in given if generation is not None),
            None,
            num_draft_tokens=self.num_drafts,
            num_accepted_tokens=self.num_accepted,
        )

    def _enter(self, start: SequenceStart) -> ShardRow:
        wish = self.wishes[start.request_id]
        expected = wish.outputs[: len(start.output_ids)]
        assert list(start.output_ids) == expected, "resumed with other tokens"
        tokens = [*start.input_ids, *start.output_ids]
        self.states[start.state_slot] = self.states[start.state_from] if start.state_from else ()
        return ShardRow(wish, tokens, list(start.blocks), start.cache_len, start.state_slot, start.speculate)

    def _compute(self, row: ShardRow, count: int, saves: tuple[StateSave, ...]) -> Generation | None:
        if row.has_ended:
            return None
        end = row.num_computed + count
        assert end <= len(row.tokens), "more tokens than are known"
        assert end <= len(row.blocks) * BLOCK, "a token has no slot"
        request = row.wish.sequence.request
        for position in range(row.num_computed, end):
            self.memory[row.blocks[position // BLOCK], position % BLOCK] = content(request, row.tokens, position)
        for position in range(end):
            found = self.memory[row.blocks[position // BLOCK], position % BLOCK]
            assert found == content(request, row.tokens, position), "another's content"
        inside = [each.span for each in request.media if each.span.position < end < each.span.end]
        assert not (count and self.has_whole_spans and inside), "a chunk ends within an item"
        if row.state_slot:
            state = self.states[row.state_slot]
            assert state == tuple(row.tokens[: row.num_computed]), "another's state"
            self.states[row.state_slot] = tuple(row.tokens[:end])
        most = end + (row.wish.sequence.request.speculate if count == 1 else 0)
        for save in saves:
            assert row.num_computed < save.position, "a state of tokens that were computed before"
            assert save.position <= most + row.wish.sequence.request.speculate, "a state of tokens far ahead"
        row.saves += saves
        row.num_computed = end
        if end == len(row.tokens) and count:
            return self._generate(row, is_decoding=count == 1)
        self._save(row)
        return None

    def _save(self, row: ShardRow) -> None:
        for save in row.saves:
            if save.position <= row.num_computed:
                self.states[save.slot] = tuple(row.tokens[: save.position])
        row.saves = [save for save in row.saves if save.position > row.num_computed]

    def _accept(self, row: ShardRow) -> list[int]:
        """Take some of the drafts; of the others garbage is left in the blocks."""
        request, new = row.wish.sequence.request, list[int]()
        num_left = row.wish.num_tokens - (len(row.tokens) - len(request.input_ids))
        room = len(row.blocks) * BLOCK - len(row.tokens)
        num_drafts = max(0, min(row.speculate, room, num_left - 1))
        self.num_drafts += num_drafts
        place = len(row.tokens)
        for position in range(place, place + num_drafts):
            self.memory[row.blocks[position // BLOCK], position % BLOCK] = -1
        for _ in range(sum(row.tokens[-3:]) % (num_drafts + 1)):
            new.append(next_token(row.tokens))
            position = len(row.tokens)
            self.memory[row.blocks[position // BLOCK], position % BLOCK] = new[-1]
            row.tokens.append(new[-1])
        row.num_computed += len(new)
        self.num_accepted += len(new)
        if row.state_slot:
            self.states[row.state_slot] = tuple(row.tokens[: row.num_computed])
        for save in row.saves:
            if row.num_computed < save.position <= place + num_drafts:
                self.states[save.slot] = (-1,)
        return new

    def _generate(self, row: ShardRow, *, is_decoding: bool) -> Generation:
        request, new = row.wish.sequence.request, list[int]()
        if is_decoding and len(row.tokens) > len(request.input_ids):
            new = self._accept(row)
        accepted = len(new)
        self._save(row)
        while True:
            new.append(next_token(row.tokens))
            row.tokens.append(new[-1])
            row.has_ended = len(row.tokens) == len(request.input_ids) + row.wish.num_tokens
            if row.has_ended or not row.wish.has_spans or new[-1] % 3 == 0:  # what follows any other token is forced
                break
        tokens = Tokens(tuple(new), (0.0,) * len(new), ("",) * len(new))
        finished = GeneratedText("", row.wish.num_tokens, FinishReason.EOS_TOKEN) if row.has_ended else None
        return Generation(row.wish.sequence.id, tokens, finished=finished, num_accepted=accepted)


def item(image: int, position: int, length: int) -> RequestMedia:
    key = bytes([image])
    given = MediaInput(key=key, kind=MediaKind.IMAGE, shape=(), values=b"", num_features=length)
    return RequestMedia(MediaSpan(key, position, length), given)


class SchedulerMachine(RuleBasedStateMachine):
    """A client, an engine and a shard that do as they please, one act at a time."""

    @initialize(
        num_blocks=st.integers(10, 24),
        max_batch_size=st.sampled_from([None, None, 2, 4]),
        is_chunked=st.sampled_from([True, True, True, False]),
        has_prefix_cache=st.booleans(),
        most_steps=st.sampled_from([1, 2, 2]),
        state_slots=st.sampled_from([0, 0, 1, 3, 8, 30]),
        has_whole_spans=st.booleans(),
    )
    def begin(
        self,
        num_blocks: int,
        max_batch_size: int | None,
        is_chunked: bool,
        has_prefix_cache: bool,
        most_steps: int,
        state_slots: int,
        has_whole_spans: bool,
    ) -> None:
        state_checkpoints.FIRST_DISTANCE, state_checkpoints.DECODE_INTERVAL = 3, 8
        policy = SchedulerPolicy(
            max_batch_prefill_tokens=BUDGET if is_chunked else MOST_PROMPT + MOST_COMPLETION,
            max_batch_size=max_batch_size,
            is_chunked=is_chunked,
            has_prefix_cache=has_prefix_cache,
            has_whole_spans=has_whole_spans,
        )
        self.most_steps = most_steps  # in flight at once
        self.scheduler = Scheduler(policy, BlockPool(num_blocks, BLOCK, state_slots=state_slots))
        self.wishes: dict[int, Wish] = {}
        self.shard = Shard(self.wishes, has_whole_spans=has_whole_spans)
        self.live: dict[int, Wish] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.ended: dict[int, list[int]] = {}

    # Clients

    @rule(
        prompt_len=st.integers(1, MOST_PROMPT),
        own=st.integers(0, 3),
        family=st.integers(0, 1),
        max_new_tokens=st.integers(1, MOST_COMPLETION),
        ends_early=st.booleans(),
        has_spans=st.booleans(),
        speculate=st.sampled_from([0, 0, 1, 3, 6]),
        key=st.sampled_from([b"", b"", b"a", b"b", background_key(b"a")]),
        priority=st.sampled_from([0, 0, -2, 2]),
        spans=st.sampled_from(SPANS),
        image=st.integers(0, 1),
    )
    def submit(
        self,
        prompt_len: int,
        own: int,
        family: int,
        max_new_tokens: int,
        ends_early: bool,
        has_spans: bool,
        speculate: int,
        key: bytes,
        priority: int,
        spans: tuple[tuple[int, int], ...],
        image: int,
    ) -> None:
        number = len(self.wishes)
        shared = max(0, prompt_len - own)  # prompts of a family begin alike
        request = Request(
            input_ids=(*range(family, family + shared), *((50 + number % 40),) * (prompt_len - shared)),
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=max_new_tokens),
            key=key,
            priority=priority,
            speculate=speculate,
            media=tuple(item(image + n, *span) for n, span in enumerate(spans) if sum(span) <= prompt_len),
        )
        num_tokens = 1 + max_new_tokens // 3 if ends_early else max_new_tokens
        wish = Wish(Sequence(number, request, arrived=float(number)), num_tokens, has_spans)
        self.wishes[number] = self.live[number] = wish
        self.scheduler.add(wish.sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        self.scheduler.remove(self.live.pop(number).sequence)

    # The engine

    @rule()
    def send(self) -> None:
        """Plan and send a step, if one may be."""
        scheduler = self.scheduler
        if len(self.in_flight) >= self.most_steps:
            return
        scheduler.preempt()
        self.shard.rows = {i: row for i, row in self.shard.rows.items() if i in scheduler.running}
        plan = scheduler.schedule()
        if plan is None:
            return
        policy = scheduler.policy
        assert plan.load.num_prompt_tokens <= policy.max_batch_prefill_tokens
        assert sum(plan.computed.values()) <= policy.max_batch_prefill_tokens + len(scheduler.running)
        assert policy.max_batch_size is None or len(scheduler.running) <= policy.max_batch_size
        assert {start.request_id for start in plan.starts} <= set(plan.computed)
        self.in_flight.append((plan, self.shard.step(plan)))

    @precondition(lambda self: self.in_flight)
    @rule(seconds=st.sampled_from([0.001, 0.01, 0.3]))
    def settle(self, seconds: float) -> None:
        """Take the oldest answer into account."""
        plan, result = self.in_flight.popleft()
        for sequence, generation in self.scheduler.commit(plan, result, seconds):
            if generation.finished is not None:
                self.ended[sequence.id] = list(sequence.output_ids)
                del self.live[sequence.id]

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self) -> None:
        """The oldest step under way fails, and with it its sequences; all others begin again."""
        plan, _ = self.in_flight.popleft()
        self.in_flight.clear()
        self.scheduler.abandon()
        for number in plan.computed:
            if number in self.live:
                self.scheduler.remove(self.live.pop(number).sequence)
        self.scheduler.preempt_all()
        self.shard.rows.clear()

    # What always holds

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        blocks, running = self.scheduler.blocks, self.scheduler.running.values()
        owners = Counter(block for sequence in running for block in sequence.blocks)
        assert len(owners) == blocks.num_used
        assert blocks.num_used + blocks.num_free == blocks.num_blocks
        assert 0 <= blocks.num_cached <= blocks.num_free
        assert owners.keys() <= set(range(1, blocks.num_blocks + 1))
        assert all(not sequence.blocks for sequence in self.scheduler.waiting)
        self._check_sharing(owners)

    @invariant()
    def every_state_slot_is_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        states, rows = self.scheduler.blocks.states, [each.state for each in self.scheduler.running.values()]
        if states is None:
            assert rows == [None] * len(rows)
            return
        held = [row.slot for row in rows if row] + [save.slot for row in rows if row for save in row.saves]
        every = [*held, *states._free, *states._cached.values()]
        assert sorted(every) == list(range(1, states.num_slots + 1))
        assert states.num_used == len(held)
        assert all(sequence.state is None for sequence in self.scheduler.waiting)

    def _check_sharing(self, owners: Counter[int]) -> None:
        """A block with two owners is full, computed by both, and begins both in the same way."""
        begins: dict[int, tuple[int, ...]] = {}
        for sequence in self.scheduler.running.values():
            known = (*sequence.request.input_ids, *sequence.output_ids)
            for index, block in enumerate(sequence.blocks):
                if owners[block] == 1:
                    continue
                end = (index + 1) * BLOCK
                assert self.scheduler.policy.has_prefix_cache
                assert end <= sequence.num_computed
                assert begins.setdefault(block, known[:end]) == known[:end]

    @invariant()
    def only_who_is_settled_is_not_looked_at(self) -> None:
        """Whoever just decodes has blocks for as many steps as foreseen, and does not end in them."""
        if not hasattr(self, "scheduler"):
            return
        for i, sequence in self.scheduler.running.items():
            count = sequence.num_plain_steps
            assert (count == 0) == (i in self.scheduler._running.not_plain)
            if count:
                computed, pending = sequence.ahead()
                assert pending == 1
                most = sequence.most_ahead(computed + count, count)
                assert most <= len(sequence.blocks) * BLOCK
                assert most < sequence.num_prompt + sequence.request.stopping.max_new_tokens

    @invariant()
    def what_is_found_by_its_tokens_is_there(self) -> None:
        for wish in getattr(self, "wishes", {}).values():
            sequence = wish.sequence
            known = (*sequence.request.input_ids, *sequence.output_ids)
            found = self.scheduler.blocks.match(sequence.block_key(i, BLOCK) for i in range(len(known) // BLOCK))
            for position in range(len(found) * BLOCK):
                slot_content = self.shard.memory[found[position // BLOCK], position % BLOCK]
                assert slot_content == content(sequence.request, known, position)
            states = self.scheduler.blocks.states
            for i in range(len(known) // BLOCK if states is not None else 0):
                slot = states._cached.get(sequence.block_key(i, BLOCK))
                assert slot is None or self.shard.states[slot] == known[: (i + 1) * BLOCK]

    @invariant()
    def outputs_are_what_the_model_said_in_order(self) -> None:
        for number, wish in getattr(self, "wishes", {}).items():
            said = self.ended.get(number, wish.sequence.output_ids)
            assert said == wish.outputs[: len(said)]

    def teardown(self) -> None:
        """Nothing more comes: every request that was let in ends, with all it should say, and the pool is empty."""
        state_checkpoints.FIRST_DISTANCE, state_checkpoints.DECODE_INTERVAL = DISTANCES
        if not hasattr(self, "scheduler"):
            return
        for _ in range(STEPS_TO_END):
            self.send()
            if not self.in_flight:
                break
            self.settle(0.01)
            self.every_block_is_accounted_for()
        assert not self.live
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.scheduler.blocks.num_used == 0
        assert self.scheduler.blocks.states is None or self.scheduler.blocks.states.num_used == 0
        for number, outputs in self.ended.items():
            assert outputs == self.wishes[number].outputs


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, derandomize=True, deadline=None, database=None
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("state_slots", [0, 12])
@pytest.mark.parametrize("num_blocks", [10, 14, 24])
def test_speculating_sequences_share_a_small_pool(num_blocks: int, state_slots: int) -> None:
    """All have drafts, two steps are in flight, and blocks run out: nothing is lost and nothing is written over."""
    distances = state_checkpoints.FIRST_DISTANCE, state_checkpoints.DECODE_INTERVAL
    num_accepted = 0
    for seed in range(40):
        source, machine = random.Random(seed), SchedulerMachine()
        try:
            machine.begin(num_blocks, None, True, True, 2, state_slots, False)  # type: ignore[call-arg]
            for number in range(8):
                machine.submit(  # type: ignore[call-arg]
                    source.randint(1, 8),
                    number % 3,
                    0,
                    MOST_COMPLETION,
                    False,
                    seed % 4 == 0,
                    source.randint(1, 6),
                    b"",
                    0,
                    (),
                    0,
                )
            for _ in range(400):
                machine.send()
                if len(machine.in_flight) == 2 or source.random() < 0.5:
                    if machine.in_flight:
                        num_accepted += machine.in_flight[0][1].num_accepted_tokens
                        machine.settle(0.01)  # type: ignore[call-arg]
                machine.every_block_is_accounted_for()
                machine.every_state_slot_is_accounted_for()
                machine.only_who_is_settled_is_not_looked_at()
                machine.what_is_found_by_its_tokens_is_there()
                machine.outputs_are_what_the_model_said_in_order()
            assert not machine.live, "all have ended"
            assert machine.scheduler.blocks.num_used == 0
        finally:
            state_checkpoints.FIRST_DISTANCE, state_checkpoints.DECODE_INTERVAL = distances
    assert num_accepted > 1000
