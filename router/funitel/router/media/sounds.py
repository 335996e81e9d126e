"""The sounds of one model: decoded in a sandbox process, and made a spectrogram."""

import json

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaInput, MediaKind
from funitel.router.audio.segments import FRAMES_PER_SECOND, WINDOW_SECONDS
from funitel.router.audio.service import BASE_BYTES, BYTES_PER_FRAME, DECODE_SECONDS
from funitel.router.media.interface import PreparedMedia
from funitel.router.media.plan import Call
from funitel.router.media.processor import LARGE_BYTES, digest, run
from funitel.router.media.sound_families import SoundFamily
from funitel.router.sandbox.pool import SandboxPool
from funitel.router.settings import RouterSettings

NICENESS = 10
_VALUE_BYTES = 4


class SoundProcessor:
    """A `Processor` of sounds.

    Args:
        settings: of the router.
        family: of the model.
    """

    kind = MediaKind.AUDIO

    def __init__(self, settings: RouterSettings, family: SoundFamily) -> None:
        self.marker = family.marker
        self.prompt_marker = family.prompt_marker
        self.placeholder_id = family.placeholder_id
        self._family = family
        self._name = json.dumps([f"{family.form} 1", family.name, family.num_mel_bins]).encode()
        self._max_bytes = settings.max_audio_bytes
        seconds, limit = settings.max_audio_seconds, "--max-audio-seconds"
        if family.max_seconds is not None and family.max_seconds < seconds:
            seconds, limit = family.max_seconds, "the longest that the model hears"
        frames = int((seconds + WINDOW_SECONDS) * FRAMES_PER_SECOND)
        self._processes = SandboxPool(
            "funitel.router.audio.window_worker",
            {"form": family.form, "num_mel_bins": family.num_mel_bins, "max_seconds": seconds, "limit": limit},
            most=settings.validation_workers,
            time_limit=DECODE_SECONDS,
            memory_limit=BASE_BYTES + frames * BYTES_PER_FRAME,
            max_answer_bytes=frames * family.num_mel_bins * _VALUE_BYTES + LARGE_BYTES,
            niceness=NICENESS,
            has_several_keys=settings.has_several_keys,
        )

    def variant(self, call: Call) -> str:
        """See Processor: nothing is said of a sound."""
        return ""

    async def process(self, place: str, data: bytes, call: Call, owner: bytes) -> PreparedMedia:
        """See Processor."""
        if len(data) > self._max_bytes:
            raise InvalidRequest(
                f"`{place}` has {len(data)} bytes: at most {self._max_bytes} are taken (--max-audio-bytes)", place
            )
        found, values = await run(self._processes, {}, place, data, owner, "sound")
        num_samples, num_frames = found
        plan = self._family.plan(num_samples, num_frames)
        if plan.num_features < 1:
            raise InvalidRequest(f"`{place}` has {num_samples} samples at 16 kHz: too few for a feature", place)
        shape = (self._family.num_mel_bins, num_frames)
        facts = json.dumps([shape, plan.size]).encode()
        media = MediaInput(
            key=await digest(self._name, facts, values),
            kind=self.kind,
            shape=shape,
            values=values,
            num_features=plan.num_features,
            size=plan.size,
        )
        return PreparedMedia(media, self._family.text, (plan.num_features,))

    async def close(self) -> None:
        """See Processor."""
        await self._processes.close()
