"""The log-mel spectrogram of the Universal Speech Model, as Gemma 4's feature extractor makes it.

Magnitudes, not powers, of half-overlapping frames of 20 ms. Sources: arXiv 2303.01037 and
`feature_extraction_gemma4.py` of transformers 5.23; the scale of pitches is that of HTK.
"""

from functools import cache

import numpy as np

from funitel.router.audio.segments import FLOOR, FRAME, HOP, RATE

TRANSFORM = 512  # samples of a transform: a frame, and zeros
_FRAMES_AT_ONCE = 4096


def log_magnitudes(samples: np.ndarray, num_mel_bins: int) -> np.ndarray:
    """The spectrogram [mel bins, frames] float32 of samples [n] at 16 kHz.

    The middle of frame i is at sample i * HOP. There are so many frames as are heard whole with the sample behind each.
    """
    padded = np.pad(samples.astype(np.float32), (FRAME // 2, 0))
    count = max(0, (len(padded) - FRAME - 1) // HOP + 1)
    found = np.empty((num_mel_bins, count), np.float32)
    if not count:
        return found
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:count]
    window, filters = _hann(), _filters(num_mel_bins)
    for begin in range(0, count, _FRAMES_AT_ONCE):
        part = frames[begin : begin + _FRAMES_AT_ONCE]
        magnitudes = np.abs(np.fft.rfft(part * window, TRANSFORM))
        found[:, begin : begin + len(part)] = np.log(magnitudes @ filters + FLOOR).T
    return found


@cache
def _hann() -> np.ndarray:
    """Of a period of `FRAME` samples."""
    window: np.ndarray = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
    return window.astype(np.float32)


@cache
def _filters(num_mel_bins: int) -> np.ndarray:
    """Triangles of height 1 over the frequencies of a transform: [1 + TRANSFORM / 2, mel bins]."""
    mels = np.linspace(0.0, 2595.0 * np.log10(1.0 + RATE / 2 / 700.0), num_mel_bins + 2)
    edges = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    distances = edges[None] - np.linspace(0.0, RATE // 2, 1 + TRANSFORM // 2)[:, None]
    widths = np.diff(edges)
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    filters: np.ndarray = np.maximum(0.0, np.minimum(rising, falling))
    return filters
