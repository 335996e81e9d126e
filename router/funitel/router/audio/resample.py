"""Change the sample rate of a sound by a windowed sinc, a block at a time."""

import math
from functools import lru_cache

import numpy as np

ZEROS = 32  # zero crossings of the sinc on each side
ROLLOFF = 0.95  # of the band that both rates have: where the filter begins to fall
KAISER_BETA = 12.0
MANY_PHASES = 1024  # from which on each sample gathers its filter: a matrix of a whole period would be too large
GATHERED = 1 << 13  # samples that do so at once


class Resampler:
    """Takes blocks of samples [n] float32 at one rate, and gives those at another.

    Sample `i` of the result is at the time `i / to_rate`; the whole of it has `ceil(n * to_rate / from_rate)` samples.
    """

    def __init__(self, from_rate: int, to_rate: int) -> None:
        common = math.gcd(from_rate, to_rate)
        self._up, self._down = to_rate // common, from_rate // common
        self._is_same = from_rate == to_rate
        self._half = _half(self._up, self._down)
        self._held = np.zeros(self._half - 1, np.float32)  # before the first sample there is silence
        self._num_in = 0
        self._num_out = 0

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Take the next samples; returns those that are certain now."""
        self._num_in += len(samples)
        if self._is_same:
            return samples
        self._held = np.concatenate([self._held, samples])
        return self._take()

    def finish(self) -> np.ndarray:
        """The last samples."""
        if self._is_same:
            return np.zeros(0, np.float32)
        left = -(-self._num_in * self._up // self._down) - self._num_out
        num_outputs, num_inputs = self._period
        periods = -(-left // num_outputs)
        silence = periods * num_inputs + 2 * self._half - len(self._held)
        self._held = np.concatenate([self._held, np.zeros(max(silence, 0), np.float32)])
        return self._take()[:left]

    @property
    def _period(self) -> tuple[int, int]:
        """Samples that come out together, and how many go in for them."""
        times = 1 if self._up >= MANY_PHASES else max(1, 2 * self._half // self._down)
        return times * self._up, times * self._down

    def _take(self) -> np.ndarray:
        """The samples of all periods for which enough is held; lets go of what no later one needs."""
        num_outputs, num_inputs = self._period
        length = num_inputs + 2 * self._half
        count = (len(self._held) - 2 * self._half) // num_inputs
        if count <= 0:
            return np.zeros(0, np.float32)
        if self._up >= MANY_PHASES:
            found = self._gathered(count * num_outputs)
        else:
            frames = np.lib.stride_tricks.sliding_window_view(self._held, length)[::num_inputs][:count]
            found = (frames @ _matrix(self._up, self._down, num_outputs)).ravel()
        self._held = self._held[count * num_inputs :].copy()
        self._num_out += len(found)
        return found

    def _gathered(self, count: int) -> np.ndarray:
        """The next samples, each by its own filter; the first is at the beginning of a period."""
        windows = np.lib.stride_tricks.sliding_window_view(self._held, 2 * self._half)
        filters = _filters(self._up, self._down)
        numbers = np.arange(count) * self._down
        found = np.empty(count, np.float32)
        for begin in range(0, count, GATHERED):
            part = slice(begin, begin + GATHERED)
            places, phases = np.divmod(numbers[part], self._up)
            np.einsum("nk,nk->n", windows[places], filters[phases], out=found[part])
        return found


def _half(up: int, down: int) -> int:
    """Samples that a filter sees on each side."""
    return math.ceil(ZEROS * max(1.0, down / up))


@lru_cache(4)
def _filters(up: int, down: int) -> np.ndarray:
    """The filter of each phase [up, 2 * half]: that of a sample so far behind one that came in."""
    half = _half(up, down)
    offsets = np.arange(-half + 1, half + 1)[None] - (np.arange(up) / up)[:, None]
    cutoff = ROLLOFF / max(1.0, down / up)
    inside = np.clip(1 - (offsets / half) ** 2, 0, None)
    filters = cutoff * np.sinc(cutoff * offsets) * np.i0(KAISER_BETA * np.sqrt(inside)) / np.i0(KAISER_BETA)
    filters /= filters.sum(axis=1, keepdims=True)
    made: np.ndarray = filters.astype(np.float32)
    return made


@lru_cache(4)
def _matrix(up: int, down: int, num_outputs: int) -> np.ndarray:
    """What a period of samples is multiplied by: [its inputs and what filters see around them, its outputs]."""
    filters, width = _filters(up, down), 2 * _half(up, down)
    matrix = np.zeros((num_outputs * down // up + width, num_outputs), np.float32)
    for number in range(num_outputs):
        place, phase = divmod(number * down, up)
        matrix[place : place + width, number] = filters[phase]
    return matrix
