"""Progress bar of one call, on stderr or in a notebook."""

import time

from tqdm.auto import tqdm


class _Bar(tqdm):  # type: ignore[misc]
    """A bar without tqdm's monitor thread; the waiting thread refreshes it."""

    monitor_interval = 0


class CompletionProgress:
    """Counted on the engine's thread and shown by the waiting thread; a context manager that closes the bar."""

    def __init__(self, num_completions: int, *, is_shown: bool) -> None:
        self._num_finished = 0
        self._num_tokens = 0
        self._started = time.monotonic()
        self._bar = _Bar(total=num_completions, desc="completions", disable=not is_shown, dynamic_ncols=True)
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
        self._bar.n = self._num_finished
        tokens_per_second = self._num_tokens / max(time.monotonic() - self._started, 1e-6)
        self._bar.set_postfix_str(f"{tokens_per_second:.1f} tokens/s")

    def __enter__(self) -> "CompletionProgress":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._bar.close()
