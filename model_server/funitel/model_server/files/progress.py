"""Show the progress of long work on stderr: a bar on a terminal, one line per ten percent elsewhere.

Stdout stays free for results, so a caller may pipe it. A program that asks for it gets JSON lines on stdout instead.
"""

import json
import sys
import time
from typing import TYPE_CHECKING, TextIO

from funitel.proto.process.deferred_module import deferred

if TYPE_CHECKING:
    from rich import console as rich_console
    from rich import progress as rich_progress
else:
    rich_console, rich_progress = deferred("rich.console"), deferred("rich.progress")  # a shard has no terminal

_BAR_WIDTH = 30
_REPORT_SECONDS = 0.1  # at least, between two lines about the same work


class _Reports:
    """Whether progress goes to a program, as JSON lines on stdout."""

    are_wanted = False


def report_as_json() -> None:
    """Print progress for a program from now on: `{"progress": {"label": ..., "bytes": ..., "total_bytes": ...}}`."""
    _Reports.are_wanted = True


def reports_wanted() -> bool:
    """Whether `report_as_json` was called."""
    return _Reports.are_wanted


def report(label: str, done_bytes: int, total_bytes: int) -> None:
    """Print one line for a program."""
    content = {"label": label, "bytes": done_bytes, "total_bytes": total_bytes}
    print(json.dumps({"progress": content}), flush=True)


class Progress:
    """Count the bytes of one piece of work and show them; more than `total_bytes` show as all of them.

    With a `unit`, such as "tokens", what is counted are these instead of bytes.
    """

    def __init__(self, label: str, total_bytes: int, stream: TextIO | None = None, *, unit: str | None = None) -> None:
        self.done_bytes = 0
        self._label = label
        self._total_bytes = max(total_bytes, 1)
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._begun_bar() if self._stream.isatty() else None
        self._percent_shown = -1
        self._reported_at = 0.0
        self._show()

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to what is done."""
        self.update(self.done_bytes + num_bytes)

    def update(self, done_bytes: int) -> None:
        """Set what is done; it never goes back."""
        self.done_bytes = max(done_bytes, self.done_bytes)
        self._show()

    def finish(self) -> None:
        """Show one hundred percent, whatever was counted, and end the line."""
        self.update(self._total_bytes)
        if self._bar is not None:
            self._bar.stop()

    def _begun_bar(self) -> "rich_progress.Progress | None":
        """A bar on a terminal; None where that cannot move its cursor."""
        console = rich_console.Console(file=self._stream, force_terminal=True)
        if console.is_dumb_terminal:
            return None
        counted = rich_progress.DownloadColumn() if self._unit is None else rich_progress.MofNCompleteColumn()
        unit = [] if self._unit is None else [rich_progress.TextColumn(self._unit, markup=False)]
        # Stdout is not redirected: it has the result of the work, also where the bar was never finished.
        bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(_BAR_WIDTH),
            rich_progress.TaskProgressColumn(),
            counted,
            *unit,
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.add_task(self._label, total=self._total_bytes)
        bar.start()
        console.show_cursor(True)  # work that fails does not come back to the bar
        return bar

    def _show(self) -> None:
        done = min(self.done_bytes, self._total_bytes)
        if _Reports.are_wanted:
            now = time.monotonic()
            if now - self._reported_at >= _REPORT_SECONDS or done == self._total_bytes:
                self._reported_at = now
                report(self._label, done, self._total_bytes)
            return
        percent = 100 * done // self._total_bytes
        percent -= 0 if self._bar is not None else percent % 10
        if percent == self._percent_shown:
            return
        self._percent_shown = percent
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, refresh=True)
        else:
            total = f"{self._total_bytes / 1e6:.1f} MB" if self._unit is None else f"{self._total_bytes:,} {self._unit}"
            print(f"{self._label}: {percent}% of {total}", file=self._stream, flush=True)
