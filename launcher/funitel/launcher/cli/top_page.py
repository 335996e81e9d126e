"""Render the page of `funitel top`: the state of a server as lines of text, cut to the window. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funitel.proto.errors import FunitelError

State = Mapping[str, Any]

BAR_CHARACTERS = 30
SHORT_ID = 12  # characters of a request's id


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a table: head, width and content; numbers are aligned to the right."""

    head: str
    width: int
    text: Callable[[State], str]
    is_number: bool = True

    def show(self, text: str) -> str:
        cut = text[: self.width]
        return cut.rjust(self.width) if self.is_number else cut.ljust(self.width)


def page(state: State, url: str, note: str = "") -> list[str]:
    """The lines of one state; `note` follows the URL.

    Raises:
        FunitelError: it is not the state of a funitel server.
    """
    try:
        return list(_lines(state, url, note))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FunitelError(f"{url} gives an answer that funitel top cannot read") from error


def fit(lines: Sequence[str], width: int, height: int) -> list[str]:
    """The lines that fit into a window, without control characters."""
    return [_plain(line)[:width] for line in lines[:height]]


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _lines(state: State, url: str, note: str) -> Iterator[str]:
    yield f"{url}  {state['model_id']}  funitel {state['version']}{f'  {note}' if note else ''}"
    if not state["replicas"]:
        yield ""
        yield "no replica serves"
    for replica in state["replicas"]:
        yield ""
        yield from _replica(replica)


def _replica(replica: State) -> Iterator[str]:
    pool, steps = replica["pool"], replica["steps"]
    yield (
        f"replica {replica['index']}  {_count(replica['ranks'], 'rank')}  {replica['tokens_per_second']:,.0f} tokens/s"
        f"  running {replica['num_running']}  waiting {replica['num_waiting']}"
        f" ({replica['num_queued_tokens']:,} prompt tokens)"
    )
    share = pool["used"] / pool["blocks"] if pool["blocks"] else 0.0
    full = round(share * BAR_CHARACTERS)
    yield (
        f"pool   [{'#' * full}{'.' * (BAR_CHARACTERS - full)}] {share:4.0%}  {pool['used']:,} of {pool['blocks']:,} "
        f"blocks of {pool['block_size']} tokens used, {pool['cached']:,} cached, {pool['preempted']:,} preempted"
    )
    yield _steps(steps)
    if replica["running"]:
        yield from _table(_RUNNING, replica["running"], replica["num_running"])
    if replica["waiting"]:
        yield from _table(_WAITING, replica["waiting"], replica["num_waiting"])


def _steps(steps: Sequence[State]) -> str:
    if not steps:
        return "steps  none yet"
    last = steps[-1]
    kinds = {kind: sum(step["kind"] == kind for step in steps) for kind in ("prefill", "mixed", "decode")}
    mean = sum(step["seconds"] for step in steps) / len(steps)
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    predicted = f" (predicted {_time(last['predicted_seconds'])})" if last["predicted_seconds"] else ""
    return (
        f"steps  last: {last['kind']} of {_count(last['rows'], 'row')}, {_count(last['tokens'], 'token')}, "
        f"{_time(last['seconds'])}{predicted}, {_time(last['ago_seconds'])} ago;  "
        f"last {len(steps)}: {summary}, {_time(mean)} each"
    )


def _table(columns: Sequence[_Column], rows: Sequence[State], count: int) -> Iterator[str]:
    yield ""
    yield "  ".join(column.show(column.head) for column in columns)
    for row in rows:
        yield "  ".join(column.show(column.text(row)) for column in columns)
    if count > len(rows):
        yield f"... and {count - len(rows):,} more"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    """A duration in a suitable unit."""
    if seconds < 1.0:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60.0 else f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


_NAMES = (
    _Column("REQUEST", SHORT_ID, lambda row: row["request_id"] or str(row["id"]), is_number=False),
    _Column("KEY", 10, lambda row: row["key"] or "-", is_number=False),
)
_RUNNING = (
    _Column("RUNNING", 7, lambda row: str(row["id"])),
    *_NAMES,
    _Column("PROMPT", 7, lambda row: str(row["prompt_tokens"])),
    _Column("CACHED", 7, lambda row: str(row["cached_tokens"])),
    _Column("TOKENS", 11, lambda row: f"{row['tokens']}/{row['max_new_tokens']}"),
    _Column("BLOCKS", 6, lambda row: str(row["blocks"])),
    _Column("AGE", 8, lambda row: _time(row["age_seconds"])),
    _Column("GAP", 8, lambda row: _time(row["gap_seconds"])),
)
_WAITING = (
    _Column("WAITING", 7, lambda row: str(row["position"])),
    *_NAMES,
    _Column("PROMPT", 7, lambda row: str(row["prompt_tokens"])),
    _Column("TOKENS", 7, lambda row: str(row["tokens"])),
    _Column("PRIO", 4, lambda row: str(row["priority"])),
    _Column("AGE", 8, lambda row: _time(row["age_seconds"])),
    _Column("ENTERS IN", 9, lambda row: _time(row["estimated_wait_seconds"])),
)
