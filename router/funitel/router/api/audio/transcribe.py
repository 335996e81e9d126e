"""Transcribe a sound: window after window of 30 s, each from where the timestamps of the one before it end.

Source of the order of windows and of the thresholds: Whisper, arXiv 2212.04356, 3.8 and 4.5.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from funitel.proto.detokenizer import Detokenizer
from funitel.proto.errors import Overloaded
from funitel.proto.step import FinishReason, Generation
from funitel.router.audio.segments import FRAMES_PER_SECOND, Segment, compression_ratio, part
from funitel.router.audio.service import Sound
from funitel.router.audio.speech_model import TRANSCRIBE
from funitel.router.core import request_context
from funitel.router.core.request import RequestMedia
from funitel.router.core.stream import Timings
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.prepare import GenerationJob, Prompt, prepare
from funitel.router.serving.run import collect_all, run_all, spanning
from funitel.router.serving.sampling_request import SamplingRequest
from funitel.router.serving.service import Service

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
OPERATION = "transcription"
PROMPT_TEXT = "<|audio|>"  # what logs and headers know of a prompt that is a sound
RETRY_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # before a later window is tried again that finds no room

Put = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When a window's transcript fails, and when it is silence; None: never. The defaults are OpenAI's."""

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6

    def fails(self, answer: "WindowText") -> bool:
        """Whether it should be tried again at a higher temperature."""
        is_improbable = self.logprob is not None and answer.mean_logprob < self.logprob
        repeats = self.compression_ratio is not None and answer.compression_ratio > self.compression_ratio
        return (is_improbable or repeats) and not self.is_silence(answer)

    def is_silence(self, answer: "WindowText") -> bool:
        """Whether nothing was said in it."""
        if self.no_speech is None or answer.no_speech is None or answer.no_speech <= self.no_speech:
            return False
        return self.logprob is None or answer.mean_logprob < self.logprob


