"""What a soak saw: samples of what was held, what became of requests, and what has grown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from funitel_testing.faults.growth import Growth, growth
from funitel_testing.faults.kills import SHARD, Kill
from funitel_testing.faults.load import Answers, Outcome
from funitel_testing.faults.vitals import IN_USE
from funitel_testing.takeovers.load import Comparison

# Growth from the first to the last sample that is none: of memory as a share of it, of what is counted.
SHARE_OF_MEMORY = 0.05
MIN_LONG = 20  # minutes, to have kills every five
NUM_SHORT = 15  # periods of fewer minutes
SEVERAL_EVERY = 3  # minutes from a kill to the next, where several kinds of processes are killed
SHARED = ("rss MiB", "pss MiB")  # what these measure changes with the neighbours, and with which code was run once


@dataclass(frozen=True)
class Pace:
    """How the time is divided.

    Args:
        num_periods: how many there are.
        period_seconds: from one silence to the next.
        kill_every: a shard is killed in each period that many apart.
        warm_up: periods with samples that do not count.
        least_mib: growth of memory that is none, where that is more than its share.
        least_count: growth of what is counted that is none; less than one for each kill.
        kills: what is killed, one after the other and again.
    """

    num_periods: int
    period_seconds: float
    kill_every: int
    warm_up: int
    least_mib: float
    least_count: float
    kills: Sequence[Kill] = (SHARD,)

    @classmethod
    def of(cls, minutes: int, kills: Sequence[Kill] = (SHARD,)) -> "Pace":
        """An hour has periods of a minute and kills every five; a few minutes are denser, and warming up throughout.

        Up to 50,000 objects wait for the router's garbage collector, and its allocator keeps what they took. The four
        samples of shards have three kills between them; a pool that got its last thread in one of them grew by one.
        """
        several = len(kills) > 1
        if minutes >= MIN_LONG:
            every = SEVERAL_EVERY if several else 5
            return cls(minutes, 60.0, every, warm_up=10, least_mib=2.0, least_count=0.99, kills=kills)
        seconds, every = minutes * 60 / NUM_SHORT, 2 if several else 3
        return cls(NUM_SHORT, seconds, every, warm_up=3, least_mib=10.0, least_count=1.99, kills=kills)

    def is_killing(self, period: int) -> bool:
        """Whether something is killed in a period."""
        return period % self.kill_every == self.kill_every - 1

    def kill_of(self, period: int) -> Kill:
        """What is killed in such a period."""
        return self.kills[period // self.kill_every % len(self.kills)]

    def counts(self, role: str, period: int) -> bool:
        """Whether a sample of some processes counts: each time they are of the same age.

        That is each time for processes that are not killed; of others, before the first kill of the cycle that ends
        them.
        """
        first = next((kill for kill in self.kills if role in kill.ends), None)
        return first is None or (self.is_killing(period + 1) and self.kill_of(period + 1) is first)

    @property
    def counted(self) -> range:
        """Periods with samples that count."""
        return range(self.warm_up, self.num_periods)


@dataclass(frozen=True)
class Sample:
    """What was held at an instant, in seconds since the start; `period` is None under load."""

    seconds: float
    period: int | None
    num_kills: int
    values: dict[str, float]


@dataclass
class Report:
    """What happened.

    Attributes:
        kills: instants, in seconds since the start.
        recoveries: seconds from each kill until a new request had its answer.
        num_requests: of clients of the APIs, those that hung up among them.
        num_cancelled: those that hung up.
        bytes: what became of the requests of clients that compare bytes.
    """

    samples: list[Sample] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)  # seconds since the start
    recoveries: list[float] = field(default_factory=list)  # seconds
    num_requests: int = 0
    num_cancelled: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    bytes: Comparison = field(default_factory=Comparison)

    def count(self, outcomes: Sequence[Outcome], answers: Answers) -> None:
        """Take what became of requests into account."""
        self.num_requests += len(outcomes)
        self.num_cancelled += sum(outcome.ask.leave_after is not None for outcome in outcomes)
        self.hold(outcomes, answers)

    def hold(self, outcomes: Sequence[Outcome], answers: Answers) -> None:
        """Hold what became of requests against the answers."""
        self.lost += [f"{outcome.ask}: {outcome.loss}" for outcome in outcomes if outcome.loss]
        wrong = [outcome for outcome in outcomes if not outcome.heard.begins(answers[outcome.ask.undisturbed])]
        self.wrong += [f"{outcome.ask}: {outcome.heard}" for outcome in wrong]

    def left_behind(self) -> list[str]:
        """What was in use while idle."""
        silent = [sample for sample in self.samples if sample.period is not None]
        return [
            f"{name} {sample.values[name]:g} after {sample.seconds:.0f} s"
            for sample in silent
            for name in IN_USE
            if sample.values[name]
        ]

    def growths(self, pace: Pace) -> list[Growth]:
        """How every quantity grew over the silences that count."""
        counted = [sample for sample in self.samples if sample.period in pace.counted]
        found = []
        for name in counted[0].values:
            if name.endswith(SHARED):
                continue
            role = name.split()[0]
            points = [
                (sample.seconds, sample.values[name]) for sample in counted if pace.counts(role, sample.period or 0)
            ]
            if not points:
                continue  # in a run of less than a cycle
            is_memory = name.endswith("MiB")
            least, share = (pace.least_mib, SHARE_OF_MEMORY) if is_memory else (pace.least_count, 0.0)
            found.append(growth(name, points, least, share))
        return found
