"""Handle OpenAI's `/v1/audio/transcriptions` and `/v1/audio/translations`, and files of speech sent to `/`."""

import base64
import binascii
import math
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest
from funitel.router.api.audio.schema import (
    AudioForm,
    DurationUsage,
    Recognition,
    RecognitionChunk,
    RecognitionRequest,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionForm,
    TranscriptionSegment,
    VerboseTranscription,
)
from funitel.router.api.audio.transcribe import (
    NO_THRESHOLDS,
    TEMPERATURES,
    Thresholds,
    TranscribedSound,
    Transcriber,
    TranscriptionCall,
)
from funitel.router.api.common.body import checked_form, is_json, json_answer, upload_of
from funitel.router.api.common.handler import IncomingRequest, upload_route
from funitel.router.audio.languages import name_of
from funitel.router.audio.service import Sound
from funitel.router.audio.speech_model import TRANSCRIBE, TRANSLATE
from funitel.router.audio.subtitles import srt, vtt
from funitel.router.transport.sse import EventStream, Put, run_until_disconnect

F = TypeVar("F", bound=AudioForm)
_FILE, _INPUTS = "file", "inputs"


@upload_route
async def transcriptions(incoming: IncomingRequest) -> Response:
    """`/v1/audio/transcriptions`: the text of a sound, in its language."""
    form = _form(incoming, TranscriptionForm)
    if "word" in form.timestamp_granularities:
        raise InvalidRequest(
            "`timestamp_granularities[]`: word is not supported, segment is", "timestamp_granularities[]"
        )
    if form.timestamp_granularities and form.response_format != "verbose_json":
        raise InvalidRequest("`timestamp_granularities[]` needs `response_format` verbose_json", "response_format")
    return await _heard(incoming, form, TRANSCRIBE, form.language)


@upload_route
async def translations(incoming: IncomingRequest) -> Response:
    """`/v1/audio/translations`: the text of a sound, in English."""
    return await _heard(incoming, _form(incoming, AudioForm), TRANSLATE, "")


@upload_route
async def recognize_file(incoming: IncomingRequest) -> Response:
    """`POST /` with a file of audio as its body, as Hugging Face's clients send it: the text."""
    return await _recognized(incoming, upload_of(incoming.http.scope).content, _FILE, with_chunks=False)


@upload_route
async def recognize(incoming: IncomingRequest) -> Response:
    """`POST /` with a file of audio in base64, as Hugging Face's clients send it with parameters: the text."""
    body = await incoming.read(RecognitionRequest)
    try:
        content = base64.b64decode(body.inputs, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("`inputs` must be an audio file in base64", _INPUTS) from None
    with_chunks = body.parameters is not None and body.parameters.return_timestamps
    return await _recognized(incoming, content, _INPUTS, with_chunks=with_chunks)


async def serve_recognition(http: HttpRequest) -> Response:
    """`POST /` of a model that transcribes: a file, or JSON that holds one."""
    return await (recognize if is_json(http) else recognize_file)(http)


def _form(incoming: IncomingRequest, record: type[F]) -> F:
    is_strict = incoming.service.settings.strict_fields
    return checked_form(incoming.http, upload_of(incoming.http.scope), record, is_strict=is_strict)


def _call(incoming: IncomingRequest, form: AudioForm, task: str, language: str) -> TranscriptionCall:
    model = incoming.service.audio.model
    model.check_task(task)
    usual = Thresholds()
    thresholds = Thresholds(
        compression_ratio=form.compression_ratio_threshold or usual.compression_ratio,
        logprob=usual.logprob if form.logprob_threshold is None else form.logprob_threshold,
        no_speech=usual.no_speech if form.no_speech_threshold is None else form.no_speech_threshold,
    )
    return TranscriptionCall(
        task=task,
        language=model.language(language) if language.strip() else None,
        prompt=form.prompt,
        with_timestamps=form.response_format in ("srt", "vtt", "verbose_json"),
        temperatures=TEMPERATURES if form.temperature == 0 else (form.temperature,),
        thresholds=thresholds,
    )


async def _decoded(incoming: IncomingRequest, content: bytes, field: str) -> Sound:
    return await incoming.service.audio.decode(content, field, incoming.arrived.key)


async def _heard(incoming: IncomingRequest, form: AudioForm, task: str, language: str) -> Response:
    """The answer to a form: streamed where it asks for that, or whole."""
    return await (_streamed if form.stream else _answered)(incoming, form, task, language)


async def _answered(incoming: IncomingRequest, form: AudioForm, task: str, language: str) -> Response:
    call = _call(incoming, form, task, language)
    content = upload_of(incoming.http.scope).content

    async def transcribe() -> tuple[Sound, TranscribedSound]:
        sound = await _decoded(incoming, content, _FILE)
        return sound, await Transcriber(incoming.service, incoming.arrived, sound, call).run()

    sound, transcript = await run_until_disconnect(incoming.http.receive, transcribe())
    match form.response_format:
        case "text":
            return _text(f"{transcript.text}\n")
        case "srt":
            return _text(srt(transcript.segments))
        case "vtt":
            return _text(vtt(transcript.segments))
        case "verbose_json":
            return json_answer(_verbose(sound, transcript, task))
        case _:
            return json_answer(Transcription(text=transcript.text, usage=_usage(sound)))


def _text(content: str) -> Response:
    return Response(content, media_type="text/plain")


def _usage(sound: Sound) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(sound.seconds))


