"""Who is next: keys share the tokens evenly, nobody starves, a key's own requests keep their order."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queues import waiting
from sequences import BLOCK, FakeShard, make_sequence

from funitel.proto.step import FinishReason, GeneratedText, Generation, StepResult, Tokens
from funitel.router.core.request import Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy, StepPlan
from funitel.router.scheduler.prefill import MAX_URGENT_TOKENS
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.scheduler.waiting_queue import AGEING_SECONDS, MAX_IDLE_KEYS, FairShares, WaitingQueue

FLOODER, OTHER = b"flooder", b"other"


class QuickShard:
    """Gives tokens without looking at what it is told, for long runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._running = scheduler.running

    def retain(self, keep: set[int]) -> None:
        pass

    def step(self, plan: StepPlan) -> StepResult:
        ready = [i for i, count in plan.computed.items() if self._running[i].num_pending == count]
        return StepResult(tuple(self._generate(self._running[i]) for i in ready), None)

    def _generate(self, sequence: Sequence) -> Generation:
        count = len(sequence.output_ids) + 1
        is_last = count >= sequence.request.stopping.max_new_tokens
        finished = GeneratedText("", count, FinishReason.LENGTH) if is_last else None
        return Generation(sequence.id, Tokens((7,), (0.0,), ("",), (False,)), finished=finished)


def steps(scheduler: Scheduler, shard: FakeShard | QuickShard) -> Iterator[dict[int, Sequence]]:
    """Run step after step; the sequences that took part in each."""
    while True:
        scheduler.preempt()
        shard.retain(set(scheduler.running))
        plan = scheduler.schedule()
        if plan is None:
            return
        taking_part = {i: scheduler.running[i] for i in plan.computed}
        scheduler.commit(plan, shard.step(plan), 0.01)
        yield taking_part


def make_scheduler(num_blocks: int = 400, budget: int = 16, **policy: object) -> Scheduler:
    chosen = SchedulerPolicy(max_batch_prefill_tokens=budget, **policy)  # type: ignore[arg-type]
    return Scheduler(chosen, BlockPool(num_blocks, BLOCK))


def entering(queue: WaitingQueue, shares: FairShares) -> Iterator[Sequence]:
    """Everyone who waits, in turn; each is given its prompt."""
    while (sequence := queue.first()) is not None:
        queue.remove(sequence)
        shares.charge(sequence, sequence.num_known)
        yield sequence


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=15, max_size=25),
    st.integers(2, 3),
    st.integers(1, 4),
    st.sampled_from([8, 16, 64]),
)
def test_backlogged_keys_get_the_same_tokens_within_what_runs_at_once(
    sizes: list[tuple[int, int]], num_keys: int, batch_size: int, budget: int
) -> None:
    scheduler = make_scheduler(budget=budget, max_batch_size=batch_size)
    for i, (prompt_len, max_new_tokens) in enumerate(sizes):
        for key in range(num_keys):
            salt = f"{key} {i}"  # nothing is shared
            fields = {"key": bytes([key]), "cache_salt": salt}
            scheduler.add(make_sequence(i * num_keys + key, prompt_len, max_new_tokens, **fields))
    largest = max(prompt_len + max_new_tokens for prompt_len, max_new_tokens in sizes)
    given_to: Counter[bytes] = Counter({bytes([key]): 0 for key in range(num_keys)})
    furthest: Counter[int] = Counter()
    for sequences in steps(scheduler, QuickShard(scheduler)):
        if len({sequence.request.key for sequence in scheduler.waiting}) < num_keys:
            break  # a key without a backlog may get less
        for i, sequence in sequences.items():
            given_to[sequence.request.key] += max(
                0, sequence.num_computed - furthest[i]
            )  # not what a victim computes again
            furthest[i] = max(sequence.num_computed, furthest[i])
        # what runs goes on, and one more may have been let in
        assert max(given_to.values()) - min(given_to.values()) <= (batch_size + 1) * largest
    assert sum(given_to.values()) > 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 2), st.sampled_from([b"", b"a"])), max_size=30))
def test_a_key_is_first_come_first_served_among_equals_and_priorities_age(
    specs: list[tuple[int, int, bytes]],
) -> None:
    sequences = []
    for i, (when, priority, key) in enumerate(sorted(specs)):
        sequences.append(make_sequence(i, 5, 5, key=key, priority=priority))
        sequences[-1].arrived = when * 4.0
    order = list(entering(*waiting(*sequences)))
    assert len(order) == len(specs)
    for place, later in enumerate(order):
        for earlier in order[:place]:
            if earlier.request.key == later.request.key:
                lead = (later.request.priority - earlier.request.priority) * AGEING_SECONDS
                assert earlier.arrived <= later.arrived + lead
                if earlier.arrived == later.arrived + lead:
                    assert earlier.id < later.id


