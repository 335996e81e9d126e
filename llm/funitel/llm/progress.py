"""Progress bar of one call, on stderr or in a notebook."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class CompletionProgress:
    """Counted on the engine's thread and shown by the waiting thread; a context manager that ends the bar."""

    def __init__(self, num_completions: int, *, is_shown: bool) -> None:
        self._num_finished = 0
        self._num_tokens = 0
        self._started = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            TaskProgressColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            auto_refresh=False,  # the waiting thread draws it
            redirect_stdout=False,  # other threads print
            redirect_stderr=False,
            disable=not is_shown,
        )
        self._task = self._bar.add_task("completions:", total=num_completions, rate="")
        self._shown = 0  # tokens

    def count(self, num_tokens: int, *, is_last: bool) -> None:
        """Count the tokens of one step for one completion."""
        self._num_tokens += num_tokens
        self._num_finished += is_last

    def show(self) -> None:
        """Update the bar."""
        if self._shown == self._num_tokens:
            return
        self._shown = self._num_tokens
        rate = self._num_tokens / max(time.monotonic() - self._started, 1e-6)
        self._bar.update(self._task, completed=self._num_finished, rate=f"{rate:.1f} tokens/s", refresh=True)

    def __enter__(self) -> "CompletionProgress":
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._bar.stop()
