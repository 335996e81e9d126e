"""The waiting queue and fair shares: the key that was given the least goes first. Pure: no clock, no I/O.

Keys share the service fairly, counted in tokens computed. Within a key the order is by priority and arrival: a step of
priority is worth `AGEING_SECONDS` of waiting, so that each waiting sequence comes to be first, whatever arrives later.

The requests of batches have keys of their own, background ones. Those come behind all others, however long they wait,
and share among themselves what these leave.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace

from funitel.router.core.request import Sequence, is_background

AGEING_SECONDS = 10.0  # of waiting, that outweigh one step of priority
MAX_IDLE_KEYS = 1000  # remembered for what they were given, while others are busy


Level = tuple[bool, int, int]  # background keys come behind others; tokens given; sequences


class FairShares:
    """How many tokens were computed for each key that has sequences, or had some while others were busy.

    A key that comes, or comes back, has its own count, but at least that of the key that was given the least, save for
    `credit` tokens: time away earns so much and no more. The same holds of the pace, what each busy key would have been
    given if all had the same: keys that come anew all the time do not go before one that was always here. Background
    keys are compared with one another only.
    """

    def __init__(self, credit: int = 0) -> None:
        self._credit = credit
        self._tokens: dict[bytes, int] = {}
        self._sequences: Counter[bytes] = Counter()  # waiting or running
        self._pace = {False: 0.0, True: 0.0}  # tokens, of others and of background keys
        self.num_busy = {False: 0, True: 0}  # keys that have sequences: others, and background keys
        self.num_repeated = 0  # tokens computed again, of all keys

    def join(self, key: bytes) -> None:
        """Note that a key has one more sequence."""
        if not self._sequences[key]:
            self._tokens[key] = self.tokens_of(key)
            self.num_busy[is_background(key)] += 1
        self._sequences[key] += 1

    def leave(self, key: bytes) -> None:
        """Note that a key has one sequence less."""
        self._sequences[key] -= 1
        if self._sequences[key]:
            return
        del self._sequences[key]
        kind = is_background(key)
        self.num_busy[kind] -= 1
        if not self.num_busy[kind]:
            self._tokens = {other: given for other, given in self._tokens.items() if is_background(other) != kind}
            self._pace[kind] = 0.0
        elif len(self._tokens) - len(self._sequences) > MAX_IDLE_KEYS:
            self._tokens = {busy: self._tokens[busy] for busy in self._sequences}

    def _least_on_return(self, kind: bool) -> int:
        busy = (key for key in self._sequences if self._sequences[key] and is_background(key) == kind)
        least = min((self._tokens[key] for key in busy), default=0)
        return max(0, max(least, int(self._pace[kind])) - self._credit)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens that a step computes for a sequence; those computed again are not counted twice."""
        repeated = min(num_tokens, sequence.num_repeated)
        sequence.num_repeated -= repeated
        self.num_repeated += repeated
        self.charge_key(sequence.request.key, num_tokens - repeated)

    def charge_key(self, key: bytes, num_tokens: int) -> None:
        """Count tokens of sequences of a key that have lost none."""
        self._tokens[key] += num_tokens
        kind = self.num_busy[True] > 0 and is_background(key)
        self._pace[kind] += num_tokens / self.num_busy[kind]

    def stays_least(self, key: bytes, num_tokens: int) -> bool:
        """Whether other keys have sequences, and were all given as much as this one with so many tokens more."""
        given = is_background(key), self.tokens_of(key) + num_tokens
        return len(self._sequences) > 1 and all(
            given <= (is_background(other), self._tokens[other]) for other in self._sequences if other != key
        )

    @property
    def num_known_keys(self) -> int:
        """Keys that have sequences, or had some while others did."""
        return len(self._tokens)

    @property
    def has_several_keys(self) -> bool:
        """Whether prompts and streams may be of different keys."""
        return self.num_known_keys > 1 or self.num_busy[True] > 0

    def tokens_of(self, key: bytes) -> int:
        """Return what a key was given, by the count that decides on the next key."""
        return max(self._tokens.get(key, 0), 0 if self._sequences[key] else self._least_on_return(is_background(key)))

    def sequences_of(self, key: bytes) -> int:
        """How many sequences of a key wait or run."""
        return self._sequences[key]

    def level(self, key: bytes) -> Level:
        """Lower is served sooner: of keys that were given the same, the one with fewer sequences."""
        return is_background(key), self.tokens_of(key), self._sequences[key]

    @property
    def sequences(self) -> dict[bytes, int]:
        """How many sequences each key has."""
        return dict(self._sequences)


