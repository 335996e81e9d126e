"""Show the progress of long work on stderr: a bar on a terminal, one line per ten percent elsewhere.

Stdout stays free for results, so a caller may pipe it.
"""

import sys
from typing import TextIO

_BAR_WIDTH = 30


class Progress:
    """Count the bytes of one piece of work and show them; more than `total_bytes` show as all of them."""

    def __init__(self, label: str, total_bytes: int, stream: TextIO | None = None) -> None:
        self.done_bytes = 0
        self._label = label
        self._total_bytes = max(total_bytes, 1)
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._percent_shown = -1
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
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _show(self) -> None:
        percent = min(100 * self.done_bytes // self._total_bytes, 100)
        if self._is_terminal:
            if percent == self._percent_shown:
                return
            filled = "#" * (_BAR_WIDTH * percent // 100)
            self._stream.write(f"\r{self._label} [{filled:<{_BAR_WIDTH}}] {percent:3d}%")
        else:
            percent -= percent % 10
            if percent == self._percent_shown:
                return
            self._stream.write(f"{self._label}: {percent}% of {self._total_bytes / 1e6:.1f} MB\n")
        self._percent_shown = percent
        self._stream.flush()
