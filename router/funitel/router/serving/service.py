"""The service that every handler uses: settings, metrics, and once the shards answer, the engine and the tokenizer.

Knows no HTTP. The engine is reached through the few names of `Inference`, so that another can take its place.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from funitel.proto.errors import FunitelError, NotReady, StartupError, WrongTask
from funitel.proto.process.version import version
from funitel.proto.settings.fields import require
from funitel.router.adapters.registry import AdapterRegistry
from funitel.router.audio.service import AudioService
from funitel.router.core.drain import SHUTTING_DOWN, Drain
from funitel.router.core.request import DEFAULT_MODEL, MediaKinds
from funitel.router.encoder.engine import EncoderEngine
from funitel.router.encoder.service import EncoderService
from funitel.router.engine.interface import Inference
from funitel.router.media.service import MediaService
from funitel.router.serving.admission_gate import TokenizeLimit, one_at_a_time
from funitel.router.serving.running import RunningRequests
from funitel.router.settings import MEDIA_PAYLOAD_LIMIT, TEXT_PAYLOAD_LIMIT, RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.text.grammar import GrammarChecker
from funitel.router.text.model_files import (
    ModelFiles,
    ModelOrigin,
    RecommendedSampling,
    find_model_folder,
    read_recommended,
)
from funitel.router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NO_MODEL = "this server has no model of its own: name one that is launched"

# Makes the engine, and scales the metrics to its limits.
Connect = Callable[[RouterSettings, Metrics], Awaitable[Inference | EncoderEngine]]


class Service:
    """One router's life: starting, ready, closed. Asking for engine or tokenizer too early is NotReady."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.metrics.roofline.roof = settings.memory_bandwidth and settings.memory_bandwidth * 1e9
        self.version = version()
        self.recommended = RecommendedSampling()
        self.facts = ModelOrigin()
        self.drain = Drain(self.resume_paused)
        self.running = RunningRequests()
        self._replayed: set[str] | None = None  # journals of requests that are replayed, once they are known
        self.adapters = AdapterRegistry(settings, (self.model_id, settings.tokenizer_name, DEFAULT_MODEL))
        self._stage = NO_MODEL if settings.no_model else "starting: reading the tokenizer"
        self._tokenizer: Tokenizer | None = None
        self._warming: asyncio.Task[None] | None = None
        self._grammars: GrammarChecker | None = None
        self._engine: Inference | None = None
        self.media: MediaService | None = None  # None: prompts are text
        self._encoder: EncoderService | None = None
        self._audio: AudioService | None = None
        self.validating = one_at_a_time()
        self.tokenize_limit = TokenizeLimit(settings.max_concurrent_requests, self.metrics)

    @property
    def model_id(self) -> str:
        """The name clients see for the model."""
        return self.settings.served_model_name or self.settings.tokenizer_name

    def shown_model(self, asked: str | None) -> str:
        """The name an answer gives: the one that was asked for, if any was."""
        return self.model_id if asked in (None, "", DEFAULT_MODEL) else asked

    @property
    def engine(self) -> Inference:
        """The engine; raises NotReady until it is connected, and WrongTask where an encoder is served."""
        self.check_generates()
        if self._engine is None:
            raise NotReady(self._stage)
        return self._engine

    @property
    def encoder(self) -> EncoderService:
        """The encoder that is served; raises NotReady until it is connected, and WrongTask where a model generates."""
        if self._engine is not None:
            raise WrongTask("the model served here generates text; it gives no embeddings, ranks or predictions")
        if self._encoder is None:
            raise NotReady(self._stage)
        return self._encoder

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its completion, of an encoder those of a text; raises NotReady until connected."""
        if self._encoder is not None:
            return self._encoder.engine.limits.max_input_tokens
        return self.engine.limits.max_total_tokens

    @property
    def is_started(self) -> bool:
        """Whether it has come to serve."""
        return self._engine is not None or self._encoder is not None

    @property
    def is_encoder(self) -> bool:
        """Whether an encoder is served; false too as long as nothing is."""
        return self._encoder is not None

    @property
    def audio(self) -> AudioService:
        """The sound of a model that transcribes; raises NotReady until it is connected, and WrongTask for others."""
        self.check_generates()
        if self._engine is None:
            raise NotReady(self._stage)
        if self._audio is None:
            raise WrongTask("the model served here does not transcribe: it takes no audio files")
        return self._audio

    @property
    def is_transcriber(self) -> bool:
        """Whether a model that transcribes is served; false too as long as nothing is."""
        return self._audio is not None and self._engine is not None

    def check_writes(self) -> None:
        """Raise WrongTask where a model that goes on from text is not what is served."""
        self.check_generates()
        if self.is_transcriber:
            raise WrongTask("the model served here transcribes audio: send a file to /v1/audio/transcriptions")

    def check_generates(self) -> None:
        """Raise WrongTask where an encoder is served."""
        if self._encoder is not None:
            raise WrongTask(f"the model served here does not generate text: it is an encoder for {self._encoder.words}")

    @property
    def media_kinds(self) -> MediaKinds:
        """Which media prompts may have: those that can be prepared here, and encoded by the shards."""
        facts = None if self._engine is None else self._engine.limits.media
        return frozenset() if facts is None or self.media is None else facts.kinds & self.media.kinds

    @property
    def modalities(self) -> list[str] | None:
        """The names of what prompts may have, beginning with text; None where it is text alone."""
        names = [kind.name.lower() for kind in sorted(self.media_kinds)]
        return ["text", *names] if names else None

    @property
    def payload_limit(self) -> int:
        """Bytes that the body of a request may have: more where images come in it, unless the operator says so."""
        given = self.settings.payload_limit
        return given or (MEDIA_PAYLOAD_LIMIT if self.media_kinds else TEXT_PAYLOAD_LIMIT)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises NotReady until the engine is connected too."""
        if self._tokenizer is None or (self._engine is None and self._encoder is None):
            raise NotReady(self._stage)
        return self._tokenizer

    @property
    def grammars(self) -> GrammarChecker:
        """What finds out whether a grammar can be kept; raises NotReady until the engine is connected too."""
        if self._grammars is None or self._engine is None:
            raise NotReady(self._stage)
        return self._grammars

    async def check_ready(self) -> None:
        """Raise NotReady, with the reason, unless requests can be answered: every shard says so."""
        if self.drain.has_begun:
            raise NotReady(SHUTTING_DOWN)
        try:
            await self.check_shards()
        except NotReady:
            raise
        except FunitelError as error:
            raise NotReady(error.message) from error

    async def check_shards(self) -> None:
        """Raise a FunitelError unless every shard answers."""
        await (self._encoder or self.engine).health()

    async def start(self, connect: Connect, on_failure: Callable[[FunitelError], None]) -> None:
        """Read the tokenizer and connect to the shards; tell `on_failure` why it cannot."""
        try:
            await self._start(connect)
        except FunitelError as error:
            self._fail(error, on_failure)
        except Exception as error:
            logger.exception("the router cannot start")
            self._fail(StartupError(f"{type(error).__name__}: {error}"), on_failure)

    async def _start(self, connect: Connect) -> None:
        settings = self.settings
        folder = await asyncio.to_thread(find_model_folder, settings.tokenizer_name, settings.revision)
        config = Path(settings.tokenizer_config_path) if settings.tokenizer_config_path else None
        self._tokenizer = await asyncio.to_thread(
            partial(
                Tokenizer.load,
                chat_special_tokens=settings.chat_special_tokens,
                has_several_keys=settings.has_several_keys,
            ),
            str(folder),
            settings.tokenizer_config_path,
            settings.validation_workers,
        )
        largest, num_tokens = max(settings.default_stop_token_ids or (0,)), self._tokenizer.num_tokens
        require(largest < num_tokens, f"--default-stop-token-ids must be within 0..{num_tokens - 1}, given {largest}")
        self._warming = asyncio.create_task(self._tokenizer.warm_up())
        self._grammars = GrammarChecker(folder / "tokenizer.json", has_several_keys=settings.has_several_keys)
        self.recommended = read_recommended(folder)
        self.facts = ModelOrigin.of(folder)
        located = await self.adapters.locate_listed()
        self._stage = "starting: waiting for the model shards"
        engine = await connect(settings, self.metrics)
        limits = engine.limits
        async with AsyncExitStack() as undo:
            undo.push_async_callback(engine.close)
            if isinstance(engine, EncoderEngine):
                encoder = await asyncio.to_thread(EncoderService.load, engine, folder, self._tokenizer.pool, settings)
                words = f"encoder for {encoder.words}"
                require(not located, f"--lora-adapters is for models that generate text, this is an {words}")
                self._encoder = encoder
            else:
                if limits.media is not None:
                    self.media = await asyncio.to_thread(
                        MediaService.create, settings, ModelFiles(folder, config), self._tokenizer.pool.tokenizer
                    )
                self._stage = "starting: loading adapters"
                await self.adapters.load_listed(engine, located)
                self._audio = AudioService.create(settings, ModelFiles(folder), self._tokenizer.token_id)
                self._engine = engine
                if self._replayed is not None:
                    engine.replays_begun(self._replayed)
                words = str(self.recommended)
            undo.pop_all()
        logger.info(
            "ready model=%s %s max_input_tokens=%d max_total_tokens=%d",
            self.model_id,
            words,
            limits.max_input_tokens,
            limits.max_total_tokens,
        )

    def _fail(self, error: FunitelError, on_failure: Callable[[FunitelError], None]) -> None:
        self._stage = f"failed to start: {error.message}"
        on_failure(error)

    def replays_begun(self, journals: Collection[str]) -> None:
        """Requests of these journals are replayed from now on; nothing else of an earlier router is needed."""
        self._replayed = set(journals)
        if self._engine is not None:
            self._engine.replays_begun(self._replayed)

    def replay_ended(self, journal: str) -> None:
        """A replayed request has ended; what it has not claimed is not needed."""
        if self._replayed is not None:
            self._replayed.discard(journal)
        if self._engine is not None:
            self._engine.replay_ended(journal)

    def resume_paused(self) -> None:
        """Let paused requests go on, which no client could resume while the server drains, and pause none any more."""
        if self._engine is not None:
            self._engine.paused.close()

    def fail_all(self, error: FunitelError) -> None:
        """End whatever runs or waits; clients get the error."""
        if self._engine is not None:
            self._engine.fail_all(error)
        if self._encoder is not None:
            self._encoder.engine.fail_all(error)

    async def close(self) -> None:
        """Let running requests finish and give everything back."""
        if self._engine is not None:
            await self._engine.close()
        if self._encoder is not None:
            await self._encoder.close()
        if self._grammars is not None:
            await self._grammars.close()
        if self._audio is not None:
            await self._audio.close()
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        if self.media is not None:
            await self.media.close()
        if self._tokenizer is not None:
            await self._tokenizer.close()