class WaitingQueue:
    """Sequences that wait to enter, or to be resumed."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._by_key: dict[bytes, list[Sequence]] = {}  # each in its order
        self.num_prompt_tokens = 0  # of all
        self.num_foreground = 0  # of keys that are not background ones,
        self.num_foreground_tokens = 0  # and their prompt tokens
        self.num_preempted = 0  # have run, and wait to be resumed
        self.num_changes = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in tuple(self._by_key.values()):
            yield from tuple(queue)

    def __contains__(self, sequence: Sequence) -> bool:
        queue = self._by_key.get(sequence.request.key, [])
        place = bisect_left(queue, _rank(sequence), key=_rank)
        return place < len(queue) and queue[place] is sequence

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: a new one, or a preempted one, which has the place it had."""
        self.num_changes += 1
        insort(self._by_key.setdefault(sequence.request.key, []), sequence, key=_rank)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        self.num_changes += 1
        key = sequence.request.key
        queue = self._by_key[key]
        place = bisect_left(queue, _rank(sequence), key=_rank)
        assert queue[place] is sequence
        del queue[place]
        if not queue:
            del self._by_key[key]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_tokens = sign * len(sequence.request.input_ids)
        self.num_prompt_tokens += num_tokens
        self.num_preempted += sign * sequence.was_started
        if not is_background(sequence.request.key):
            self.num_foreground += sign
            self.num_foreground_tokens += num_tokens

    def first(self, passed_over: Mapping[bytes, int] | None = None) -> Sequence | None:
        """Return the next sequence, except for so many of each key as were `passed_over`."""
        over = passed_over or {}
        heads = (queue[i] for key, queue in self._by_key.items() if (i := over.get(key, 0)) < len(queue))
        return min(heads, key=self._turn, default=None)

    def _turn(self, sequence: Sequence) -> tuple[Level, tuple[float, int]]:
        return self._shares.level(sequence.request.key), _rank(sequence)

    def in_order(self, limit: int) -> list[Sequence]:
        """Return the first `limit`, in the order they would enter if each was charged for its tokens."""
        heads = [(self._shares.level(key), _rank(queue[0]), key, 0) for key, queue in self._by_key.items()]
        heapify(heads)
        found: list[Sequence] = []
        while heads and len(found) < limit:
            (kind, given, count), _, key, place = heads[0]
            queue = self._by_key[key]
            found.append(queue[place])
            if place + 1 == len(queue):
                heappop(heads)
            else:
                level = kind, given + queue[place].num_known, count
                heapreplace(heads, (level, _rank(queue[place + 1]), key, place + 1))
        return found

    def newest_of(self, key: bytes) -> Sequence | None:
        """Return the sequence of a key that would enter last, of those that never have."""
        return next((sequence for sequence in reversed(self._by_key.get(key, [])) if not sequence.was_started), None)

    def ahead_of(self, incoming: Sequence) -> list[Sequence]:
        """Return the sequences that would enter before an incoming one."""
        shares, key, rank = self._shares, incoming.request.key, _rank(incoming)
        queue = self._by_key.get(key, [])
        ahead = queue[: bisect_left(queue, rank, key=_rank)]
        given = shares.tokens_of(key) + sum(sequence.num_known for sequence in ahead)
        turn = ((is_background(key), given, shares.sequences_of(key) + 1), rank)
        for other, queue in self._by_key.items():
            if other != key:
                ahead += self._before(turn, other, queue)
        return ahead

    def _before(self, turn: tuple[Level, tuple[float, int]], key: bytes, queue: list[Sequence]) -> Iterator[Sequence]:
        """Yield the beginning of a queue that comes before `turn`, as each that enters is charged for its tokens."""
        kind, given, count = self._shares.level(key)
        for sequence in queue:
            if ((kind, given, count), _rank(sequence)) > turn:
                return
            yield sequence
            given += sequence.num_known


def _rank(sequence: Sequence) -> tuple[float, int]:
    """Return the rank within a key: lower is sooner. Ageing is linear, so the order never changes."""
    return sequence.arrived + sequence.request.priority * AGEING_SECONDS, sequence.id
