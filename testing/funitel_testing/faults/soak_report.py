"""What a soak saw: samples of what was held, what became of requests, and what has grown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from funitel_testing.faults.growth import Growth, growth
from funitel_testing.faults.load import Answers, Outcome
from funitel_testing.faults.vitals import IN_USE

# Growth from the first to the last sample that is none: of memory as a share of it, of what is counted.
SHARE_OF_MEMORY = 0.05
MIN_LONG = 20  # minutes, to have kills every five
NUM_SHORT = 15  # periods of fewer minutes
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
    """

    num_periods: int
    period_seconds: float
    kill_every: int
    warm_up: int
    least_mib: float
    least_count: float

    @classmethod
    def of(cls, minutes: int) -> "Pace":
        """An hour has periods of a minute and kills every five; a few minutes are denser, and warming up throughout.

        Up to 50,000 objects wait for the router's garbage collector, and its allocator keeps what they took. The four
        samples of shards have three kills between them; a pool that got its last thread in one of them grew by one.
        """
        if minutes >= MIN_LONG:
            return cls(minutes, 60.0, kill_every=5, warm_up=10, least_mib=2.0, least_count=0.99)
        return cls(NUM_SHORT, minutes * 60 / NUM_SHORT, kill_every=3, warm_up=3, least_mib=10.0, least_count=1.99)

    def is_killing(self, period: int) -> bool:
        """Whether a shard is killed in a period."""
        return period % self.kill_every == self.kill_every - 1

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
    """What happened."""

    samples: list[Sample] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)  # seconds since the start
    recoveries: list[float] = field(default_factory=list)  # seconds
    num_requests: int = 0
    num_cancelled: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

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
            is_of_shards = name.startswith("shards")
            points = [
                (sample.seconds, sample.values[name])
                for sample in counted
                if not is_of_shards or pace.is_killing((sample.period or 0) + 1)
            ]
            is_memory = name.endswith("MiB")
            least, share = (pace.least_mib, SHARE_OF_MEMORY) if is_memory else (pace.least_count, 0.0)
            found.append(growth(name, points, least, share))
        return found
