"""The sandbox process that decodes audio files: it is sent a file, and answers with a spectrogram."""

from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.router.audio.decoder import decode
from funitel.router.audio.segments import RATE
from funitel.router.audio.spectrogram import log_mel
from funitel.router.sandbox.worker import AttachedAnswer, serve_attached


def prepare(setup: Any) -> AttachedAnswer:
    """Make the function that answers a task, the name of a field, with a file attached.

    The setup is `[mel bins, most seconds]`. An answer is `[seconds, frames]` with the spectrogram attached, float32
    little-endian by mel bins; or what is wrong with the file.
    """
    num_mel_bins, max_seconds = setup

    def answer(field: Any, content: bytes) -> tuple[Any, bytes]:
        try:
            samples = decode(content, max_seconds, field)
        except InvalidRequest as error:
            return error.message, b""
        mel = log_mel(samples, num_mel_bins)
        return [len(samples) / RATE, mel.shape[1]], mel.astype("<f4").tobytes()

    return answer


if __name__ == "__main__":
    serve_attached(prepare)
