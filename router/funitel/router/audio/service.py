"""The sound of a model's requests: decode files in a sandbox, and cut windows for the model out of spectrograms."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from funitel.proto.errors import InvalidRequest, Overloaded
from funitel.proto.step import MediaInput, MediaKind, MediaSpan
from funitel.router.audio.segments import FRAMES_PER_SECOND
from funitel.router.audio.speech_model import SpeechModel
from funitel.router.core.request import RequestMedia
from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable
from funitel.router.settings import RouterSettings
from funitel.router.text.model_files import ModelFiles

logger = logging.getLogger(__name__)

MAX_PROCESSES = 2
BYTES = 4  # of a value
DECODE_SECONDS = 60.0
BASE_BYTES = 3 << 30  # of address space: Python and its libraries
BYTES_PER_FRAME = 20_000  # of address space, for samples of every kind on the way to a frame
_ANSWER_SLACK = 1 << 16
PROCESSOR = b"funitel whisper log-mel 1"


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """A decoded file: its length, and its spectrogram [mel bins, mel_frames] float32, little-endian."""

    seconds: float
    mel: bytes
    mel_frames: int

    @property
    def num_frames(self) -> int:
        """Frames that are to be heard: those of the sound, without the silence behind a short one."""
        return min(self.mel_frames, max(1, round(self.seconds * FRAMES_PER_SECOND)))

    def cut(self, begin: int, count: int) -> bytes:
        """The spectrogram of `count` frames from `begin` on, [mel bins, count]; zeros behind its end."""
        row = BYTES * self.mel_frames
        silence = bytes(BYTES * count)
        begin, end = BYTES * begin, BYTES * min(begin + count, self.mel_frames)
        rows = [self.mel[at + begin : at + end] for at in range(0, len(self.mel), row)]
        return b"".join([(each + silence)[: len(silence)] for each in rows])


class AudioService:
    """Files of sound for one model that transcribes. Event loop only."""

    def __init__(self, model: SpeechModel, settings: RouterSettings) -> None:
        self.model = model
        frames = int(settings.max_audio_seconds * FRAMES_PER_SECOND) + model.num_frames
        self._pool = SandboxPool(
            "funitel.router.audio.worker",
            [model.num_mel_bins, settings.max_audio_seconds],
            most=MAX_PROCESSES,
            time_limit=DECODE_SECONDS,
            memory_limit=BASE_BYTES + frames * BYTES_PER_FRAME,
            max_answer_bytes=frames * model.num_mel_bins * BYTES + _ANSWER_SLACK,
            has_several_keys=settings.has_several_keys,
        )

    @classmethod
    def create(
        cls, settings: RouterSettings, files: ModelFiles, token_id: Callable[[str], int | None]
    ) -> "AudioService | None":
        """The service of a model folder; None where its model does not transcribe. Raises: as `SpeechModel.of`."""
        model = SpeechModel.of(files, token_id)
        return None if model is None else cls(model, settings)

    async def decode(self, content: bytes, field: str, owner: bytes = b"") -> Sound:
        """Decode a file.

        Args:
            content: of the file.
            field: of the request, for errors.
            owner: hash of the API key, for fairness.

        Raises:
            InvalidRequest: it cannot be decoded, is too long, or takes too much time or memory.
            Overloaded: no process can be started.
        """
        try:
            answer, values = await self._pool.run_attached(field, content, owner)
        except Killed as killed:
            raise InvalidRequest(f"`{field}` cannot be decoded: {killed}", field) from None
        except WorkerUnavailable as error:
            logger.warning("audio cannot be decoded: %s", error)
            raise Overloaded(": audio cannot be decoded now") from None
        if isinstance(answer, str):
            raise InvalidRequest(answer, field)
        seconds, num_frames = answer
        return Sound(seconds, values, num_frames)

    def window(self, sound: Sound, seek: int) -> RequestMedia:
        """What a shard hears of a sound from frame `seek` on: 30 s, behind its end nothing."""
        model = self.model
        shape = (model.num_mel_bins, model.num_frames)
        values = sound.cut(seek, model.num_frames)
        key = hashlib.sha256(PROCESSOR + repr(shape).encode() + values).digest()
        media = MediaInput(key=key, kind=MediaKind.AUDIO, shape=shape, values=values, num_features=model.num_features)
        return RequestMedia(MediaSpan(key, 0, model.num_features), media)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()
