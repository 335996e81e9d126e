"""Decode the sound of MP4 and Matroska files by PyAV, FFmpeg's libraries, where it is installed (the extra `av`)."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from funitel.proto.errors import InvalidRequest
from funitel.router.audio.container import AV_CONTAINERS, HAS_AV

if HAS_AV:
    import av
if TYPE_CHECKING:
    from av.container import InputContainer


class AvFile:
    """The first sound of a file. Use as a context manager.

    Attributes:
        samplerate: samples a second.
        channels: their number.

    Raises:
        InvalidRequest: it has no sound; names `field`.
        ValueError: FFmpeg cannot read it.
    """

    def __init__(self, content: bytes, container: str, field: str) -> None:
        self._field = field
        try:
            self._file: InputContainer = av.open(
                io.BytesIO(content), "r", format=AV_CONTAINERS[container], metadata_errors="replace"
            )
        except av.FFmpegError as error:
            raise ValueError(error.strerror) from error
        if not self._file.streams.audio:
            self._file.close()
            raise InvalidRequest(f"`{field}` has no sound", field)
        self._stream = self._file.streams.audio[0]
        self.samplerate, self.channels = self._stream.rate, self._stream.channels

    def __enter__(self) -> "AvFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def blocks(self) -> Iterator[np.ndarray]:
        """Blocks of samples [n, channels] float32, in order; raises ValueError where the file is damaged."""
        to_float = av.AudioResampler(format="fltp")
        try:
            for frame in self._file.decode(self._stream):
                if frame.sample_rate != self.samplerate or len(frame.layout.channels) != self.channels:
                    raise InvalidRequest(f"`{self._field}` must not change its sample rate or channels", self._field)
                for each in to_float.resample(frame):
                    yield each.to_ndarray().T
        except av.FFmpegError as error:
            raise ValueError(error.strerror) from error
