"""The media of a model's requests: fetch, decode and process them, and put them into prompts."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer

from funitel.proto.errors import InvalidRequest, Overloaded
from funitel.proto.step import MediaKind
from funitel.router.core import request_context
from funitel.router.core.request import RequestMedia
from funitel.router.media import expand
from funitel.router.media.cache import Key, PreparedCache
from funitel.router.media.families import family_of
from funitel.router.media.fetch import Fetcher
from funitel.router.media.images import ImageProcessor
from funitel.router.media.interface import MediaSource, PreparedMedia
from funitel.router.media.plan import Call
from funitel.router.media.processor import Processor, digest
from funitel.router.media.sound_families import sound_family_of
from funitel.router.media.sounds import SoundProcessor
from funitel.router.settings import RouterSettings
from funitel.router.text.control_text import Spans
from funitel.router.text.model_files import ModelFiles

ITEMS_AT_ONCE = 4  # of a request
DETAILS = ("", "auto", "low", "high")
MAX_REQUEST_BYTES = 1 << 30  # of all processed items of a request
MAX_OWN_BYTES = 2 << 30  # of processed items of requests that are prepared, for each key
MAX_PREPARING_BYTES = 4 << 30  # for all
MAX_WAITING_BYTES = 256 << 20  # of files that wait or are decoded, for each key


class MediaService:
    """What the API knows of media of one model. Event loop only."""

    def __init__(
        self, settings: RouterSettings, processors: Sequence[Processor], *, fetcher: Fetcher | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            settings: of the router.
            processors: of the model, one for each kind of media that it takes.
            fetcher: of files; one of the settings when not given.
        """
        self.processors = {each.kind: each for each in processors}
        self.kinds = frozenset(self.processors)
        self.placeholders = {kind: each.placeholder_id for kind, each in self.processors.items()}
        self._settings = settings
        self._fetcher = fetcher or Fetcher(settings)
        self._cache = PreparedCache(settings.media_processed_cache_mb << 20)
        self._waiting_bytes: Counter[bytes] = Counter()  # by key
        self._preparing_bytes: Counter[bytes] = Counter()  # by key

    @classmethod
    def create(cls, settings: RouterSettings, files: ModelFiles, tokenizer: Tokenizer) -> "MediaService | None":
        """Make the service of a model folder; None where the model takes text only, or its family is not known.

        Raises:
            StartupError: the folder's processor files are not valid, or the tokenizer lacks the placeholder.
        """
        processors: list[Processor] = []
        if (images := family_of(files, tokenizer)) is not None:
            processors.append(ImageProcessor(settings, images))
        if (sounds := sound_family_of(files, tokenizer)) is not None:
            processors.append(SoundProcessor(settings, sounds))
        return cls(settings, processors) if processors else None

    def marker(self, kind: MediaKind) -> str:
        """What the chat template writes for an item of a kind, such as <image>."""
        return self.processors[kind].marker

    def prompt_marker(self, kind: MediaKind) -> str:
        """What a prompt without a template has for an item: the marker, and what the template writes around it."""
        return self.processors[kind].prompt_marker

    async def prepare(self, sources: Sequence[MediaSource], owner: bytes) -> list[PreparedMedia]:
        """Fetch, decode and process all media items of a request, in the order of the prompt.

        Args:
            sources: the items.
            owner: hash of the API key, for fairness.

        Raises:
            InvalidRequest: an item cannot be had, is not of its kind, exceeds a limit, or its kind is not taken.
            Overloaded: too many items of this owner wait, all take too much memory, or no process can be started.
        """
        self._check(sources)
        is_alone = len(sources) == 1
        semaphore = asyncio.Semaphore(ITEMS_AT_ONCE)
        num_bytes = 0  # of the items that are processed

        async def one(source: MediaSource) -> PreparedMedia:
            nonlocal num_bytes
            async with semaphore:
                item = await self._prepare(source, Call(source.detail or "auto", is_alone), owner)
            size = len(item.input.values)
            self._check_memory(source.place, num_bytes, size, owner)
            num_bytes += size
            self._preparing_bytes[owner] += size
            return item

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(source)) for source in sources]
        except BaseExceptionGroup as problems:
            raise problems.exceptions[0] from None
        finally:
            self._preparing_bytes[owner] -= num_bytes
            self._preparing_bytes = +self._preparing_bytes
        return [task.result() for task in tasks]

    def _check_memory(self, place: str, num_bytes: int, size: int, owner: bytes) -> None:
        """Raise where an item of `size` bytes more is too much for a request of `num_bytes`, or for all of them."""
        if num_bytes + size > MAX_REQUEST_BYTES:
            raise InvalidRequest(
                f"`{place}`: the images and sounds of the request have more than {num_bytes + size - 1} bytes when "
                f"processed, at most {MAX_REQUEST_BYTES} are taken",
                place,
            )
        if request_context.current().journal.is_replayed:  # another router has admitted it
            return
        own, others = self._preparing_bytes[owner], self._preparing_bytes.total()
        if own > num_bytes and own + size > MAX_OWN_BYTES or others > num_bytes and others + size > MAX_PREPARING_BYTES:
            raise Overloaded(": the images of requests that are prepared take too much memory", reason="media")

    def _check(self, sources: Sequence[MediaSource]) -> None:
        most = self._settings.max_media_items
        for index, source in enumerate(sources):
            place = source.place
            if source.kind not in self.kinds:
                raise InvalidRequest(
                    f"`{place}` is a {expand.NOUNS[source.kind]}, which this model does not take", place
                )
            if source.detail not in DETAILS:
                raise InvalidRequest(f"`{place}` has detail {source.detail!r}: it must be low, high or auto", place)
            if index >= most:
                noun = expand.NOUNS[source.kind]
                raise InvalidRequest(
                    f"`{place}` is {noun} {index + 1} of {len(sources)}: at most {most} are taken (--max-media-items)",
                    place,
                )

    async def _prepare(self, source: MediaSource, call: Call, owner: bytes) -> PreparedMedia:
        estimate = len(source.data or b"") or len(source.url) // 4 * 3
        self._check_room(owner, estimate)
        data = await self._fetcher.get(source, owner)
        processor = self.processors[source.kind]
        key: Key = (await digest(data), f"{source.kind.name} {processor.variant(call)}".encode())
        if not self._settings.share_prefixes:
            key += (owner,)  # what is cached for others must not be found out by its time
        item = self._cache.get(key)
        if item is None:
            self._check_room(owner, len(data))
            self._waiting_bytes[owner] += len(data)
            try:
                item = await processor.process(source.place, data, call, owner)
            finally:
                self._waiting_bytes[owner] -= len(data)
                self._waiting_bytes = +self._waiting_bytes
            self._cache.put(key, item)
        return item

    def _check_room(self, owner: bytes, num_bytes: int) -> None:
        waiting = self._waiting_bytes[owner]
        was_admitted = request_context.current().journal.is_replayed
        if waiting and waiting + num_bytes > MAX_WAITING_BYTES and not was_admitted:
            raise Overloaded(": images or sounds of this client wait to be decoded", reason="media")

    def insert(
        self, text: str, plain: Spans, prepared: Sequence[PreparedMedia], field: str = "messages"
    ) -> tuple[str, Spans]:
        """`expand.insert` with the markers of this model."""
        return expand.insert(text, plain, prepared, {kind: self.marker(kind) for kind in self.kinds}, field)

    def place(
        self, ids: Sequence[int], prepared: Sequence[PreparedMedia], field: str = "messages"
    ) -> tuple[list[int], tuple[RequestMedia, ...]]:
        """`expand.place` with the placeholders of this model."""
        return expand.place(ids, prepared, self.placeholders, field)

    async def close(self) -> None:
        """End the processes."""
        for each in self.processors.values():
            await each.close()
