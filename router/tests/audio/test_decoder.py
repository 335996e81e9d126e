"""Audio files are decoded whatever their container, encoding, rate and channels; bad ones are refused in one line."""

import io
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from funitel.proto.errors import InvalidRequest
from funitel.router.audio import container as container_module
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


def av_file(
    samples: np.ndarray | None,
    rate: int,
    container: str,
    encoding: str,
    channels: int,
    *,
    has_pictures: bool = False,
) -> bytes:
    """A file with the same samples in every channel, and a few black pictures."""
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo"}[channels]
    with av.open(buffer, "w", format=container) as file:
        sound = None if samples is None else file.add_stream(encoding, rate=rate, layout=layout)
        film = file.add_stream("mpeg4", rate=5, width=32, height=32, pix_fmt="yuv420p") if has_pictures else None
        for _ in range(5 if film is not None else 0):
            assert film is not None
            file.mux(film.encode(av.VideoFrame(32, 32, "yuv420p")))
        if film is not None:
            file.mux(film.encode(None))
        if sound is not None and samples is not None:
            frame = av.AudioFrame.from_ndarray(np.stack([samples] * channels), format="fltp", layout=layout)
            frame.rate = rate
            file.mux(sound.encode(frame))
            file.mux(sound.encode(None))
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


@pytest.mark.parametrize(
    ("container", "encoding", "rate", "channels"),
    [
        *[("mp4", "aac", 44_100, 1), ("ipod", "aac", 48_000, 2), ("mp4", "aac", 22_050, 1), ("mp4", "alac", 16_000, 2)],
        *[("webm", "libopus", 48_000, 1), ("webm", "libopus", 48_000, 2)],
    ],
)
def test_files_of_phones_and_browsers(container: str, encoding: str, rate: int, channels: int) -> None:
    found = decode(av_file(tone(rate), rate, container, encoding, channels), 30.0, "file")
    expected = tone(RATE)
    assert abs(len(found) - len(expected)) < 2400  # some encodings pad
    spectrum = np.abs(np.fft.rfft(found[4000:20000]))
    assert np.argmax(spectrum) == np.argmax(np.abs(np.fft.rfft(expected[4000:20000])))
    assert np.sqrt((found[4000:20000] ** 2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_a_film_is_its_sound() -> None:
    assert len(decode(av_file(tone(RATE), RATE, "mp4", "aac", 1, has_pictures=True), 30.0, "file")) > RATE


def test_a_film_without_sound_is_refused() -> None:
    assert error_of(av_file(None, RATE, "mp4", "aac", 1, has_pictures=True)) == "`file` has no sound"


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_limits_of_files_of_phones_and_browsers(container: str) -> None:
    encoding = {"mp4": "aac", "webm": "libopus"}[container]
    long = av_file(tone(48_000, 6.0), 48_000, container, encoding, 1)
    assert error_of(long, 5.0) == "`file` must be at most 5 s long (--max-audio-seconds)"
    cut = av_file(tone(48_000), 48_000, "mp4", "aac", 1)
    assert "`file` cannot be decoded as MP4" in error_of(cut[: len(cut) // 2])


def test_without_the_package_its_files_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_module, "HAS_AV", False)
    assert "Given: MP4, which needs the package `av`" in error_of(b"\0\0\0\x20ftypM4A \0\0\0\0")
    assert "Given: Matroska, which needs the package `av`" in error_of(b"\x1a\x45\xdf\xa3webm")


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
        (
            b"",
            "must be a file in one of the formats WAV, FLAC, OGG (Vorbis or Opus), MP3, MP4 (m4a) and Matroska (webm)."
            " Given: none of these",
        ),
        (b"hello", "Given: none of these"),
        (b"FORM\0\0\0\0AIFF", "Given: AIFF"),
        (b"\0\0\0\x20ftypM4A \0\0\0\0", "`file` cannot be decoded as MP4: Invalid data found"),
        (b"\x1a\x45\xdf\xa3webm", "`file` cannot be decoded as Matroska: "),
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
