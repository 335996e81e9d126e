"""Render the page of `funitel top`: the state of a server as rich's text and tables. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from funitel.launcher.terminal_ui.terminal import one_line
from funitel.proto.errors import FunitelError

State = Mapping[str, Any]

BAR_CHARACTERS = 30
SHORT_ID = 12  # characters of a request's id


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a table: head and content; numbers are aligned to the right."""

    head: str
    text: Callable[[State], str]
    is_number: bool = True


def page(state: State, url: str, note: str = "") -> RenderableType:
    """The page of one state; `note` follows the URL.

    Raises:
        FunitelError: it is not the state of a funitel server.
    """
    try:
        return Group(*_parts(state, url, note))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FunitelError(f"{url} gives an answer that funitel top cannot read") from error


def line(text: str) -> Text:
    """One line of the page, cut at the edge of the window; texts of the server control nothing."""
    return Text(one_line(text), no_wrap=True, overflow="ellipsis")


def _parts(state: State, url: str, note: str) -> Iterator[RenderableType]:
    yield line(f"{url} funitel {state['version']} {note}")
    if not state["models"]:
        yield line("")
        yield line("no model is loaded")
    for model in state["models"]:
        yield line("")
        yield from _model(model)


def _model(model: State) -> Iterator[RenderableType]:
    now = model["now"]
    yield line(
        f"{model['name']}: {_count(now['requests'], 'request')}, {now['generated_tokens']:,} tokens, "
        f"running {now['running']}, waiting {now['waiting']}"
    )
    if not model["replicas"]:
        yield line("no replica serves")
    for replica in model["scheduler"]:
        yield line("")
        yield from _replica(replica)


def _replica(replica: State) -> Iterator[RenderableType]:
    yield line(
        f"replica {replica['index']}: {_count(replica['ranks'], 'rank')}, "
        f"{replica['tokens_per_second']:,.0f} tokens/s, running {replica['num_running']}, "
        f"waiting {replica['num_waiting']} ({replica['num_queued_tokens']:,} prompt tokens)"
    )
    yield _pool(replica["pool"])
    yield line(_steps(replica["steps"]))
    if replica["running"]:
        yield from _table(_RUNNING, replica["running"], replica["num_running"])
    if replica["waiting"]:
        yield from _table(_WAITING, replica["waiting"], replica["num_waiting"])


def _pool(pool: State) -> RenderableType:
    share = pool["used"] / pool["blocks"] if pool["blocks"] else 0.0
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        "pool",
        ProgressBar(1.0, share, width=BAR_CHARACTERS),
        line(
            f"{share:.0%}: {pool['used']:,} of {pool['blocks']:,} blocks of {pool['block_size']} tokens used, "
            f"{pool['cached']:,} cached, {pool['preempted']:,} preempted"
        ),
    )
    return grid


def _steps(steps: Sequence[State]) -> str:
    if not steps:
        return "steps: none yet"
    last = steps[-1]
    kinds = {kind: sum(step["kind"] == kind for step in steps) for kind in ("prefill", "mixed", "decode")}
    mean = sum(step["seconds"] for step in steps) / len(steps)
    summary = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    predicted = f" (predicted {_time(last['predicted_seconds'])})" if last["predicted_seconds"] else ""
    return (
        f"steps: last {last['kind']} of {_count(last['rows'], 'row')}, {_count(last['tokens'], 'token')}, "
        f"{_time(last['seconds'])}{predicted}, {_time(last['ago_seconds'])} ago; "
        f"last {len(steps)}: {summary}, {_time(mean)} each"
    )


def _table(columns: Sequence[_Column], rows: Sequence[State], count: int) -> Iterator[RenderableType]:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for column in columns:
        table.add_column(column.head, justify="right" if column.is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(line(column.text(row)) for column in columns))
    yield line("")
    yield table
    if count > len(rows):
        yield line(f"... and {count - len(rows):,} more")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    """A duration in a suitable unit."""
    if seconds < 1.0:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60.0 else f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


_NAMES = (
    _Column("REQUEST", lambda row: (row["request_id"] or str(row["id"]))[:SHORT_ID], is_number=False),
    _Column("KEY", lambda row: row["key"] or "-", is_number=False),
)
_RUNNING = (
    _Column("RUNNING", lambda row: str(row["id"])),
    *_NAMES,
    _Column("PROMPT", lambda row: str(row["prompt_tokens"])),
    _Column("CACHED", lambda row: str(row["cached_tokens"])),
    _Column("TOKENS", lambda row: f"{row['tokens']}/{row['max_new_tokens']}"),
    _Column("BLOCKS", lambda row: str(row["blocks"])),
    _Column("AGE", lambda row: _time(row["age_seconds"])),
    _Column("GAP", lambda row: _time(row["gap_seconds"])),
)
_WAITING = (
    _Column("WAITING", lambda row: str(row["position"])),
    *_NAMES,
    _Column("PROMPT", lambda row: str(row["prompt_tokens"])),
    _Column("TOKENS", lambda row: str(row["tokens"])),
    _Column("PRIO", lambda row: str(row["priority"])),
    _Column("AGE", lambda row: _time(row["age_seconds"])),
    _Column("ENTERS IN", lambda row: _time(row["estimated_wait_seconds"])),
)
