"""Figures of benchmarks."""

import statistics


def spread(values: list[float], num_digits: int = 1) -> list[float]:
    """Median, smallest and largest."""
    return [round(value, num_digits) for value in (statistics.median(values), min(values), max(values))]
