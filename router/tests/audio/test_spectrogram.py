"""Spectrograms are those of transformers' feature extractor."""

import numpy as np
import pytest
import transformers

from funitel.router.audio.segments import RATE
from funitel.router.audio.spectrogram import log_mel, mel_filters
from funitel_testing.tiny_whisper import sound

LONG = {"truncation": False, "padding": "longest"}


@pytest.mark.parametrize("num_mel_bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.001, 0.9, 7.3, 30.0, 30.001, 47.123, 123.4567])
def test_values_within_1e_4(num_mel_bins: int, seconds: float) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_mel_bins)
    samples = sound(seconds, seed=3)
    how = LONG if len(samples) > 30 * RATE else {}
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np", **how).input_features[0]
    found = log_mel(samples, num_mel_bins)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(mel_filters(num_mel_bins) - extractor.mel_filters).max() < 1e-12


@pytest.mark.parametrize("level", [0.0, 1e-6])
def test_silence(level: float) -> None:
    samples = np.full(RATE, level, np.float32)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    expected = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    assert np.abs(log_mel(samples, 80) - expected).max() < 1e-4
