"""The log-mel spectrogram that Whisper reads, as its feature extractor makes it.

Source: Whisper, arXiv 2212.04356, 2.2; the scale of pitches is that of Slaney's Auditory Toolbox.
"""

from functools import cache

import numpy as np

from funitel.router.audio.segments import HOP, RATE, WINDOW, WINDOW_SECONDS

_FRAMES_AT_ONCE = 4096
_FLOOR = 1e-10


def log_mel(samples: np.ndarray, num_mel_bins: int) -> np.ndarray:
    """The spectrogram [mel bins, frames] float32 of samples [n] at 16 kHz.

    A sound of up to 30 s is followed by silence up to there, as in training; a longer one has as many frames as it has
    whole hops.
    """
    num_heard = len(samples) // HOP + WINDOW // HOP  # frames; those behind see silence alone
    if len(samples) < WINDOW_SECONDS * RATE:
        samples = np.pad(samples, (0, WINDOW_SECONDS * RATE - len(samples)))
    padded = np.pad(samples, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][: len(samples) // HOP]
    window, filters = _hann(), mel_filters(num_mel_bins)
    found = np.full((num_mel_bins, len(frames)), np.log10(_FLOOR), np.float32)
    frames = frames[:num_heard]
    for begin in range(0, len(frames), _FRAMES_AT_ONCE):
        part = slice(begin, begin + _FRAMES_AT_ONCE)
        power = np.abs(np.fft.rfft(frames[part] * window)) ** 2  # in float64, as the window is
        found[:, begin : begin + len(power)] = np.log10(np.maximum(power @ filters, _FLOOR)).T
    np.maximum(found, found.max() - 8.0, out=found)
    found += 4.0
    found /= 4.0
    return found


@cache
def _hann() -> np.ndarray:
    """Of a period of `WINDOW` samples."""
    window: np.ndarray = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    return window


@cache
def mel_filters(num_mel_bins: int) -> np.ndarray:
    """Triangles over the frequencies of a transform, [1 + WINDOW / 2, mel bins], each with the area of its band."""
    highest = _to_mel(np.array(RATE / 2.0))
    edges = _to_hertz(np.linspace(0.0, highest, num_mel_bins + 2))
    frequencies = np.linspace(0.0, RATE / 2.0, 1 + WINDOW // 2)
    widths = np.diff(edges)
    distances = edges[None] - frequencies[:, None]
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    filters: np.ndarray = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))
    return filters


# Linear up to 1000 Hz, which is 15 mels, then 27 steps for a factor of 6.4.
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
_STEP = np.log(6.4) / 27.0


def _to_mel(hertz: np.ndarray) -> np.ndarray:
    above = _LINEAR_MELS + np.log(np.maximum(hertz, _LINEAR_HERTZ) / _LINEAR_HERTZ) / _STEP
    return np.where(hertz < _LINEAR_HERTZ, hertz * _LINEAR_MELS / _LINEAR_HERTZ, above)


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    above = _LINEAR_HERTZ * np.exp(_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * _LINEAR_HERTZ / _LINEAR_MELS, above)
