"""Report what the hub's library downloads to a program, as JSON lines."""

import os
import time
from typing import Any

from tqdm.auto import tqdm

from funitel.model_server.files.progress import report

_REPORT_SECONDS = 0.1


class HubProgress(tqdm):  # type: ignore[misc]  # it has no types
    """A progress bar that is not shown; the one that counts bytes is reported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what tqdm takes."""
        kwargs.pop("name", None)
        self._counts_bytes = kwargs.get("unit") == "B"
        self._reported_at = 0.0
        super().__init__(*args, **{**kwargs, "file": open(os.devnull, "w"), "disable": False})

    def update(self, n: float | None = 1) -> bool | None:
        """Count bytes, and report them."""
        result: bool | None = super().update(n)
        now = time.monotonic()
        if self._counts_bytes and self.total and (now - self._reported_at >= _REPORT_SECONDS or self.n >= self.total):
            self._reported_at = now
            report("downloading", int(self.n), int(self.total))
        return result
