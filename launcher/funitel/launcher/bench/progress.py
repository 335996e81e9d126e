"""Show the progress of a benchmark on stderr: a bar on a terminal, else a line for each level."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from funitel.launcher.bench.figures import Timeline
from funitel.launcher.terminal_ui.terminal import CLEAR_LINE

BAR_COLUMNS = 24
MIN_SECONDS = 0.1  # between two updates of the bar: drawing takes CPU time


class BenchProgress:
    """One bar for all levels of all rounds; its text names the current level and its throughput."""

    def __init__(self, num_requests: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._total = num_requests
        self._done = 0
        self._label = ""
        self._began = self._drawn = time.monotonic()
        self._num_tokens = self._num_failed = 0

    def begin(self, label: str) -> None:
        """Start another level."""
        self._label = label
        self._began = time.monotonic()
        self._num_tokens = self._num_failed = 0
        if self._is_terminal:
            self._draw()
        else:
            print(f"{self._share:4.0%} {label}", file=self._stream, flush=True)

    def report(self, timeline: Timeline) -> None:
        """Count one answer."""
        self._done += 1
        self._num_tokens += timeline.num_tokens
        self._num_failed += timeline.failure is not None
        if self._is_terminal and time.monotonic() - self._drawn >= MIN_SECONDS:
            self._draw()

    @property
    def _share(self) -> float:
        return min(self._done / self._total, 1.0)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        seconds = self._drawn - self._began
        rate = f", {self._num_tokens / seconds:.0f} tokens/s" if self._num_tokens and seconds > 0 else ""
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        bar = ("=" * round(self._share * BAR_COLUMNS)).ljust(BAR_COLUMNS)
        text = f"[{bar}] {self._done}/{self._total} {self._label}{rate}{failed}"
        width = shutil.get_terminal_size().columns - 1
        print(CLEAR_LINE + text[:width], end="", file=self._stream, flush=True)

    def clear(self) -> None:
        """Clear the line."""
        if self._is_terminal:
            print(CLEAR_LINE, end="", file=self._stream, flush=True)


@contextmanager
def progress(num_requests: int) -> Iterator[BenchProgress]:
    """A bar for the length of a `with`."""
    bar = BenchProgress(num_requests)
    try:
        yield bar
    finally:
        bar.clear()
