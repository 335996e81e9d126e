"""Format reports of replays as a table."""

from collections.abc import Sequence
from typing import Any

COLUMNS = (  # heading, name in the report, factor, decimals
    ("policy", "policy", None, 0),
    ("replicas", "replicas", 1, 0),
    ("finished", "finished", 1, 0),
    ("tokens/s", "completion_tokens_per_second", 1, 1),
    ("TTFT p50 s", "ttft_p50", 1, 3),
    ("p99 s", "ttft_p99", 1, 3),
    ("ITL p50 ms", "itl_p50", 1000, 1),
    ("p99 ms", "itl_p99", 1000, 1),
    ("hit %", "hit_rate", 100, 1),
    ("preempted", "preemptions", 1, 0),
    ("running", "running_mean", 1, 1),
    ("pool %", "pool_use_mean", 100, 1),
    ("queued: running", "queued_running_mean", 1, 1),
    ("pool %", "queued_pool_use_mean", 100, 1),
    ("least %", "queued_pool_use_least", 100, 1),
)


def table(reports: Sequence[dict[str, Any]]) -> str:
    """One line a report; figures that were not measured are dashes. `queued` means while requests wait."""
    rows = [[heading for heading, *_ in COLUMNS]]
    for report in reports:
        rows.append([_cell(report[name], factor, decimals) for _, name, factor, decimals in COLUMNS])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cell(value: Any, factor: float | None, decimals: int) -> str:
    if value is None:
        return "-"
    return str(value) if factor is None else f"{value * factor:.{decimals}f}"
