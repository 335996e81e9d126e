"""The encoder service for handlers: engine, tokenizer and tasks of one encoder. Knows no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.errors import BatchSizeExceeded, ContextTooLong, InvalidRequest, WrongTask
from funitel.proto.step import EncoderFacts, EncoderTask
from funitel.router.encoder.engine import EncoderEngine
from funitel.router.encoder.tokenize import EncodedText, Prompts, TextEncoder, TextOrPair
from funitel.router.settings import RouterSettings
from funitel.router.text.encode_pool import EncodePool

_WORDS = {EncoderTask.EMBED: "embeddings", EncoderTask.FILL: "masks"}


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How to tokenize texts: `truncate` at their "left" or "right" end; errors name `field`."""

    field: str
    truncate: str | None = None


class EncoderService:
    """One encoder, connected."""

    def __init__(self, engine: EncoderEngine, texts: TextEncoder, prompts: Prompts, settings: RouterSettings) -> None:
        self.engine = engine
        self.texts = texts
        self.prompts = prompts
        self._max_texts = settings.max_client_texts

    @classmethod
    def load(cls, engine: EncoderEngine, folder: Path, pool: EncodePool, settings: RouterSettings) -> "EncoderService":
        """Read the tokenizer of a connected encoder.

        Raises:
            StartupError: a file is missing or unreadable.
        """
        texts = TextEncoder.load(folder, pool, engine.limits.max_input_tokens)
        return cls(engine, texts, Prompts.of(folder), settings)

    @property
    def facts(self) -> EncoderFacts:
        """Facts of the model, from its shards."""
        return self.engine.facts

    @property
    def is_ranker(self) -> bool:
        """Whether its one score ranks pairs of texts."""
        return EncoderTask.CLASSIFY in self.facts.tasks and len(self.facts.labels) == 1

    @property
    def words(self) -> str:
        """Describe its task in a word."""
        if EncoderTask.CLASSIFY in self.facts.tasks:
            return "ranks" if self.is_ranker else "classes"
        return " and ".join(_WORDS[task] for task in sorted(_WORDS.keys() & self.facts.tasks))

    def check_task(self, *tasks: EncoderTask) -> EncoderTask:
        """Return the first of some tasks that the model does.

        Raises:
            WrongTask: it does none.
        """
        task = next((task for task in tasks if task in self.facts.tasks), None)
        if task is None:
            raise WrongTask(
                f"the model served here is an encoder for {self.words}, which is not what this route is for"
            )
        return task

    def check_ranker(self) -> None:
        """Raise WrongTask unless it ranks."""
        if not self.is_ranker:
            raise WrongTask(f"the model served here is an encoder for {self.words}; ranks need one with a single class")

    def check_count(self, field: str, count: int) -> None:
        """Raise InvalidRequest for no text, or for more than a request may have."""
        if count == 0:
            raise InvalidRequest(f"`{field}` cannot be empty", field)
        if count > self._max_texts:
            raise BatchSizeExceeded(f"`{field}` may hold at most {self._max_texts} texts. Given: {count}", field)

    async def tokens_of(self, texts: Sequence[TextOrPair], options: TokenizeOptions) -> list[EncodedText]:
        """Tokenize texts and pairs, none of them empty.

        Raises:
            InvalidRequest: one is empty, cannot be tokenized, or is longer than the model takes.
        """
        for place, text in enumerate(texts):
            if not text or text == ("", ""):
                at = f"item {place} of `{options.field}`" if len(texts) > 1 else f"`{options.field}`"
                raise InvalidRequest(f"{at} cannot be empty", options.field)
        encodings = await self.texts.encode(texts, options.truncate)
        self.check_lengths(encodings, options.field)
        return encodings

    def check_lengths(self, encodings: Sequence[EncodedText], field: str) -> None:
        """Raise InvalidRequest for the first text without a token, or with more than the model takes."""
        max_tokens = self.engine.limits.max_input_tokens
        for place, encoding in enumerate(encodings):
            at = f"item {place} of `{field}`" if len(encodings) > 1 else f"`{field}`"
            if not encoding.num_tokens:
                raise InvalidRequest(f"{at} has no tokens", field)
            if encoding.num_tokens > max_tokens:
                raise ContextTooLong(f"{at} must have at most {max_tokens} tokens. Given: {encoding.num_tokens}", field)

    async def health(self) -> None:
        """Raise a FunitelError when no replica answers."""
        await self.engine.health()

    async def close(self) -> None:
        """Let running requests finish, then close the engine."""
        await self.engine.close()
