"""The results of a measurement as an SVG: a panel of perplexity, and one of KL divergence where there is a reference.

The file needs no font, script or image of elsewhere. Its colours are CSS variables, which follow the light or dark
scheme of the reader; a page that embeds the SVG inline can set them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from funitel.model_server.tools.perplexity.report import QualityReport, Row

_COLUMN, _MIN_PANEL, _HEIGHT = 96, 260, 230  # of a model; of a panel; of its plot
_LEFT, _TOP, _BOTTOM, _GAP = 76, 74, 66, 34
_MAX_NAME = 15  # characters of a name on the x axis; the whole name is its tooltip
_STYLE = """
  svg { --surface: #ffffff; --ink: #1b1f24; --muted: #59636e; --grid: #d9dee4; --mark: #1f6feb; }
  @media (prefers-color-scheme: dark) {
    svg { --surface: #0d1117; --ink: #e6edf3; --muted: #9198a1; --grid: #30363d; --mark: #58a6ff; }
  }
  text { font: 12px system-ui, sans-serif; fill: var(--muted); }
  .title { font-size: 14px; font-weight: 600; fill: var(--ink); }
  .value { fill: var(--ink); font-variant-numeric: tabular-nums; }
  .surface { fill: var(--surface); }
  .grid { stroke: var(--grid); }
  .bar { stroke: var(--mark); stroke-width: 2; }
  .mark { fill: var(--mark); }
"""


@dataclass(frozen=True)
class Point:
    """A model in a panel: its value and standard error, or why it has none."""

    name: str
    value: float | None
    error: float
    label: str


@dataclass(frozen=True)
class Panel:
    """One quantity of all models.

    Attributes:
        title: its axis label, with the unit.
        is_log: on a logarithmic axis.
        points: a model each.
    """

    title: str
    is_log: bool
    points: Sequence[Point]
    ticks: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        found = [(p.value - p.error, p.value + p.error) for p in self.points if p.value is not None]
        low, high = min(low for low, _ in found), max(high for _, high in found)
        object.__setattr__(self, "ticks", _decades(low, high) if self.is_log else _steps(low, high))

    @property
    def width(self) -> int:
        """Of the plot, in pixels."""
        return max(_MIN_PANEL, _COLUMN * len(self.points))

    def y(self, value: float) -> float:
        """Where a value is, in pixels from the top of the plot."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return _HEIGHT * (high - value) / (high - low)


def picture_of(report: QualityReport) -> str:
    """The SVG of a report with at least one row."""
    panels = [Panel("perplexity", False, [_perplexity(row) for row in report.rows])]
    if any(row.distance is not None and row.distance.kl_mean > 0 for row in report.rows):
        title = f"KL divergence from {_short(report.reference or '')}, nats"
        panels.append(Panel(title, True, [_divergence(row, report.reference) for row in report.rows]))
    width = sum(_LEFT + panel.width + _GAP for panel in panels)
    height = _TOP + _HEIGHT + _BOTTOM
    heading = f"{report.text}: {report.num_tokens:,} tokens, window {report.window}, stride {report.stride}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        f"<title>{escape(heading)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="surface" width="{width}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{escape(heading)}</text>',
    ]
    left = 0
    for panel in panels:
        lines += [f'<g transform="translate({left + _LEFT} {_TOP})">', *_drawn(panel), "</g>"]
        left += _LEFT + panel.width + _GAP
    return "\n".join([*lines, "</svg>", ""])


def _perplexity(row: Row) -> Point:
    likelihood = row.likelihood
    return Point(row.name, likelihood.perplexity, likelihood.perplexity_error, f"{likelihood.perplexity:.3f}")


def _divergence(row: Row, reference: str | None) -> Point:
    if row.distance is None or row.distance.kl_mean == 0:
        return Point(row.name, None, 0.0, "reference" if row.name == reference else "0")
    return Point(row.name, row.distance.kl_mean, 0.0, f"{row.distance.kl_mean:.2g}")


def _drawn(panel: Panel) -> list[str]:
    lines = [f'<text x="0" y="-22">{escape(panel.title)}</text>']
    for tick in panel.ticks:
        y = panel.y(tick)
        lines.append(f'<line class="grid" x1="0" x2="{panel.width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    column = panel.width / len(panel.points)
    for place, point in enumerate(panel.points):
        x = column * (place + 0.5)
        lines.append(
            f'<text x="{x:.1f}" y="{_HEIGHT + 22}" text-anchor="middle"><title>{escape(point.name)}</title>'
            f"{escape(_short(point.name))}</text>"
        )
        if point.value is None:
            lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(point.label)}</text>')
            continue
        y, top = panel.y(point.value), panel.y(point.value + point.error)
        if point.error:
            bottom = panel.y(point.value - point.error)
            lines.append(f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
        lines.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        lines.append(f'<text class="value" x="{x:.1f}" y="{top - 9:.1f}" text-anchor="middle">{point.label}</text>')
    lines.append(f'<text x="{panel.width / 2:.1f}" y="{_HEIGHT + 48}" text-anchor="middle">precision or model</text>')
    return lines


def _short(name: str) -> str:
    """The last part of a path, cut to what fits a column."""
    last = name.rstrip("/").rsplit("/", 1)[-1]
    return last if len(last) <= _MAX_NAME else last[: _MAX_NAME - 1] + "…"


def _steps(low: float, high: float) -> list[float]:
    """Round numbers, three to seven, the first at most `low` and the last above `high`."""
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), math.floor(high / step) + 1
    return [round(each * step, 12) for each in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten around the values."""
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high)) + 1
    every = max(1, -(-(last - first) // 7))
    return [10.0**each for each in range(first, last + every, every)]
