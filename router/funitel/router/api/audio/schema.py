"""Forms and answers of OpenAI's audio routes, and of Hugging Face's speech recognition."""

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from funitel.router.api.common.field_policy import NOTHING, Unsupported
from funitel.router.api.common.schema_base import ApiModel, Body, ModelName

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

_ONE_LANGUAGE = Unsupported("use `language`")
_SPEAKERS = Unsupported("speakers are not told apart")


class AudioForm(Body):
    """The form of a translation into English, as `multipart/form-data`; values are text."""

    model_config = ConfigDict(strict=False, allow_inf_nan=False)
    unsupported: ClassVar[dict[str, Unsupported]] = {
        "include": Unsupported("use `verbose_json`, which has log-probabilities of segments"),
        "chunking_strategy": Unsupported("long files are cut by their timestamps", (*NOTHING, "auto")),
        "languages": _ONE_LANGUAGE,
        "keywords": Unsupported("use `prompt`"),
        "known_speaker_names": _SPEAKERS,
        "known_speaker_references": _SPEAKERS,
    }

    file: str = Field(
        default="",
        description="The audio: WAV, FLAC, OGG (Vorbis or Opus) or MP3.",
        json_schema_extra={"format": "binary"},
    )
    model: ModelName | None = Field(default=None, description="Name of the model; any name where there is one model.")
    prompt: str = Field(default="", description="Text that came before, whose words and style the transcript follows.")
    response_format: ResponseFormat = "json"
    stream: bool = Field(default=False, description="Whether to stream the text as it is found; with `json`.")
    temperature: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="0: greedy, and again at 0.2, 0.4 up to 1.0 where a window's transcript fails a threshold.",
    )
    compression_ratio_threshold: float | None = Field(
        default=None, gt=0.0, description="A transcript that compresses better repeats itself and fails; 2.4 if absent."
    )
    logprob_threshold: float | None = Field(
        default=None, le=0.0, description="A transcript with a lower mean log-probability fails; -1 when absent."
    )
    no_speech_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="A window that is likelier silent, and fails by log-probability, has no text; 0.6 when absent.",
    )


class TranscriptionForm(AudioForm):
    """The form of a transcription, as `multipart/form-data`; values are text."""

    language: str = Field(
        default="", description="ISO 639-1 code or English name of the language; detected when absent.", max_length=64
    )
    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default_factory=list, description="Sent as `timestamp_granularities[]`, with `verbose_json`; segments only."
    )


class RecognitionParameters(Body):
    """Parameters of a recognition."""

    unsupported: ClassVar[dict[str, Unsupported]] = {
        "generation_parameters": Unsupported("the transcript is greedy"),
    }

    return_timestamps: bool = Field(default=False, description="Whether the answer has `chunks` with their times.")


class RecognitionRequest(Body):
    """Speech in base64 with parameters, as Hugging Face's clients send it; without any they send the file itself."""

    inputs: str = Field(description="The audio file in base64.")
    parameters: RecognitionParameters | None = None


class DurationUsage(ApiModel):
    """What was heard."""

    type: Literal["duration"] = "duration"
    seconds: int = Field(description="Length of the audio, rounded up.")


class Transcription(ApiModel):
    """The text of a sound."""

    text: str
    usage: DurationUsage


class TranscriptionSegment(ApiModel):
    """A part of a transcript, by its timestamps."""

    id: int
    seek: int = Field(description="Where its window of 30 s begins, in hundredths of a second.")
    start: float = Field(description="Seconds.")
    end: float = Field(description="Seconds.")
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float = Field(description="Of the tokens of its window.")
    compression_ratio: float = Field(description="Of the text of its window.")
    no_speech_prob: float = Field(description="How likely its window is silent.")


class VerboseTranscription(ApiModel):
    """The text of a sound, with its language and its segments."""

    task: Literal["transcribe", "translate"]
    language: str = Field(description="English name of the language that was heard.")
    duration: float = Field(description="Seconds.")
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage


class TranscriptDelta(ApiModel):
    """Event: more text."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TranscriptDone(ApiModel):
    """Last event: the whole text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: DurationUsage


class TranscriptionEvent(ApiModel):
    """An event of a streamed transcription: `transcript.text.delta` with `delta`, or last `transcript.text.done`."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: DurationUsage | None = None


class RecognitionChunk(ApiModel):
    """A part of a recognised text."""

    text: str
    timestamp: tuple[float, float] = Field(description="Seconds of its beginning and its end.")


class Recognition(ApiModel):
    """The text of a sound, as Hugging Face's clients read it."""

    text: str
    chunks: list[RecognitionChunk] | None = Field(default=None, exclude_if=lambda value: value is None)
