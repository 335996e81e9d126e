"""Report the results of a benchmark as tables, warnings and one JSON object."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from funitel.launcher.bench.figures import Failure, Figures, Timeline, count_failures, medians, times_better
from funitel.launcher.bench.load import BUSY_SHARE, LATE_MS, Level
from funitel.launcher.bench.settings import BenchSettings
from funitel.launcher.bench.target import Target

COLUMNS = (
    ("tokens/s", "output_tokens_s", 1),
    ("req/s", "requests_s", 2),
    ("TTFT p50", "ttft_ms_p50", 0),
    ("p90", "ttft_ms_p90", 0),
    ("p99", "ttft_ms_p99", 0),
    ("TPOT p50", "tpot_ms_p50", 1),
    ("p99", "tpot_ms_p99", 1),
    ("ITL p50", "itl_ms_p50", 1),
    ("p90", "itl_ms_p90", 1),
    ("p99", "itl_ms_p99", 1),
    ("E2E p50", "e2e_ms_p50", 0),
    ("p99", "e2e_ms_p99", 0),
)
GOODPUT = ("goodput/s", "goodput_requests_s", 2)
RATIOS = (
    ("tokens/s", "output_tokens_s"),
    ("req/s", "requests_s"),
    ("TTFT p50", "ttft_ms_p50"),
    ("TTFT p99", "ttft_ms_p99"),
    ("TPOT p50", "tpot_ms_p50"),
    ("ITL p50", "itl_ms_p50"),
    ("ITL p99", "itl_ms_p99"),
    ("E2E p50", "e2e_ms_p50"),
)


@dataclass(slots=True)
class LevelResult:
    """One level of one server, over all rounds."""

    level: Level
    rounds: list[Figures] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    num_uncounted: int = 0  # successful requests without the server's own token count

    def add(self, figures: Figures, timelines: Sequence[Timeline]) -> None:
        """Add the figures and failures of a round."""
        self.rounds.append(figures)
        self.failures += [t.failure for t in timelines if t.failure is not None]
        self.num_uncounted += sum(t.failure is None and not t.is_counted for t in timelines)

    @property
    def median(self) -> Figures:
        """Medians over the rounds."""
        return medians(self.rounds)

    def kinds(self) -> dict[str, int]:
        """Failures by kind, the most frequent first."""
        return count_failures(Timeline(0.0, 0.0, failure=failure) for failure in self.failures)


@dataclass(slots=True)
class ServerResult:
    """One server and its levels."""

    target: Target
    levels: list[LevelResult]


def tables(settings: BenchSettings, results: Sequence[ServerResult]) -> Iterator[str]:
    """The tables, line by line."""
    has_objectives = settings.slo_ttft_ms is not None or settings.slo_itl_ms is not None
    columns = (*COLUMNS, GOODPUT) if has_objectives else COLUMNS
    for server in results:
        yield f"{server.target.name}: {_conditions(server)}"
        head = [label for label, _, _ in columns]
        rows = [
            [str(result.level), *(_number(result.median[name], digits) for _, name, digits in columns)]
            for result in server.levels
        ]
        yield from _aligned([[_rounds(settings), *head], *rows])
        for result in server.levels:
            for kind, count in result.kinds().items():
                example = next(failure.message for failure in result.failures if failure.kind == kind)
                yield f"  {result.level}: {count} failed, {kind}: {example}"
        yield ""
    for first, second in combinations(results, 2):
        yield f"how many times better {first.target.name} is than {second.target.name}, of medians:"
        rows = [
            [str(level), *(_number(ratios[name], 2) for _, name in RATIOS)]
            for level, ratios in _compared(first, second)
        ]
        yield from _aligned([["", *(label for label, _ in RATIOS)], *rows])
        yield ""
    yield "times in ms; TTFT to the first token, TPOT a token after it, ITL from one event to the next, E2E the answer"


def warnings(results: Sequence[ServerResult]) -> Iterator[str]:
    """Warnings about the validity of the figures."""
    for server in results:
        for result in server.levels:
            where = f"{server.target.name}, {result.level}"
            share = max(figures["client_cpu_share"] or 0.0 for figures in result.rounds)
            late = max(figures["client_lag_ms_p99"] or 0.0 for figures in result.rounds)
            if share > BUSY_SHARE:
                yield f"{where}: the client used {share:.0%} of a core: it may limit these figures"
            if late > LATE_MS:
                yield (
                    f"{where}: the client itself was up to {late:.0f} ms late (p99): the machine has no free core for "
                    "it, and times are too long by that much"
                )


def summary(settings: BenchSettings, seed: int, results: Sequence[ServerResult]) -> dict[str, Any]:
    """All results as one JSON object; times in milliseconds where a name says so, else in seconds."""
    return {
        "workload": {
            "kind": settings.workload,
            "prompt_tokens": settings.prompt_length,
            "output_tokens": settings.output_length,
            "prefix_tokens": settings.prefix_length,
            "num_groups": settings.num_groups if settings.workload == "shared-prefix" else None,
            "seed": seed,
        },
        "objectives": {"ttft_ms": settings.slo_ttft_ms, "itl_ms": settings.slo_itl_ms},
        "servers": [_server(server) for server in results],
        "times_better": [
            {"server": first.target.name, "than": second.target.name, **_level(level), "ratios": _rounded(ratios)}
            for first, second in combinations(results, 2)
            for level, ratios in _compared(first, second)
        ],
    }


def _server(server: ServerResult) -> dict[str, Any]:
    target = server.target
    return {
        "name": target.name,
        "url": target.endpoint.url,
        "api": target.api,
        "model": target.model,
        "ignores_eos": target.ignores_eos,
        "prompts_counted_by": "server" if target.counts_prompts else "words",
        "tokens_counted_by": _counted_by(server),
        "levels": [
            {
                **_level(result.level),
                "median": _rounded(result.median),
                "rounds": [*map(_rounded, result.rounds)],
                "failures": result.kinds(),
            }
            for result in server.levels
        ],
    }


def _level(level: Level) -> dict[str, float | None]:
    return {"concurrency": level.concurrency, "request_rate": level.rate}


def _rounded(figures: Figures) -> Figures:
    """The figures rounded to three decimals."""
    return {name: None if value is None else round(value, 3) for name, value in figures.items()}


def _compared(first: ServerResult, second: ServerResult) -> Iterator[tuple[Level, Figures]]:
    for ours, theirs in zip(first.levels, second.levels, strict=True):
        yield ours.level, times_better(ours.median, theirs.median)


def _counted_by(server: ServerResult) -> str:
    return "events" if any(result.num_uncounted for result in server.levels) else "server"


def _conditions(server: ServerResult) -> str:
    """How the requests of a server were made and counted."""
    target = server.target
    return "; ".join(
        (
            f"{target.api}{f', {target.model}' if target.model else ''}",
            "end token ignored" if target.ignores_eos else "end token not ignored, so answers may be shorter",
            "tokens as the server counts them" if _counted_by(server) == "server" else "an event is taken for a token",
            "prompts cut to tokens"
            if target.counts_prompts
            else "no /tokenize: a word is taken for a token of a prompt",
        )
    )


def _rounds(settings: BenchSettings) -> str:
    return "" if settings.rounds == 1 else f"median of {settings.rounds}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
