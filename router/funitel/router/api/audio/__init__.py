"""OpenAI's audio API, and speech recognition of Hugging Face's clients."""

from functools import partial

from funitel.router.api.audio import handlers
from funitel.router.api.audio.schema import (
    AudioForm,
    TranscriptionEvent,
    TranscriptionForm,
    VerboseTranscription,
)
from funitel.router.api.common.route_kinds import openai_work
from funitel.router.middleware.operation import ModelUse

_audio = partial(openai_work, model=ModelUse.TRANSCRIBES, answer=VerboseTranscription)

ROUTES = (
    _audio(
        "/v1/audio/transcriptions",
        handlers.transcriptions,
        "Whisper: the text of a sound; streamed if `stream` is true",
        form=TranscriptionForm,
        event=TranscriptionEvent,
    ),
    _audio(
        "/v1/audio/translations",
        handlers.translations,
        "Whisper: the text of a sound, in English; streamed if `stream` is true",
        form=AudioForm,
        event=TranscriptionEvent,
    ),
)
