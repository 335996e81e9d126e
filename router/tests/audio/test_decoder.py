"""Audio files are decoded whatever their container, encoding, rate and channels; bad ones are refused in one line."""

import io
from typing import Any

import numpy as np
import pytest
import soundfile

from funitel.proto.errors import InvalidRequest
from funitel.router.audio.decoder import decode
from funitel.router.audio.segments import RATE

SECONDS = 1.5


def tone(rate: int, seconds: float = SECONDS, hertz: float = 440.0) -> np.ndarray:
    """A sine of half the full scale: [rate * seconds] float32."""
    found: np.ndarray = (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)
    return found


def file_of(samples: np.ndarray, rate: int = RATE, container: str = "WAV", encoding: str | None = None) -> bytes:
    """A file of samples."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=container, subtype=encoding)
    return buffer.getvalue()


def error_of(content: bytes, max_seconds: float = 30.0) -> str:
    """Why a file is refused."""
    with pytest.raises(InvalidRequest) as refused:
        decode(content, max_seconds, "file")
    assert refused.value.param == "file"
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("container", "encoding", "tolerance"),
    [
        *[("WAV", encoding, 2e-2) for encoding in ("PCM_U8", "ULAW", "ALAW")],
        *[("WAV", encoding, 5e-2) for encoding in ("IMA_ADPCM", "MS_ADPCM", "GSM610")],
        *[("WAV", encoding, 1e-4) for encoding in ("PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")],
        *[("FLAC", encoding, 1e-2) for encoding in ("PCM_S8", "PCM_16", "PCM_24")],
        *[("RF64", "PCM_16", 1e-4), ("WAVEX", "PCM_16", 1e-4)],
        *[("OGG", "VORBIS", 5e-2), ("OGG", "OPUS", 5e-2), ("MP3", "MPEG_LAYER_III", 5e-2)],
    ],
)
def test_every_usual_encoding(container: str, encoding: str, tolerance: float) -> None:
    found = decode(file_of(tone(RATE), RATE, container, encoding), 30.0, "file")
    assert found.dtype == np.float32
    expected = tone(RATE)
    assert abs(len(found) - len(expected)) < 2400  # some encodings pad
    middle = slice(4000, 20000)
    spectrum = np.abs(np.fft.rfft(found[middle]))
    assert np.argmax(spectrum) == np.argmax(np.abs(np.fft.rfft(expected[middle])))
    if container not in ("MP3", "OGG"):  # these may be a few samples late
        assert np.abs(found[middle] - expected[middle]).max() < tolerance
    assert np.abs(found[middle]).max() == pytest.approx(0.5, abs=tolerance + 0.01)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 12345])
def test_other_rates_become_that_of_the_model(rate: int) -> None:
    found = decode(file_of(tone(rate), rate, "WAV", "FLOAT"), 30.0, "file")
    expected = tone(RATE)
    assert len(found) == -(-int(rate * SECONDS) * RATE // rate)
    assert np.abs(found[400:-400] - expected[400 : len(found) - 400]).max() < 1e-5


def test_what_the_new_rate_cannot_hold_is_left_out() -> None:
    found = decode(file_of(tone(48000, hertz=11_000.0), 48000, "WAV", "FLOAT"), 30.0, "file")
    assert np.abs(found[400:-400]).max() < 1e-4


def test_channels_become_their_mean() -> None:
    both = np.stack([tone(RATE), -tone(RATE) / 2], axis=1)
    found = decode(file_of(both, RATE, "WAV", "FLOAT"), 30.0, "file")
    assert np.abs(found - tone(RATE) / 4).max() < 1e-6


def test_what_is_no_number_or_out_of_range_does_no_harm() -> None:
    samples = tone(RATE)
    samples[10:13] = (np.nan, np.inf, -np.inf)
    samples[20] = 1e30
    found = decode(file_of(samples, RATE, "WAV", "FLOAT"), 30.0, "file")
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a file in one of the formats WAV, FLAC, OGG (Vorbis or Opus) and MP3. Given: none of these"),
        (b"hello", "Given: none of these"),
        (b"\0\0\0\x20ftypM4A \0\0\0\0", "Given: MP4 (m4a)"),
        (b"\x1a\x45\xdf\xa3webm", "Given: Matroska (webm)"),
        (b"RIFF\x24\0\0\0WAVE", "`file` cannot be decoded as WAV"),
        (b"fLaC" + bytes(64), "`file` cannot be decoded as FLAC"),
        (b"OggS" + bytes(64), "`file` cannot be decoded as OGG"),
        (b"\xff\xfb\x90\x00" + bytes(64), "`file` cannot be decoded"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str) -> None:
    assert message in error_of(content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": np.zeros(0, np.float32)}, "`file` has no samples"),
        ({"samples": tone(RATE, 31.0)}, "`file` must be at most 30 s long (--max-audio-seconds)"),
        ({"samples": np.zeros((100, 33), np.float32)}, "`file` must have at most 32 channels. Given: 33"),
        ({"samples": tone(3000), "rate": 3000}, "`file` must have 4000 to 192000 samples a second. Given: 3000"),
    ],
)
def test_limits(options: dict[str, Any], message: str) -> None:
    assert error_of(file_of(**options)) == message


def test_a_header_that_promises_more_than_there_is_is_not_believed() -> None:
    content = bytearray(file_of(tone(RATE)))
    content[40:44] = (0x7FFFFFF0).to_bytes(4, "little")  # bytes of samples
    assert len(decode(bytes(content), 30.0, "file")) == len(tone(RATE))