NO_THRESHOLDS = Thresholds(compression_ratio=None, logprob=None, no_speech=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionCall:
    """How a sound is transcribed.

    `language` is a code, None to detect it. With `with_timestamps` a short sound has segments, too. `temperatures` are
    tried in their order, until a transcript passes the thresholds.
    """

    task: str = TRANSCRIBE
    language: str | None = None
    prompt: str = ""
    with_timestamps: bool = False
    temperatures: tuple[float, ...] = TEMPERATURES
    thresholds: Thresholds = Thresholds()


@dataclass(frozen=True, slots=True)
class WindowText:
    """The tokens of one window, without the one that ended it, and how likely they are."""

    ids: list[int]
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech: float | None
    is_aborted: bool


@dataclass(slots=True)
class TranscribedSound:
    """What was made of a sound; `language` is the code of what was spoken, None where the model knows one language."""

    language: str | None
    segments: list[Segment] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(each.text for each in self.segments).strip()


class Transcriber:
    """Transcribes one sound for one request."""

    def __init__(self, service: Service, arrived: Arrival, sound: Sound, call: TranscriptionCall) -> None:
        self.service = service
        self._audio = service.audio
        self.model = service.audio.model
        self._arrived = arrived
        self._sound = sound
        self._call = call
        self._is_timed = call.with_timestamps or sound.num_frames > self.model.num_frames
        self._previous: list[int] = []
        self._counts = _Counts()

    async def run(self) -> TranscribedSound:
        """Transcribe it whole; raises as `prepare` and `collect_all`."""
        return await self._windows(None)

    async def stream(self, put: Put) -> str:
        """Transcribe it at the first temperature; its text is given to `put` as it is found, and returned.

        Raises: as `run`.
        """
        pieces = TextPieces(put)
        with self.service.metrics.counting_failures():
            await self._windows(pieces)
        return pieces.text

    async def _windows(self, pieces: "TextPieces | None") -> TranscribedSound:
        call, sound = self._call, self._sound
        transcript = TranscribedSound(call.language)
        self._previous = await self._prompt_ids()
        seek = 0
        while seek < sound.num_frames:
            window = self._audio.window(sound, seek)
            if transcript.language is None and self.model.languages:
                transcript.language = await self._detected(window)
            live = None if pieces is None else _Live(self, pieces, is_timed=self._is_timed)
            found = await self._heard(window, transcript.language, live)
            num_frames = min(sound.num_frames - seek, self.model.num_frames)
            segments: list[Segment] = []
            step = num_frames
            if not call.thresholds.is_silence(found):
                segments, step = self._parted(found, seek, num_frames)
            if live is not None:
                live.finish(segments)
            transcript.segments += segments
            if found.is_aborted:
                break
            seek += step if step > 0 else num_frames
            self._previous = []  # what came before the sound is not what came before a later window
        self._counts.tell(self.service, self._arrived)
        return transcript

    def _parted(self, found: WindowText, seek: int, num_frames: int) -> tuple[list[Segment], int]:
        """The segments of a window, and how many frames on the next begins."""
        if self._is_timed:
            segments, step = part(found.ids, self.model.first_timestamp, seek, num_frames)
        else:
            seconds = num_frames / FRAMES_PER_SECOND
            segments, step = [Segment(seek / FRAMES_PER_SECOND, seconds, found.ids, seek)], num_frames
        for segment in segments:
            segment.text = self.text_of(segment.tokens)
            segment.temperature = found.temperature
            segment.mean_logprob = found.mean_logprob
            segment.compression_ratio = found.compression_ratio
            segment.no_speech = found.no_speech
        return segments, step

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of tokens, without timestamps and special ones."""
        return self.service.tokenizer.codec.decode([each for each in ids if each < self.model.end])

    async def _prompt_ids(self) -> list[int]:
        """The tokens of the text that came before; of a long one the last, of which the decoder has room for half."""
        text = self._call.prompt.strip()
        if not text or self.model.previous is None:
            return []
        ids = await self.service.tokenizer.encode(f" {text}", add_special_tokens=False, field="prompt")
        kept = [each for each in ids if each < self.model.end]  # what clients write is no control token
        most = self.model.max_tokens // 2 - 1
        return [self.model.previous, *kept[-most:]]

    # One window

    async def _heard(self, window: RequestMedia, language: str | None, live: "_Live | None") -> WindowText:
        """The tokens of a window, at the first temperature at which they pass the thresholds."""
        call, model = self._call, self.model
        opening = self._previous + model.opening(language, call.task, with_timestamps=self._is_timed)
        temperatures = call.temperatures if live is None else call.temperatures[:1]
        no_speech: float | None = None
        for temperature in temperatures:
            jobs = [await self._job(window, opening, temperature)]
            asks_silence = call.thresholds.no_speech is not None and model.no_speech is not None and live is None
            if asks_silence and no_speech is None:
                jobs.append(await self._probe(window, (model.no_speech or 0,)))
            answers = await self._run(jobs, live)
            if len(answers) > 1:
                no_speech = math.exp(min(0.0, _logprobs(answers[1])[0]))
            found = self._window_text(answers[0], temperature, no_speech)
            if found.is_aborted or not call.thresholds.fails(found):
                break
        return found

    def _window_text(self, answer: Sequence[Generation], temperature: float, no_speech: float | None) -> WindowText:
        ids = [token_id for generation in answer for token_id in generation.tokens.ids]
        logprobs = _logprobs(answer)
        if ids and ids[-1] == self.model.end:
            ids.pop()
        finished = answer[-1].finished
        return WindowText(
            ids=ids,
            temperature=temperature,
            mean_logprob=sum(logprobs) / max(len(logprobs), 1),
            compression_ratio=compression_ratio(self.text_of(ids)),
            no_speech=no_speech,
            is_aborted=finished is not None and finished.finish_reason is FinishReason.ABORT,
        )

    async def _detected(self, window: RequestMedia) -> str | None:
        """The code of the language that a window is in: the likeliest of those that the model knows."""
        languages = self.model.languages
        (answer,) = await self._run([await self._probe(window, tuple(languages.values()))], None)
        found = answer[0].tokens.ids[:1]
        return next((code for code, token_id in languages.items() if (token_id,) == found), None)

    async def _probe(self, window: RequestMedia, allowed: tuple[int, ...]) -> GenerationJob:
        """One token behind the first of the decoder; how likely it is by the model's own scores."""
        sampling = SamplingRequest(do_sample=False, max_new_tokens=1, allowed_token_ids=allowed, raw_logprobs=True)
        return await self._prepared(window, [self.model.start], sampling, with_timestamps=False)

    async def _job(self, window: RequestMedia, opening: Sequence[int], temperature: float) -> GenerationJob:
        if not temperature:
            sampling = SamplingRequest(do_sample=False)
        else:  # as likely as the model finds them, whatever they were drawn at
            sampling = SamplingRequest(do_sample=True, temperature=temperature, raw_logprobs=True)
        return await self._prepared(window, opening, sampling, with_timestamps=self._is_timed)

    async def _prepared(
        self, window: RequestMedia, opening: Sequence[int], sampling: SamplingRequest, *, with_timestamps: bool
    ) -> GenerationJob:
        places = (self.model.end,) * window.span.length
        prompt = Prompt(PROMPT_TEXT, ids=(*places, *opening))
        job = await prepare(self.service, sampling, prompt, stream=False, arrived=self._arrived)
        request = job.request
        room = self.model.max_tokens - len(opening)
        stopping = replace(request.stopping, max_new_tokens=min(room, request.stopping.max_new_tokens))
        chosen = replace(request.sampling, with_timestamps=with_timestamps)
        job.request = replace(request, media=(window,), sampling=chosen, stopping=stopping)
        job.is_part = True
        return job

    async def _run(self, jobs: Sequence[GenerationJob], live: "_Live | None") -> list[list[Generation]]:
        """Run jobs side by side; a later window that finds no room waits for it a while."""
        for pause in (*RETRY_SECONDS, None) if self._counts.num_runs else (None,):
            found: list[list[Generation]] = [[] for _ in jobs]
            try:
                if live is None:
                    found = [answer.generations for answer in await collect_all(jobs)]
                else:
                    await run_all(jobs, partial(_take, found, live))
            except Overloaded:
                if pause is None or any(found):
                    raise
                await asyncio.sleep(pause)
            else:
                break
        self._counts.add(jobs)
        return found


def _take(found: list[list[Generation]], live: "_Live", place: int, generation: Generation) -> None:
    found[place].append(generation)
    live.feed(generation.tokens.ids)


def _logprobs(answer: Sequence[Generation]) -> list[float]:
    return [logprob for generation in answer for logprob in generation.tokens.logprobs]


@dataclass(slots=True)
class _Counts:
    """What the sequences of one request have cost together."""

    num_runs: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    timings: list[Timings] = field(default_factory=list)

    def add(self, jobs: Sequence[GenerationJob]) -> None:
        """Add sequences that have ended."""
        self.num_runs += 1
        self.prompt_tokens += sum(len(job.request.input_ids) for job in jobs)
        self.tokens += sum(job.num_tokens for job in jobs)
        timings = request_context.current().timings
        if timings is not None:
            self.timings.append(timings)

    def tell(self, service: Service, arrived: Arrival) -> None:
        """Count the request as one that succeeded, and note for logs what it took."""
        context = request_context.current()
        context.operation, context.num_choices = OPERATION, 1
        context.prompt_tokens, context.tokens = self.prompt_tokens, self.tokens
        if self.timings:
            context.timings = spanning(self.timings)
            service.metrics.observe_success(context.validation_seconds, context.timings, self.tokens)


class TextPieces:
    """The text of a transcript in pieces: none begins the whole or ends it with white space."""

    def __init__(self, put: Put) -> None:
        self.text = ""
        self._put = put
        self._held = ""

    def add(self, piece: str) -> None:
        """Take more; what can be shown is given away."""
        whole = self._held + piece
        shown = whole.rstrip()
        self._held = whole[len(shown) :]
        if not self.text:
            shown = shown.lstrip()
            self._held = self._held if shown else ""
        if shown:
            self.text += shown
            self._put(shown)


class _Live:
    """The text of one window as it is found: each token's, or with timestamps each segment's once it has ended."""

    def __init__(self, transcriber: Transcriber, pieces: TextPieces, *, is_timed: bool) -> None:
        model, service = transcriber.model, transcriber.service
        self._end, self._first_timestamp = model.end, model.first_timestamp
        self._pieces = pieces
        self._text_of = transcriber.text_of
        self._detokenizer = None if is_timed else Detokenizer(service.tokenizer.codec, [])
        self._segment: list[int] = []
        self._num_shown = 0  # segments

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next tokens."""
        for token_id in ids:
            if self._detokenizer is None:
                self._feed_timed(token_id)
            elif token_id < self._end:
                self._pieces.add(self._detokenizer.push(token_id))

    def _feed_timed(self, token_id: int) -> None:
        held = self._segment
        if held and held[-1] >= self._first_timestamp and token_id >= self._first_timestamp:
            self._pieces.add(self._text_of(held))
            self._num_shown += 1
            held.clear()
        held.append(token_id)

    def finish(self, segments: Sequence[Segment]) -> None:
        """Show what is left of the segments of the window."""
        if self._detokenizer is not None:
            self._pieces.add(self._detokenizer.flush())
            return
        for segment in segments[self._num_shown :]:
            self._pieces.add(segment.text)