def test_the_urgent_go_first_and_the_patient_are_not_forgotten() -> None:
    patient = make_sequence(0, 5, 5, priority=5)
    urgent = [make_sequence(i, 5, 5, priority=-1) for i in range(1, 11)]
    for i, sequence in enumerate(urgent):
        sequence.arrived = i * AGEING_SECONDS
    order = [sequence.id for sequence in entering(*waiting(patient, *urgent))]
    assert order == [1, 2, 3, 4, 5, 6, 0, 7, 8, 9, 10]


def test_a_newcomer_of_another_key_is_next_whatever_waits() -> None:
    flood = [make_sequence(i, 20, 5, key=FLOODER) for i in range(500)]
    queue, shares = waiting(*flood)
    for sequence, _ in zip(entering(queue, shares), range(20), strict=False):
        assert sequence.request.key == FLOODER
    late = make_sequence(1000, 30, 5, key=OTHER)
    shares.join(OTHER)
    queue.add(late)
    assert queue.ahead_of(late) == []
    assert queue.first() is late


def test_time_away_earns_no_credit_and_leaving_clears_no_debt() -> None:
    busy, other = make_sequence(0, 5, 5, key=b"busy"), make_sequence(1, 5, 5, key=OTHER)
    _, shares = waiting(busy, other)
    shares.charge(busy, 1000)
    shares.charge(other, 3000)
    shares.leave(OTHER)
    shares.join(b"new")
    assert shares.tokens_of(b"new") == 2000, "what each of the two would have, had both been given the same"
    shares.join(OTHER)
    assert shares.tokens_of(OTHER) == 3000
    for key in (b"busy", b"new", OTHER):
        shares.leave(key)
    assert shares.tokens_of(OTHER) == 0


def test_time_away_earns_some_credit_where_it_is_given() -> None:
    shares = FairShares(credit=400)
    busy = make_sequence(0, 5, 5, key=b"busy")
    shares.join(b"busy")
    shares.charge(busy, 1000)
    assert shares.tokens_of(OTHER) == 600
    other = make_sequence(1, 5, 5, key=OTHER)
    shares.join(OTHER)
    shares.charge(other, 100)
    shares.leave(OTHER)
    assert shares.tokens_of(OTHER) == 700, "to leave and come back gives nothing"
    shares.charge(busy, 1000)
    shares.join(OTHER)
    assert shares.tokens_of(OTHER) == 1650, "nor does to stay away for longer give more"


def test_who_stays_least_is_seen_from_all_that_have_requests() -> None:
    shares = FairShares()
    for key in (b"a", b"b"):
        assert not shares.stays_least(b"a", 0), "nobody to compare with"
        shares.join(key)
    shares.charge_key(b"b", 100)
    assert shares.stays_least(b"a", 100)
    assert not shares.stays_least(b"a", 101)
    assert not shares.stays_least(b"b", 0)
    shares.join(b"c")
    assert not shares.stays_least(b"a", 100)
    shares.leave(b"c")
    assert shares.stays_least(b"a", 100)


def test_idle_keys_are_not_remembered_without_end() -> None:
    shares = FairShares()
    shares.join(b"busy")
    for number in range(3 * MAX_IDLE_KEYS):
        sequence = make_sequence(number, 1, 1, key=str(number).encode())
        shares.join(sequence.request.key)
        shares.charge(sequence, 10)
        shares.leave(sequence.request.key)
    assert len(shares._tokens) <= MAX_IDLE_KEYS + 2


def test_as_many_idle_keys_are_remembered_as_are_allowed() -> None:
    shares = FairShares()
    for busy in (b"busy", b"busier"):
        shares.join(busy)
    known = []
    for number in range(MAX_IDLE_KEYS + 1):
        key = str(number).encode()
        shares.join(key)
        shares.leave(key)
        known.append(shares.num_known_keys)
    assert known == [*range(3, MAX_IDLE_KEYS + 3), 2]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([b"a", b"b", b"c"]), st.integers(-2, 2)), max_size=25),
    st.tuples(st.integers(1, 30), st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(-2, 2)),
    st.dictionaries(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 60)),
)
def test_who_is_ahead_is_who_enters_before(
    specs: list[tuple[int, bytes, int]], newcomer: tuple[int, bytes, int], charged: dict[bytes, int]
) -> None:
    sequences = [
        make_sequence(i, prompt_len, 5, key=key, priority=priority)
        for i, (prompt_len, key, priority) in enumerate([*specs, newcomer])
    ]
    queue, shares = waiting(*sequences[:-1])
    for key, count in charged.items():
        if shares.sequences_of(key):
            shares.charge_key(key, count)
    last = sequences[-1]
    ahead = {sequence.id for sequence in queue.ahead_of(last)}
    shares.join(last.request.key)
    queue.add(last)
    order = [sequence.id for sequence in entering(queue, shares)]
    assert ahead == set(order[: order.index(last.id)])


