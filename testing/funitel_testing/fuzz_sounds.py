"""Damaged and hostile audio files: decoded, or refused by one clear line, in bounded time; the service goes on.

Kind: `sounds`. A worker of `fuzz`.
"""

import io
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import av
import numpy as np
import soundfile

from funitel.proto.errors import MAX_CHARACTERS, InvalidRequest
from funitel.router.audio.service import AudioService
from funitel.router.audio.speech_model import SpeechModel
from funitel.router.settings import RouterSettings
from funitel_testing import fuzz_inputs
from funitel_testing.fuzz_inputs import Try

FIELD = "file"
MAX_SOUND_SECONDS = 5.0
MAX_SECONDS = 15.0  # for an input: starting a process beside others, and decoding
SOUND_EVERY = 25  # inputs, after which a sound file must be decoded as before
EXTREMES = (b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x01\x00\x00\x00")
HEADS = (
    b"RIFF\xff\xff\xff\x7fWAVEfmt \x10\x00\x00\x00\x01\x00",
    b"RF64\xff\xff\xff\xffWAVEds64",
    b"fLaC\x00\x00\x00\x22",
    b"OggS\x00\x02",
    b"ID3\x04\x00\x00\x7f\x7f\x7f\x7f",
    b"\xff\xfb\x90\x00",
    b"\x00\x00\x00\x18ftypM4A \x00\x00\x00\x00",
    b"\x1a\x45\xdf\xa3\xa3B\x86\x81\x01",
    b"",
)
MODEL = SpeechModel(
    num_mel_bins=80,
    num_features=1500,
    max_tokens=448,
    end=1,
    start=2,
    no_timestamps=3,
    previous=None,
    no_speech=2,
    languages={},
    tasks={},
)


def corpus() -> list[bytes]:
    """Sound files of all containers and encodings."""
    noise = np.random.default_rng(0)
    kinds = {
        "WAV": "PCM_U8 PCM_16 PCM_24 PCM_32 FLOAT DOUBLE ULAW ALAW IMA_ADPCM MS_ADPCM GSM610 G721_32".split(),
        "WAVEX": ["PCM_16"],
        "RF64": ["PCM_16", "FLOAT"],
        "FLAC": ["PCM_S8", "PCM_16", "PCM_24"],
        "OGG": ["VORBIS", "OPUS"],
        "MP3": ["MPEG_LAYER_III"],
    }
    files = []
    for container, encodings in kinds.items():
        for encoding in encodings:
            for rate, channels in ((16_000, 1), (48_000, 2), (8_000, 1)):
                if channels > 1 and encoding in ("GSM610", "G721_32"):
                    continue
                file, samples = io.BytesIO(), noise.normal(0, 0.1, (rate // 8, channels)).clip(-1, 1)
                soundfile.write(file, samples, rate, format=container, subtype=encoding)
                files.append(file.getvalue())
    return files + [av_file(*kind) for kind in (("mp4", "aac"), ("mp4", "alac"), ("webm", "libopus"))]


def av_file(container: str, encoding: str) -> bytes:
    """A file of an eighth of a second, as phones and browsers make them."""
    rate, file = 48_000, io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, (1, rate // 8)).astype(np.float32)
    with av.open(file, "w", format=container) as output:
        sound = output.add_stream(encoding, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.rate = rate
        output.mux([*sound.encode(frame), *sound.encode(None)])
    return file.getvalue()


FILES = corpus()


def mutant(rng: random.Random) -> bytes:
    """A file with some damage."""
    data = bytearray(rng.choice(FILES))
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 16, 200))
        near_head = rng.randrange(min(len(data), 64) + 1)
        place = rng.choice((place, near_head))
        match rng.randrange(8):
            case 0:
                data[place : place + length] = rng.randbytes(length)
            case 1:
                data = data[:place]
            case 2:
                data[place:place] = rng.randbytes(length)
            case 3:
                del data[place : place + length]
            case 4:
                data[place : place + 4] = rng.choice(EXTREMES)
            case 5:
                data[place : place + 1] = bytes([data[place] ^ 1 << rng.randrange(8)]) if place < len(data) else b""
            case 6:
                other = rng.choice(FILES)
                data[place:] = other[rng.randrange(len(other)) :]
            case _:
                data[place:place] = data[place : place + length] * rng.choice((1, 3, 100))
    if rng.random() < 0.03:
        data = bytearray(rng.choice(HEADS) + rng.randbytes(rng.choice((0, 3, 40, 3000))))
    return bytes(data)


class Sounds:
    """A service, and what a sound file becomes."""

    def __init__(self) -> None:
        self._service = AudioService(MODEL, RouterSettings(max_audio_seconds=MAX_SOUND_SECONDS))
        self._sound = b""
        self._tried = 0

    async def sounds(self, rng: random.Random) -> str:
        """Decode a damaged file."""
        self._tried += 1
        if self._tried % SOUND_EVERY == 1:
            found = await self._service.decode(FILES[0], FIELD)
            self._sound = self._sound or found.mel
            if found.mel != self._sound:
                return "another result for a sound file"
        began = time.monotonic()
        try:
            sound = await self._service.decode(mutant(rng), FIELD)
        except InvalidRequest as error:
            if "\n" in error.message or not error.message.isprintable() or len(error.message) > MAX_CHARACTERS + 3:
                return "not one printable line"
            if error.param != FIELD or f"`{FIELD}`" not in error.message:
                return f"an error without its field: {error.message}"
        else:
            mel = np.frombuffer(sound.mel, "<f4")
            if not 0 < sound.seconds <= MAX_SOUND_SECONDS + 0.001 or len(mel) != 80 * sound.mel_frames:
                return f"another size: {sound.seconds} s, {len(mel)} values"
            if not np.isfinite(mel).all():
                return "a spectrogram with what is no number"
        seconds = time.monotonic() - began
        return f"no end in time: {seconds:.1f} s" if seconds > MAX_SECONDS else ""

    async def close(self) -> None:
        """End all processes."""
        await self._service.close()


@asynccontextmanager
async def prepare(folder: Path) -> AsyncIterator[Mapping[str, Try]]:
    """Start what decodes the files."""
    made = Sounds()
    try:
        yield {"sounds": made.sounds}
    finally:
        await made.close()


if __name__ == "__main__":
    fuzz_inputs.run(prepare)
