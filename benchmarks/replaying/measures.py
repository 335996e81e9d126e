"""What a replay measures: latencies, what was computed and what was found computed, how full the pool was."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BINS_PER_UNIT = 200.0  # of the natural logarithm: a percentile is off by at most a quarter per cent


class Histogram:
    """Durations in bins of equal ratio; hundreds of millions of them fit."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration `count` times."""
        self._bins[round(math.log(max(seconds, 1e-9)) * BINS_PER_UNIT)] += count

    def percentile(self, share: float) -> float | None:
        """The duration that `share` of all are within; None of none."""
        left = share * self._bins.total()
        for index in sorted(self._bins):
            left -= self._bins[index]
            if left <= 0:
                return math.exp(index / BINS_PER_UNIT)
        return None


@dataclass(slots=True)
class Level:
    """A quantity over time: its mean, and its least and greatest value."""

    seconds: float = 0.0
    area: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def hold(self, value: float, seconds: float) -> None:
        """Note that the quantity had a value for so long."""
        self.seconds += seconds
        self.area += value * seconds
        if value < self.least:
            self.least = value
        if value > self.most:
            self.most = value

    @property
    def mean(self) -> float | None:
        """Mean over time; None if it was never held."""
        return self.area / self.seconds if self.seconds else None


@dataclass(slots=True)
class Measures:
    """Of all replicas of one replay together; levels are those of one replica."""

    num_requests: int = 0
    num_refused: int = 0  # could never fit into the pool
    num_turned_away: int = 0  # found no place, or not in time
    num_finished: int = 0
    num_steps: int = 0
    num_preempted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts when they were first let in
    computed_tokens: int = 0  # prompts and whatever was computed again
    completion_tokens: int = 0
    ended: float = 0.0
    to_first_token: Histogram = field(default_factory=Histogram)
    to_first_token_of: dict[str, Histogram] = field(default_factory=dict)  # each key
    between_tokens: Histogram = field(default_factory=Histogram)
    running: Level = field(default_factory=Level)  # sequences in a step
    pool_used: Level = field(default_factory=Level)  # share of the blocks that sequences hold
    running_queued: Level = field(default_factory=Level)  # the same two, while others wait
    pool_used_queued: Level = field(default_factory=Level)

    def note_first_token(self, key: str, seconds: float) -> None:
        """Count a time to first token of a request of `key`."""
        self.to_first_token.add(seconds)
        if key not in self.to_first_token_of:
            self.to_first_token_of[key] = Histogram()
        self.to_first_token_of[key].add(seconds)

    def report(self) -> dict[str, Any]:
        """All of it as JSON; times in seconds."""
        seconds = self.ended or math.inf
        return {
            "requests": self.num_requests,
            "refused": self.num_refused,
            "turned_away": self.num_turned_away,
            "finished": self.num_finished,
            "seconds": self.ended,
            "requests_per_second": self.num_finished / seconds,
            "completion_tokens_per_second": self.completion_tokens / seconds,
            "ttft_p50": self.to_first_token.percentile(0.5),
            "ttft_p99": self.to_first_token.percentile(0.99),
            "ttft_of_keys": {
                key: {"p50": histogram.percentile(0.5), "p99": histogram.percentile(0.99)}
                for key, histogram in sorted(self.to_first_token_of.items())
            },
            "itl_p50": self.between_tokens.percentile(0.5),
            "itl_p99": self.between_tokens.percentile(0.99),
            "hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
            "preemptions": self.num_preempted,
            "steps": self.num_steps,
            "computed_tokens": self.computed_tokens,
            "running_mean": self.running.mean,
            "running_most": self.running.most if self.running.seconds else None,
            "pool_use_mean": self.pool_used.mean,
            "queued_seconds": self.running_queued.seconds,
            "queued_running_mean": self.running_queued.mean,
            "queued_pool_use_mean": self.pool_used_queued.mean,
            "queued_pool_use_least": self.pool_used_queued.least if self.pool_used_queued.seconds else None,
        }
