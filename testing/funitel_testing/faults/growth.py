"""Does a quantity grow? A line through its samples that single odd ones do not bend, and how much growth is none."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope of the lines through any two points (x, y). Source: Theil 1950, Sen 1968."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x1 != x2]
    return statistics.median(slopes) if slopes else 0.0


@dataclass(frozen=True)
class Growth:
    """How a quantity changed from the first to the last of its samples, by the line through them."""

    name: str
    num_samples: int
    median: float
    total: float
    tolerance: float

    @property
    def is_none(self) -> bool:
        """Whether that is within what noise may be."""
        return self.total <= self.tolerance

    def __str__(self) -> str:
        verdict = "" if self.is_none else "  GROWS"
        figures = f"{self.median:>16.1f}{self.total:>+14.1f}{self.tolerance:>12.1f}"
        return f"{self.name:<28}{self.num_samples:>8}{figures}{verdict}"


HEAD = f"{'quantity':<28}{'samples':>8}{'median':>16}{'growth':>14}{'tolerance':>12}"


def growth(name: str, points: Sequence[tuple[float, float]], least: float, share: float) -> Growth:
    """Fit a line to (seconds, value) points.

    Args:
        name: of the quantity.
        points: in order of time.
        least: growth over the whole time that is none, in the quantity's unit.
        share: or this share of its median, where that is more.
    """
    median = statistics.median(value for _, value in points)
    total = slope(points) * (points[-1][0] - points[0][0])
    return Growth(name, len(points), median, total, max(least, share * median))
