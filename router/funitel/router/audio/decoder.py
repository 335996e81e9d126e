"""Decode an audio file to one channel of samples at the rate that a model hears."""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import soundfile

from funitel.proto.errors import InvalidRequest
from funitel.router.audio.av_decoder import AvFile
from funitel.router.audio.container import AV_CONTAINERS, container_of
from funitel.router.audio.resample import Resampler
from funitel.router.audio.segments import RATE

MIN_RATE, MAX_RATE = 4_000, 192_000
MAX_CHANNELS = 32
_BLOCK_VALUES = 1 << 18  # of all channels, read at once


def decode(content: bytes, max_seconds: float, field: str, limit: str = "--max-audio-seconds") -> np.ndarray:
    """Samples [n] float32 within -1..1, the mean of all channels, at 16 kHz. `limit` is what sets `max_seconds`.

    Raises:
        InvalidRequest: the file cannot be decoded, has no samples, or more seconds, channels or samples a second than
            are allowed; names `field`.
    """
    container = container_of(content, field)
    limits = _SoundLimits(max_seconds, field, limit)
    try:
        if container in AV_CONTAINERS:
            with AvFile(content, container, field) as found:
                return limits.samples(found.samplerate, found.channels, found.blocks())
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format not in (container, "WAVEX"):
                raise InvalidRequest(f"`{field}` cannot be decoded: it is no {container} file", field)
            return limits.samples(file.samplerate, file.channels, _blocks(file))
    except (soundfile.SoundFileError, RuntimeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InvalidRequest(f"`{field}` cannot be decoded as {container}: {reason}", field) from None


def _blocks(file: soundfile.SoundFile) -> Iterator[np.ndarray]:
    """Blocks of samples [n, channels] float32, in order."""
    while len(block := file.read(max(1, _BLOCK_VALUES // file.channels), dtype="float32", always_2d=True)):
        yield block


@dataclass(frozen=True, slots=True)
class _SoundLimits:
    """The limits of a file.

    Attributes:
        max_seconds: its length.
        field: the name of the file in errors.
        limit: what sets `max_seconds`.
    """

    max_seconds: float
    field: str
    limit: str

    def samples(self, rate: int, channels: int, blocks: Iterable[np.ndarray]) -> np.ndarray:
        """Samples of all blocks at 16 kHz, the mean of their channels; raises InvalidRequest."""
        field = self.field
        if not MIN_RATE <= rate <= MAX_RATE:
            raise InvalidRequest(f"`{field}` must have {MIN_RATE} to {MAX_RATE} samples a second. Given: {rate}", field)
        if channels > MAX_CHANNELS:
            raise InvalidRequest(f"`{field}` must have at most {MAX_CHANNELS} channels. Given: {channels}", field)
        most = int(self.max_seconds * rate)
        resampler, parts, count = Resampler(rate, RATE), [], 0
        for block in blocks:
            count += len(block)  # a header may say anything
            if count > most:
                raise InvalidRequest(f"`{field}` must be at most {self.max_seconds:g} s long ({self.limit})", field)
            mono = block.mean(axis=1) if channels > 1 else block[:, 0]
            parts.append(resampler.feed(np.clip(np.nan_to_num(mono, nan=0.0), -1.0, 1.0)))
        if not count:
            raise InvalidRequest(f"`{field}` has no samples", field)
        return np.concatenate([*parts, resampler.finish()])
