"""The table of a page: a row for each server of a pair, and one for what is between them, with the aim of each figure.

A figure is a median over rounds, with half the distance from the least to the most in percent of it. A ratio above 1
means that this server is better, for rates and for times. A loss (a ratio below 1) is bold, and a ratio below its aim
has the aim beside it. Nothing that was measured is left out. Pure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from funitel.launcher.bench.figures import percentile
from funitel.proto.errors import FunitelError

from .measure import Round
from .plan import FORMATS, WORKLOADS, Cell
from .results import BENCH, OURS, PEER, Record, Results

BEGIN, END = "<!-- peers {}: begin -->", "<!-- peers {}: end -->"
NOTHING = "–"
HIGHER, LOWER = 1, -1


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: the workload it is of, its name in a round, whether more is better, digits, and the aim of a ratio.

    An aim holds beside every peer, or beside those in `aim_of`.
    """

    title: str
    workload: str
    figure: str
    better: int
    digits: int
    aim: float | None = None
    aim_of: tuple[str, ...] = ()

    def aim_beside(self, peer: str) -> float:
        """The least ratio that is aimed at; 1 where nothing else is: nowhere behind."""
        return self.aim if self.aim is not None and (not self.aim_of or peer in self.aim_of) else 1.0


TPOT_AIM, TPOT_AIM_OF_BENCH = 1 / 0.7, 1 / 0.85
COLUMNS = (
    Column("tokens/s: 1", "1", "output_tokens_s", HIGHER, 1),
    Column("4", "4", "output_tokens_s", HIGHER, 1),
    Column("16", "16", "output_tokens_s", HIGHER, 1, aim=2.0),
    Column("64", "64", "output_tokens_s", HIGHER, 1, aim=1.7, aim_of=("vllm",)),
    Column("TPOT, ms", "1", "tpot_ms_p50", LOWER, 1, aim=TPOT_AIM),
    Column("TTFT p50 at 1, ms", "1", "ttft_ms_p50", LOWER, 0),
    Column("p99", "1", "ttft_ms_p99", LOWER, 0),
    Column("TTFT p50 at 16, ms", "16", "ttft_ms_p50", LOWER, 0),
    Column("p99", "16", "ttft_ms_p99", LOWER, 0),
    Column("prefill 512, ms", "prefill-512", "ttft_ms_p50", LOWER, 0, aim=2.0),
    Column("4,096, ms", "prefill-4096", "ttft_ms_p50", LOWER, 0, aim=2.0),
    Column("memory, MiB", "", "proportional_mib", LOWER, 0),
)
NEUTRAL = {
    "tokens/s": ("output_tokens_s", HIGHER),
    "TPOT, ms": ("tpot_ms_p50", LOWER),
    "TTFT p50, ms": ("ttft_ms_p50", LOWER),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A median and its spread: half the distance from the least to the most, as a share of it."""

    middle: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Value | None":
        """Of what was measured, if anything was."""
        if not values:
            return None
        middle = median(values)
        return cls(middle, (max(values) - min(values)) / 2 / middle if middle else 0.0)

    def shown(self, digits: int) -> str:
        """`107.0 ±3 %`."""
        return f"{self.middle:,.{digits}f} ±{100 * self.spread:.0f} %"


def value_of(rounds: Sequence[Round], figure: str) -> Value | None:
    """A figure over rounds; the 99th percentile is of the requests of all rounds, the spread that of rounds."""
    if figure == "ttft_ms_p99":
        samples = [samples for each in rounds if isinstance(samples := each.get("ttft_ms"), list)]
        pooled = percentile([value for each in samples for value in each], 99)
        of_rounds = Value.of([worst for each in samples if (worst := percentile(each, 99)) is not None])
        return None if pooled is None or of_rounds is None else Value(pooled, of_rounds.spread)
    return Value.of([float(value) for each in rounds if isinstance(value := each.get(figure), (int, float))])


def table(results: Results, cells: Sequence[Cell]) -> str:
    """The section of the page, between its markers."""
    measured = [cell for cell in cells if cell.key in results.cells]
    letter = letter_of(results.machine)
    lines = [BEGIN.format(letter), "", *_head(results, measured), ""]
    titles = ["model, format", "server", *(column.title for column in COLUMNS)]
    lines += [_row(titles), _row(["---"] * len(titles))]
    for _, pair in groupby(measured, key=lambda cell: cell.pair):
        lines += _pair(results, list(pair))
    lines += ["", *_notes(results, measured), *_by_guidellm(results), "", END.format(letter)]
    return "\n".join(lines)


def letter_of(machine: Mapping[str, Any]) -> str:
    """The letter of a machine on the page: its label up to the comma."""
    return str(machine.get("label", "")).partition(",")[0].strip() or "?"


def write_into(page: str, section: str, machine: Mapping[str, Any]) -> str:
    """A page with the section of a machine in place of the one that it has, or behind those of other machines.

    Raises:
        FunitelError: the page has no section of any machine.
    """
    letter = letter_of(machine)
    before, begin, rest = page.partition(BEGIN.format(letter))
    _, end, after = rest.partition(END.format(letter))
    if begin and end:
        return before + section + after
    ends = list(re.finditer(END.format(r"\S+"), page))
    if not ends:
        raise FunitelError(f"the page has no line {END.format(letter)}")
    place = ends[-1].end()
    return f"{page[:place]}\n\n{section}{page[place:]}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(results: Results, cells: Sequence[Cell]) -> Iterator[str]:
    machine = results.machine
    records = [results.cells[cell.key] for cell in cells]
    commits = ", ".join(f"`{name}`" for name in sorted({record.commit for record in records}))
    dates = sorted({record.date for record in records})
    versions = sorted({f"{name}: {version}" for record in records for name, version in record.versions.items()})
    rounds = [record.num_rounds() for record in records if record.num_rounds()]
    flags = ", ".join(machine.get("flags", ()))
    yield (
        f"Machine {machine.get('label', '')}: {machine.get('processor', 'unknown')}, {machine.get('cores', '?')} cores"
        f" ({flags}), {machine.get('memory_gib', '?')} GiB."
        f" Commits: {commits or 'none'}; {' to '.join(dates[:1] + dates[1:][-1:])}."
    )
    least, most = min(rounds, default=0), max(rounds, default=0)
    yield f"Peers: {'; '.join(versions) or 'none'}. Rounds of a cell: {least} to {most}."


def _pair(results: Results, cells: Sequence[Cell]) -> Iterator[str]:
    """The rows of one model, format and peer."""
    first = cells[0]
    records = {cell.workload.name: results.cells[cell.key] for cell in cells}
    problems = sorted({record.problem for record in records.values() if record.problem})
    if not any(record.rounds for record in records.values()):
        yield _row(
            [
                f"{first.model}, {first.form}",
                f"{first.peer}: **not measured**: {'; '.join(problems)}",
                *[""] * len(COLUMNS),
            ]
        )
        return
    form = FORMATS[first.form]
    sides = {side: [_value(records, side, column) for column in COLUMNS] for side in (OURS, PEER, BENCH)}
    note = "" if form.is_same else f" (of {form.file}: other bits than the peer's)"
    names = {OURS: f"funitel{note}", PEER: first.peer, BENCH: "llama-bench"}
    for side, values in sides.items():
        if any(values):
            shown = [
                value.shown(column.digits) if value else NOTHING for value, column in zip(values, COLUMNS, strict=True)
            ]
            yield _row([f"{first.model}, {first.form}", names[side], *shown])
        if side != OURS and any(values):
            ratios = [
                _ratio(ours, theirs, column, first.peer if side == PEER else BENCH)
                for ours, theirs, column in zip(sides[OURS], values, COLUMNS, strict=True)
            ]
            yield _row(["", f"funitel beside {names[side]}", *ratios])


def _value(records: Mapping[str, Record], side: str, column: Column) -> Value | None:
    """A figure of a side; memory is the most of all workloads."""
    if column.workload:
        record = records.get(column.workload)
        rounds = record.rounds.get(side, []) if record is not None else []
        return value_of(rounds, column.figure)
    values = [value_of(record.rounds.get(side, []), column.figure) for record in records.values()]
    return max((value for value in values if value is not None), key=lambda value: value.middle, default=None)


def _ratio(ours: Value | None, theirs: Value | None, column: Column, peer: str) -> str:
    """`1.52×`, in bold below 1, and with the aim where it is missed."""
    if ours is None or theirs is None or not ours.middle or not theirs.middle:
        return ""
    ratio = ours.middle / theirs.middle if column.better == HIGHER else theirs.middle / ours.middle
    aim = column.aim_beside(peer)
    if peer == BENCH and column.figure == "tpot_ms_p50":
        aim = TPOT_AIM_OF_BENCH
    shown = f"{ratio:.2f}×" if ratio >= 1 else f"**{ratio:.2f}×**"
    if aim <= 1:
        return shown
    return f"{shown} (aim {aim:.2f}{'' if ratio >= aim else ', missed'})"


def _notes(results: Results, cells: Sequence[Cell]) -> Iterator[str]:
    """The client's share of a core, tuned options, and what failed."""
    shares: dict[str, list[float]] = {}
    for cell in cells:
        for side in (OURS, PEER):
            rounds = results.cells[cell.key].rounds.get(side, [])
            if value := value_of(rounds, "client_cpu_share"):
                shares.setdefault(cell.workload.name, []).append(value.middle)
    if shares:
        parts = (f"{name}: {100 * max(shares[name]):.0f} %" for name in WORKLOADS if name in shares)
        yield f"The load generator's largest share of a core, by workload: {'; '.join(parts)}."
        yield ""  # a list that follows a line is part of it on some sites
    for _, pair in groupby(cells, key=lambda cell: cell.pair):
        of_pair = list(pair)
        options = {
            cell.workload.kind: results.cells[cell.key].options for cell in of_pair if results.cells[cell.key].options
        }
        if options:
            kinds = (f"{kind}: {_options(found)}" for kind, found in options.items())
            yield f"- Tuned, {of_pair[0].pair}: {'; '.join(kinds)}."
    for cell in cells:
        if problem := results.cells[cell.key].problem:
            yield f"- {cell.key} was not measured: {problem}."


def _options(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value or 'default'}" for name, value in options.items())


def _by_guidellm(results: Results) -> Iterator[str]:
    """The lines that were repeated with a generator of others."""
    if not results.neutral:
        return
    version = next(iter(results.neutral.values()))["generator"]
    yield from ("", f"The same with {version} as the load generator:", "")
    yield _row(["cell", "server", *NEUTRAL])
    yield _row(["---"] * (2 + len(NEUTRAL)))
    for key, found in results.neutral.items():
        values = {
            side: [Value.of([each[name] for each in found["rounds"][side]]) for name, _ in NEUTRAL.values()]
            for side in (OURS, PEER)
        }
        for side, of_side in values.items():
            name = "funitel" if side == OURS else key.split("/")[2]
            yield _row([key, name, *(value.shown(1) if value else NOTHING for value in of_side)])
        ratios = [
            _ratio(ours, theirs, Column(title, "", name, better, 1), key.split("/")[2])
            for (title, (name, better)), ours, theirs in zip(NEUTRAL.items(), values[OURS], values[PEER], strict=True)
        ]
        yield _row(["", "ratio", *ratios])
