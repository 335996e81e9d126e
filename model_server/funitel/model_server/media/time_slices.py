"""Share the cores of a CPU between steps and an encoder: at most one of both computes at a time.

Steps come first. Behind a step the encoder has a slice of time, a share of what steps usually take, in which a step
that comes waits. So the gaps between steps grow by that share, and by one part of the encoder's work at most; and the
encoder never starves. A step that takes longer than others, as of a long prompt, has no longer slice behind it: the
next token of each stream is late already. While no step comes the encoder computes without a break.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median_low
from threading import Condition

SLICE_SHARE = 0.75
"""Of the median duration of the last steps: what the encoder has behind a step. The 99th percentile of gaps stays under
twice that of steps alone, with a margin: this varies more than the median."""
MIN_SLICE_SECONDS = 0.002
NUM_RECENT = 15


class TimeSlices:
    """The turns of one compute thread, which makes steps, and one encoder thread.

    Args:
        clock: the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = Condition()
        self._is_stepping = False
        self._is_wanted = False  # by a step, while the encoder computes
        self._is_encoding = False
        self._slice_end = 0.0  # no step begins before it while the encoder has work
        self._part_begin = 0.0
        self._num_encoding = 0  # encodings that are begun and not ended
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)  # seconds of the last steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step inside; it begins once the encoder pauses at the end of its slice."""
        with self._changed:
            self._is_wanted = True
            while self._is_encoding:
                self._changed.wait()
            self._is_wanted, self._is_stepping = False, True
        begin = self._clock()
        try:
            yield
        finally:
            with self._changed:
                end = self._clock()
                self._is_stepping = False
                self._recent.append(end - begin)
                if self._num_encoding:  # its thread takes the turn now, whichever wakes first
                    self._slice_end = end + max(MIN_SLICE_SECONDS, SLICE_SHARE * median_low(self._recent))
                    self._part_begin, self._is_encoding = end, True
                    self._changed.notify_all()

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Encode inside, calling `pause` between small parts."""
        with self._changed:
            self._num_encoding += 1
            self._take_turn()
        try:
            yield
        finally:
            with self._changed:
                self._num_encoding -= 1
                self._is_encoding = False
                self._changed.notify_all()

    def pause(self) -> None:
        """Let a step begin that waits, once the slice is used up; returns when the encoder may go on."""
        if not self._is_wanted:
            self._part_begin = self._clock()
            return
        with self._changed:
            now = self._clock()
            part, self._part_begin = now - self._part_begin, now
            if not self._is_wanted or now + part < self._slice_end:
                return
            self._is_encoding = False
            self._changed.notify_all()
            self._take_turn()

    def _take_turn(self) -> None:
        """Wait for the end of a step that waits or runs; the lock is held."""
        while (self._is_stepping or self._is_wanted) and not self._is_encoding:
            self._changed.wait()
        self._is_encoding = True
        self._part_begin = self._clock()