def flooded(**policy: object) -> tuple[Scheduler, FakeShard]:
    """A scheduler that ran the flood of one key for a while."""
    scheduler, shard = make_scheduler(**policy), FakeShard()  # type: ignore[arg-type]
    for i in range(60):
        scheduler.add(make_sequence(i, 8, 200, key=FLOODER, cache_salt=str(i)))
    for number, _ in enumerate(steps(scheduler, shard)):
        if number == 40:
            break
    assert scheduler.waiting
    return scheduler, shard


def beside_streams(scheduler: Scheduler, num_tokens: int) -> Iterator[dict[int, Sequence]]:
    """The steps that follow once each of four streams of the flooder has more than `num_tokens` tokens."""
    streams = [make_sequence(i, 40, num_tokens + 100, key=FLOODER, cache_salt=str(i)) for i in range(4)]
    for sequence in streams:
        scheduler.add(sequence)
    running = steps(scheduler, QuickShard(scheduler))
    while not all(len(sequence.output_ids) > num_tokens for sequence in streams):
        next(running)
    return running


def first_token_of(scheduler: Scheduler, shard: FakeShard, sequence: Sequence) -> int:
    """How many steps it takes until a sequence has a token."""
    scheduler.add(sequence)
    for number, _ in enumerate(steps(scheduler, shard)):
        if sequence.output_ids:
            return number
    raise AssertionError("it ended without a token")


def test_a_full_batch_makes_way_for_another_key_at_once() -> None:
    scheduler, shard = flooded(max_batch_size=8)
    assert first_token_of(scheduler, shard, make_sequence(100, 8, 5, key=OTHER, cache_salt="x")) == 0
    assert scheduler.num_preempted == 1


def test_a_full_pool_makes_way_for_another_key_at_once() -> None:
    scheduler, shard = flooded(num_blocks=100)
    before = scheduler.num_preempted
    assert first_token_of(scheduler, shard, make_sequence(100, 8, 5, key=OTHER, cache_salt="x")) <= 1
    assert scheduler.num_preempted > before


def test_the_prompt_budget_goes_to_the_key_that_was_given_least() -> None:
    scheduler, shard = make_scheduler(budget=8), FakeShard()
    long = make_sequence(0, 400, 2, key=FLOODER)
    scheduler.add(long)
    running = steps(scheduler, shard)
    for _ in range(5):
        next(running)
    assert first_token_of(scheduler, shard, make_sequence(1, 16, 2, key=OTHER, cache_salt="x")) <= 3
    assert long.num_pending > 1


def test_a_short_prompt_of_a_key_that_was_given_less_is_computed_beside_streams_at_once() -> None:
    """A long one, one of the same key and one under a target of milliseconds keep to the usual chunks."""

    def chunks(prompt_len: int, key: bytes, **policy: float) -> tuple[int, int]:
        """What the first two steps compute of the prompt."""
        scheduler = make_scheduler(4000, 4096, **policy)
        running = beside_streams(scheduler, 400)
        scheduler.shares.charge_key(FLOODER, 1000)  # more than the long prompt has
        newcomer = make_sequence(100, prompt_len, 5, key=key, cache_salt="x")
        scheduler.add(newcomer)
        computed = [0]
        while len(computed) < 3:
            next(running)
            if newcomer.num_computed > computed[-1]:
                computed.append(newcomer.num_computed)
        return computed[1], computed[2] - computed[1]

    usual = chunks(1000, FLOODER)
    urgent = chunks(1000, OTHER)
    assert urgent[0] > 1.5 * usual[0]
    assert urgent[1] > 3 * urgent[0]
    assert chunks(2000, OTHER) == usual
    assert chunks(1000, OTHER, target_gap_seconds=0.025) == chunks(1000, FLOODER, target_gap_seconds=0.025)


