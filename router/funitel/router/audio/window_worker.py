"""Decode the sounds of prompts in a sandbox process, and make spectrograms.

The setup has the form and the number of mel bins of these, the most seconds, and what sets them. The forms are
`windows`, whole windows of Whisper's, and `magnitudes`. A task is empty, and its attachment the file. An answer is
what is wrong with the file, or its number of samples and of frames, with the spectrogram [mel bins, frames] float32,
little-endian.
"""

from typing import Any

import numpy as np

from funitel.proto.errors import InvalidRequest
from funitel.router.audio.decoder import decode
from funitel.router.audio.magnitudes import log_magnitudes
from funitel.router.audio.segments import RATE, WINDOW_SECONDS
from funitel.router.audio.spectrogram import log_mel
from funitel.router.sandbox.worker import AttachedAnswer, serve_attached

_NAME = "the sound"
_WINDOW = WINDOW_SECONDS * RATE


def prepare(setup: dict[str, Any]) -> AttachedAnswer:
    """Make the function that answers a task."""
    num_mel_bins, max_seconds, limit = setup["num_mel_bins"], setup["max_seconds"], setup["limit"]

    def answer(task: Any, content: bytes) -> tuple[Any, bytes]:
        try:
            samples = decode(content, max_seconds, _NAME, limit)
        except InvalidRequest as error:
            return error.message.removeprefix(f"`{_NAME}` "), b""
        if setup["form"] == "magnitudes":
            mel = log_magnitudes(samples, num_mel_bins)
        else:
            mel = log_mel(np.pad(samples, (0, -len(samples) % _WINDOW)), num_mel_bins)
        return [len(samples), mel.shape[1]], mel.astype("<f4").tobytes()

    return answer


if __name__ == "__main__":
    serve_attached(prepare)
