"""The sandbox process that decodes audio files: it is sent a file, and answers with a spectrogram."""

import base64
from collections.abc import Callable
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.router.audio.decoder import decode
from funitel.router.audio.spectrogram import RATE, log_mel
from funitel.router.sandbox.worker import serve


def prepare(setup: Any) -> Callable[[Any], Any]:
    """Make the function that answers a task `[file in base64, field]`.

    The setup is `[mel bins, most seconds]`. An answer is `[seconds, frames, spectrogram in base64]`, float32
    little-endian by mel bins, or what is wrong with the file.
    """
    num_mel_bins, max_seconds = setup

    def answer(task: Any) -> Any:
        content, field = task
        try:
            samples = decode(base64.b64decode(content), max_seconds, field)
        except InvalidRequest as error:
            return error.message
        mel = log_mel(samples, num_mel_bins)
        return [len(samples) / RATE, mel.shape[1], base64.b64encode(mel.astype("<f4").tobytes()).decode()]

    return answer


if __name__ == "__main__":
    serve(prepare)
