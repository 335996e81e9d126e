"""The table: a fault, what it may cost, which is written down here before it is done, and what it did cost."""

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from funitel_testing.faults.asks import Ask
from funitel_testing.faults.load import Answers, Load, Outcome, seconds_to_answer

START = "a start"  # the load of faults that there are before anything is asked


class Cost(StrEnum):
    """The most that a fault may cost of the requests that it finds in flight, or that cause it."""

    NOTHING = "nothing"
    IN_FLIGHT = "those in flight"
    CAUSE = "those that cause it"


class Scene(Protocol):
    """A deployment that faults are done to."""

    url: str

    def until_whole(self) -> None:
        """Return once everything serves again; fail where that does not happen."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        name: what is done.
        cost: what it may cost.
        why: why it may cost that.
        scene: what it is done to, made for a model folder and a folder for logs.
        strike: does it, and undoes what a person or an init system would undo; returns when that is done. The result
            is the instant at which a killed server was gone, where that may be later: it took requests until then.
        obstacle: why it cannot be done on this machine; empty where it can.
        causes: whether a request causes it.
        is_wearing: processes are started again, which the launcher does later and later, and so often at most.
        is_away: nothing listens on the port for a while.
        is_brief: part of the short form.
    """

    name: str
    cost: Cost
    why: str
    scene: Callable[[Path, Path], AbstractContextManager[Any]]
    strike: Callable[[Any], Coroutine[Any, Any, float | None]]
    obstacle: Callable[[], str] = lambda: ""
    causes: Callable[[Ask], bool] = lambda ask: False
    is_wearing: bool = False
    is_away: bool = False
    is_brief: bool = True


@dataclass
class Run:
    """What one strike cost; of the requests that were in flight or came later."""

    num_requests: int = 0
    num_in_flight: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    too_much: list[str] = field(default_factory=list)  # losses beyond what was expected
    seconds_to_recover: float = 0.0


async def run(fault: Fault, scene: Scene, load: Load, answers: Answers) -> Run:
    """Strike once the load has started, and see what becomes of it."""
    task = asyncio.create_task(load.run())
    await load.until_in_flight()
    load.struck = struck = time.monotonic()
    strike = asyncio.create_task(fault.strike(scene))
    try:
        recovery = seconds_to_answer(scene.url, struck, may_be_lost=fault.cost is Cost.IN_FLIGHT)
        seconds, gone = await asyncio.gather(recovery, strike)
        found = judge(fault, await task, struck, answers, gone)
    finally:
        task.cancel()
        strike.cancel()
    found.seconds_to_recover = seconds
    return found


def judge(fault: Fault, outcomes: Sequence[Outcome], struck: float, answers: Answers, gone: float | None = None) -> Run:
    """Hold what became of requests against what was expected; see `Fault.strike` for `gone`."""
    found = Run()
    for outcome in outcomes:
        found.num_requests += not outcome.was_over(struck)
        found.num_in_flight += outcome.was_in_flight(struck)
        if outcome.loss:
            found.lost.append(f"{outcome.ask}, asked {outcome.began - struck:.3f} s after the fault: {outcome.loss}")
            was_expected = {
                Cost.NOTHING: False,
                Cost.IN_FLIGHT: outcome.began <= (gone or struck) and not outcome.was_over(struck),
                Cost.CAUSE: fault.causes(outcome.ask),
            }
            if not was_expected[fault.cost]:
                found.too_much.append(found.lost[-1])
        if not outcome.heard.begins(answers[outcome.ask.undisturbed]):
            found.wrong.append(f"{outcome.ask}: {outcome.heard}")
    return found


class Named(Protocol):
    """What a row is about."""

    @property
    def name(self) -> str:
        """What is done."""
        ...

    @property
    def cost(self) -> Cost:
        """What it may cost."""
        ...


@dataclass
class Row:
    """All runs of a fault under a load; under a start no text is compared."""

    fault: Named
    load: str
    runs: list[Run] = field(default_factory=list)
    obstacle: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """What the table says of it."""
        if not self.runs:
            reason = self.obstacle or "it failed"
            return (self.fault.name, self.load, "0", "", self.fault.cost, f"not known: {reason}", "", "")
        seconds = [run.seconds_to_recover for run in self.runs]
        return (
            self.fault.name,
            self.load,
            str(len(self.runs)),
            str(sum(run.num_requests for run in self.runs)),
            self.fault.cost,
            str(sum(len(run.lost) for run in self.runs)),
            "" if self.load == START else str(sum(len(run.wrong) for run in self.runs)),
            f"{statistics.median(seconds):.1f}, {max(seconds):.1f}",
        )


HEAD = ("fault", "load", "runs", "requests", "expected loss", "lost", "wrong text", "seconds to recover: median, most")


def as_text(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    lines = [HEAD, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for a page."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
