"""Remove unfinished files when a program that asked for a model does not want it any more, and says so by SIGUSR1."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

EXIT_CODE = 128 + signal.SIGUSR1

_unfinished: list[Callable[[], Iterable[Path]]] = []


@contextmanager
def discarding(unfinished: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """Have SIGUSR1 remove the files that `unfinished` gives at that moment, while the block runs.

    For work in threads of a library, which no exception would end.
    """
    _unfinished.append(unfinished)
    try:
        yield
    finally:
        _unfinished.remove(unfinished)


def discard_on_signal() -> None:
    """Handle SIGUSR1 from now on: remove unfinished files, and end the process."""
    signal.signal(signal.SIGUSR1, _discard)


def _discard(number: int, frame: FrameType | None) -> None:
    if not _unfinished:
        sys.exit(EXIT_CODE)  # an exception, which cleans up
    for files in _unfinished:
        for path in files():
            with suppress(OSError):
                path.unlink()
    os._exit(EXIT_CODE)