@pytest.mark.parametrize(
    ("prompt_len", "fields", "output_ids", "is_urgent"),
    [
        pytest.param(MAX_URGENT_TOKENS, {}, [], True, id="short enough"),
        pytest.param(MAX_URGENT_TOKENS + 1, {}, [], False, id="too long"),
        pytest.param(MAX_URGENT_TOKENS + 200, {"cache_salt": "known"}, [], True, id="short enough but for its prefix"),
        pytest.param(MAX_URGENT_TOKENS + 201, {"cache_salt": "known"}, [], False, id="too long behind its prefix"),
        pytest.param(900, {}, [7], False, id="has got a token"),
    ],
)
def test_which_prompts_are_urgent(
    prompt_len: int, fields: dict[str, str], output_ids: list[int], is_urgent: bool
) -> None:
    def first_chunk(newcomer: Sequence) -> int:
        scheduler = make_scheduler(4000, 4096, has_prefix_cache=True)
        scheduler.add(make_sequence(99, 201, 1, key=FLOODER, cache_salt="known"))
        running = beside_streams(scheduler, 100)
        scheduler.shares.charge_key(FLOODER, 1000)
        scheduler.add(newcomer)
        next(running)
        return newcomer.num_computed - newcomer.num_cached

    newcomer = make_sequence(100, prompt_len, 5, key=OTHER, **fields)
    newcomer.output_ids = output_ids
    usual = first_chunk(make_sequence(100, 2000, 5, key=FLOODER))
    assert first_chunk(newcomer) == (2 if is_urgent else 1) * usual


@pytest.mark.parametrize(
    ("prompt_len", "computed"),
    [
        pytest.param(60, [60], id="urgent on entry"),
        pytest.param(300, [0, 160, 300], id="urgent once the long prompt was given more"),
    ],
)
def test_an_urgent_prompt_does_not_wait_for_a_long_one_that_takes_the_budget(
    prompt_len: int, computed: list[int]
) -> None:
    scheduler = make_scheduler(4000, 4096)
    running = beside_streams(scheduler, 100)
    long, urgent = make_sequence(100, 2000, 5, key=b"long"), make_sequence(101, prompt_len, 5, key=OTHER)
    scheduler.add(long)
    scheduler.add(urgent)
    found = []
    for _ in computed:
        next(running)
        found.append(urgent.num_computed)
    assert found == computed
    assert long.num_computed == 80 * (1 if len(computed) == 1 else 5)


def test_of_one_key_a_prompt_that_runs_is_computed_before_one_that_waits() -> None:
    scheduler, shard = make_scheduler(budget=8), FakeShard()
    for i in range(2):
        scheduler.add(make_sequence(i, 20, 5, cache_salt=str(i)))
    taking_part = [set(sequences) for sequences, _ in zip(steps(scheduler, shard), range(3), strict=False)]
    assert taking_part == [{0}, {0}, {0, 1}]


def test_a_key_has_no_more_than_its_share_taken() -> None:
    """Two keys with a backlog come to have half the batch each, and then nobody is preempted any more."""
    scheduler, shard = flooded(max_batch_size=8)
    for i in range(100, 140):
        scheduler.add(make_sequence(i, 8, 200, key=OTHER, cache_salt=str(i)))
    counts = []
    for sequences in steps(scheduler, shard):
        counts.append(Counter(sequence.request.key for sequence in sequences.values()))
        if len(counts) == 60:
            break
    assert counts[30] == counts[59] == {FLOODER: 4, OTHER: 4}
    assert scheduler.num_preempted == 4


def test_the_least_urgent_gives_way_first_then_the_newest() -> None:
    scheduler, shard = make_scheduler(num_blocks=12, budget=64), FakeShard()
    for i, priority in enumerate((0, 3, 0)):
        scheduler.add(make_sequence(i, 8, 40, priority=priority, cache_salt=str(i)))
    left: list[int] = []
    running = {0, 1, 2}
    for sequences in steps(scheduler, shard):
        left += sorted(running - set(sequences))
        running = set(sequences)
        if len(running) == 1:
            break
    assert left == [1, 2]


def test_a_key_that_was_here_before_is_served_beside_keys_that_come_anew_all_the_time() -> None:
    scheduler = make_scheduler(num_blocks=2000, budget=4096, max_batch_size=4)
    shard = QuickShard(scheduler)
    ids = iter(range(10**6))

    def add(key: bytes, num_tokens: int) -> Sequence:
        i = next(ids)
        sequence = make_sequence(i, 40, num_tokens, key=key, cache_salt=str(i))
        scheduler.add(sequence)
        return sequence

    for i in range(12):
        add(b"new %d" % i, 10)
    asked = [add(OTHER, 50)]
    for number, sequences in enumerate(steps(scheduler, shard)):
        for sequence in sequences.values():
            if len(sequence.output_ids) < sequence.request.stopping.max_new_tokens:
                continue
            if sequence.request.key != OTHER:
                add(b"newer %d" % sequence.id, 10)
            elif len(asked) == 1:
                asked.append(add(OTHER, 10))
            else:
                return
        assert number < 5000, "the second request of a key was not served"


