"""One figure of a run: measured, held against a ceiling and an aim, and written as a line of the table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Facts = Mapping[str, float]
"""What has been measured so far, by the keys of its lines."""

HEADER = f"{'':74} {'measured':>10} {'ratio':>8} {'aim':>8}"


@dataclass(frozen=True)
class Line:
    """One figure: what it is of a ceiling, and what it should be at least (or, `is_most`, at most).

    `measured` is None of what could not be measured; `unit` says why.
    """

    key: str
    name: str
    measured: float | None
    unit: str
    ratio: float | None = None
    aim: float | None = None
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the aim, if there is one, is reached. What could not be measured reaches none."""
        if self.aim is None:
            return True
        if self.ratio is None:
            return False
        return self.ratio <= self.aim if self.is_most else self.ratio >= self.aim

    def __str__(self) -> str:
        measured = "-" if self.measured is None else f"{self.measured:.4g}"
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        aim = "" if self.aim is None else ("<= " if self.is_most else ">= ") + f"{self.aim:g}"
        return f"{self.name:74} {measured:>10} {ratio:>8} {aim:>8}  {self.unit}"


def report(
    lines: Sequence[Line], errors: Mapping[str, str], seconds: Mapping[str, float], *, is_rehearsal: bool
) -> dict[str, Any]:
    """All of a run, for programs."""
    told = [asdict(line) | {"is_met": line.is_met} for line in lines]
    return {"is_rehearsal": is_rehearsal, "lines": told, "errors": dict(errors), "seconds": dict(seconds)}


def summary(full: Mapping[str, Any]) -> dict[str, Any]:
    """A report on one short line: figures and ratios by key, and which aims were missed."""
    figures = {line["key"]: _short(line["measured"], line["ratio"]) for line in full["lines"]}
    missed = [line["key"] for line in full["lines"] if not line["is_met"]]
    return {**full, "lines": figures, "missed": missed}


def _short(*numbers: float | None) -> list[float]:
    return [float(f"{number:.5g}") for number in numbers if number is not None]