def _verbose(sound: Sound, transcript: TranscribedSound, task: str) -> VerboseTranscription:
    segments = [
        TranscriptionSegment(
            id=number,
            seek=each.seek,
            start=round(each.start, 2),
            end=round(each.end, 2),
            text=each.text,
            tokens=each.tokens,
            temperature=each.temperature,
            avg_logprob=each.mean_logprob,
            compression_ratio=each.compression_ratio,
            no_speech_prob=each.no_speech or 0.0,
        )
        for number, each in enumerate(transcript.segments)
    ]
    return VerboseTranscription.model_construct(
        task=task,
        language=name_of(transcript.language or "en"),
        duration=round(sound.seconds, 3),
        text=transcript.text,
        segments=segments,
        usage=_usage(sound),
    )


async def _streamed(incoming: IncomingRequest, form: AudioForm, task: str, language: str) -> Response:
    if form.response_format != "json":
        raise InvalidRequest("`stream` needs `response_format` json", "stream")
    given = (form.compression_ratio_threshold, form.logprob_threshold, form.no_speech_threshold)
    if any(each is not None for each in given):
        raise InvalidRequest("`stream` takes no thresholds: text that was sent is not taken back", "stream")
    call = _call(incoming, form, task, language)
    content = upload_of(incoming.http.scope).content
    work = _decoded(incoming, content, _FILE)
    sound = await run_until_disconnect(incoming.http.receive, work)
    transcriber = Transcriber(incoming.service, incoming.arrived, sound, replace(call, thresholds=NO_THRESHOLDS))
    return EventStream(partial(_stream, transcriber, sound), incoming.error_record)


async def _stream(transcriber: Transcriber, sound: Sound, put: Put) -> None:
    text = await transcriber.stream(lambda delta: put(TranscriptDelta(delta=delta)))
    put(TranscriptDone(text=text, usage=_usage(sound)))


async def _recognized(incoming: IncomingRequest, content: bytes, field: str, *, with_chunks: bool) -> Response:
    call = TranscriptionCall(with_timestamps=with_chunks, temperatures=(0.0,), thresholds=NO_THRESHOLDS)

    async def transcribe() -> TranscribedSound:
        sound = await _decoded(incoming, content, field)
        return await Transcriber(incoming.service, incoming.arrived, sound, call).run()

    transcript = await run_until_disconnect(incoming.http.receive, transcribe())
    answer = Recognition(text=transcript.text)
    if with_chunks:
        answer.chunks = [
            RecognitionChunk(text=each.text, timestamp=(round(each.start, 2), round(each.end, 2)))
            for each in transcript.segments
        ]
    return json_answer(answer)