ASKED = st.tuples(st.sampled_from([FLOODER, OTHER, b"third"]), st.integers(1, 40), st.integers(-2, 2))


@given(st.lists(ASKED, max_size=30))
def test_the_order_that_is_told_is_the_order_they_enter(asked: list[tuple[bytes, int, int]]) -> None:
    sequences = [
        make_sequence(number, length, 5, key=key, priority=priority)
        for number, (key, length, priority) in enumerate(asked)
    ]
    queue, shares = waiting(*sequences)
    assert queue.in_order(20) == list(entering(queue, shares))[:20]


def test_the_order_is_told_as_far_as_it_is_asked_for() -> None:
    specs = [(FLOODER, 0), (FLOODER, 1), (FLOODER, -1), (OTHER, 2), (OTHER, 0)]
    queue, _ = waiting(*(make_sequence(i, 8, 5, key=key, priority=priority) for i, (key, priority) in enumerate(specs)))
    for most in range(7):
        assert [sequence.id for sequence in queue.in_order(most)] == [4, 2, 3, 0, 1][:most]


@pytest.mark.parametrize(("num_running", "ahead"), [(0, []), (1, [0]), (2, [0])])
def test_of_keys_that_were_given_the_same_the_one_with_fewer_sequences_is_first(
    num_running: int, ahead: list[int]
) -> None:
    queue, shares = waiting(*(make_sequence(i, 8, 5, key=FLOODER) for i in range(2)))
    for _ in range(num_running):
        shares.join(OTHER)
    incoming = make_sequence(9, 8, 5, key=OTHER)
    incoming.arrived = 1.0
    # It counts too: beside one that runs both keys have two, and the earlier is first.
    assert [sequence.id for sequence in queue.ahead_of(incoming)] == ahead


def test_keys_that_were_given_the_same_take_turns_by_rank() -> None:
    sequences = []
    for i, (key, arrived) in enumerate(
        [(FLOODER, 0), (FLOODER, 15), (FLOODER, 99), (OTHER, 10), (OTHER, 20), (OTHER, 30)]
    ):
        sequences.append(make_sequence(i, 8, 5, key=key))
        sequences[-1].arrived = float(arrived)
    queue, _ = waiting(*sequences)
    assert [sequence.arrived for sequence in queue.in_order(9)] == [0, 10, 15, 20, 30, 99]


def test_the_newest_of_a_key_is_the_last_that_never_ran() -> None:
    first, second, third = (make_sequence(i, 8, 5, key=FLOODER) for i in range(3))
    queue, _ = waiting(first, second, third)
    assert queue.newest_of(OTHER) is None
    assert queue.newest_of(FLOODER) is third
    third.was_started = True
    assert queue.newest_of(FLOODER) is second
    first.was_started = second.was_started = True
    assert queue.newest_of(FLOODER) is None


def test_the_queue_counts_what_is_in_it() -> None:
    queue, _ = waiting()
    assert (len(queue), queue.num_prompt_tokens, queue.num_preempted, queue.first()) == (0, 0, 0, None)
    sequences = [make_sequence(i, 8 + i, 5, key=(FLOODER, OTHER)[i % 2]) for i in range(4)]
    assert sequences[0] not in queue
    for sequence in sequences[:3]:
        queue.add(sequence)
    sequences[3].was_started = True
    assert [sequence in queue for sequence in sequences] == [True, True, True, False]
    queue.add(sequences[3])
    assert (len(queue), queue.num_prompt_tokens, queue.num_preempted) == (4, 38, 1)
    assert {sequence.id for sequence in queue} == {0, 1, 2, 3}
    changes = queue.num_changes
    queue.remove(sequences[3])
    assert queue.num_changes == changes + 1 == 5
    queue.remove(sequences[0])
    assert (len(queue), queue.num_prompt_tokens, queue.num_preempted) == (2, 19, 0)
    assert [sequence in queue for sequence in sequences] == [False, True, True, False]
    assert make_sequence(1, 9, 5, key=OTHER) not in queue


def test_the_queue_counts_those_that_were_preempted() -> None:
    sequences = [make_sequence(i, 8, 5) for i in range(4)]
    for sequence in sequences[1:]:
        sequence.was_started = True
    queue, _ = waiting(*sequences)
    counts = [queue.num_preempted]
    for sequence in sequences:
        queue.remove(sequence)
        counts.append(queue.num_preempted)
    assert counts == [3, 3, 2, 1, 0]
