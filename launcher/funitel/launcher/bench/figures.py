"""Compute latency, throughput and goodput figures from the timelines of requests. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

Figures = dict[str, float | None]
"""Name to value; the unit is part of the name; None means not measured."""

PERCENTILES = (50, 90, 99)
HIGHER_IS_BETTER = ("output_tokens_s", "requests_s")
LOWER_IS_BETTER = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p50")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed: a kind to count by, and the message."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request as seen by its client; instants in seconds of one clock.

    `arrivals` are the instants of events with tokens; `num_tokens` is the server's own count (`is_counted`), or else
    the number of those events.
    """

    started: float
    ended: float
    arrivals: tuple[float, ...] = ()
    num_tokens: int = 0
    is_counted: bool = False
    num_prompt_tokens: int | None = None
    failure: Failure | None = None

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.arrivals[0] - self.started

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with tokens and the next."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service-level objectives of a request for goodput, in seconds; None sets no limit.

    `itl` limits the 99th percentile of a request's gaps: with fewer than about 100 gaps, the longest.
    """

    ttft: float | None = None
    itl: float | None = None

    def are_met(self, timeline: Timeline) -> bool:
        """Whether one request succeeded within the limits."""
        if timeline.failure is not None or (self.ttft is not None and timeline.ttft > self.ttft):
            return False
        gaps = timeline.gaps
        return self.itl is None or not gaps or nearest_rank(gaps, 99) <= self.itl


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile of some values, linearly interpolated; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def nearest_rank(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarise(timelines: Sequence[Timeline], objectives: Objectives) -> Figures:
    """The figures of requests that ran together.

    Times are of successful requests; rates are over the time from the first start to the last successful end.
    """
    good = [timeline for timeline in timelines if timeline.failure is None]
    met = sum(map(objectives.are_met, timelines))
    seconds = max(t.ended for t in good) - min(t.started for t in timelines) if good else None
    prompts = [t.num_prompt_tokens for t in good if t.num_prompt_tokens is not None]
    num_tokens = sum(t.num_tokens for t in good)
    figures: Figures = {
        "requests": len(timelines),
        "failed": len(timelines) - len(good),
        "seconds": seconds,
        "prompt_tokens_mean": sum(prompts) / len(prompts) if prompts else None,
        "output_tokens": num_tokens,
        "output_tokens_s": num_tokens / seconds if seconds else None,
        "requests_s": len(good) / seconds if seconds else None,
        "goodput_requests_s": met / seconds if seconds else 0.0,
        "goodput_share": met / len(timelines) if timelines else None,
    }
    samples = {
        "ttft": [t.ttft for t in good],
        "tpot": [t.tpot for t in good if t.tpot is not None],
        "itl": [gap for t in good for gap in t.gaps],
        "e2e": [t.ended - t.started for t in good],
    }
    for name, values in samples.items():
        for percent in PERCENTILES:
            value = percentile(values, percent)
            figures[f"{name}_ms_p{percent}"] = None if value is None else value * 1000
    return figures


def count_failures(timelines: Iterable[Timeline]) -> dict[str, int]:
    """Failures by kind, the most frequent first."""
    return dict(Counter(t.failure.kind for t in timelines if t.failure is not None).most_common())


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds in which it was measured."""
    names = rounds[0].keys() if rounds else ()
    measured = {name: [value for figures in rounds if (value := figures[name]) is not None] for name in names}
    return {name: median(values) if values else None for name, values in measured.items()}


def times_better(ours: Mapping[str, float | None], theirs: Mapping[str, float | None]) -> Figures:
    """Ratios of two servers for each figure; above 1 means the first is better, for rates and for times."""
    ratios: Figures = {}
    for name in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
        first, second = ours[name], theirs[name]
        if name in LOWER_IS_BETTER:
            first, second = second, first
        ratios[name] = first / second if first is not None and second else None
    return ratios
