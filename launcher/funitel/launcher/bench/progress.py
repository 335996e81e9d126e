"""Show the progress of a benchmark on stderr: a bar on a terminal, else a line for each level."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from funitel.launcher.bench.figures import Timeline
from funitel.launcher.terminal_ui.terminal import console_of, one_line

BAR_COLUMNS = 24
MIN_SECONDS = 0.1  # between two updates of the bar: drawing takes CPU time


class BenchProgress:
    """One bar for all levels of all rounds; its text names the current level and its throughput."""

    def __init__(self, num_requests: int, stream: TextIO | None = None) -> None:
        self._console = console_of(stream or sys.stderr)
        columns = (BarColumn(BAR_COLUMNS), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
        self._bar = Progress(
            *columns,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=num_requests)
        self._label = ""
        self._began = self._drawn = time.monotonic()
        self._num_tokens = self._num_failed = 0

    def begin(self, label: str) -> None:
        """Start another level."""
        self._label = one_line(label)
        self._began = time.monotonic()
        self._num_tokens = self._num_failed = 0
        if self._console.is_terminal:
            self._bar.start()
            self._draw()
        else:
            self._console.print(f"{self._bar.tasks[self._task].percentage:3.0f}% {self._label}", soft_wrap=True)

    def report(self, timeline: Timeline) -> None:
        """Count one answer."""
        self._bar.advance(self._task)
        self._num_tokens += timeline.num_tokens
        self._num_failed += timeline.failure is not None
        if self._console.is_terminal and time.monotonic() - self._drawn >= MIN_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        seconds = self._drawn - self._began
        rate = f", {self._num_tokens / seconds:.0f} tokens/s" if self._num_tokens and seconds > 0 else ""
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        self._bar.update(self._task, description=f"{self._label}{rate}{failed}", refresh=True)

    def clear(self) -> None:
        """Clear the line."""
        if self._console.is_terminal:
            self._bar.stop()


@contextmanager
def progress(num_requests: int) -> Iterator[BenchProgress]:
    """A bar for the length of a `with`."""
    bar = BenchProgress(num_requests)
    try:
        yield bar
    finally:
        bar.clear()
