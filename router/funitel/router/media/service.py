"""The media of a model's requests: fetch, decode and process them, and put them into prompts."""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer

from funitel.proto.errors import InvalidRequest, Overloaded
from funitel.proto.step import MediaInput, MediaKind
from funitel.router.core.request import RequestMedia
from funitel.router.media import expand
from funitel.router.media.cache import Key, PreparedCache
from funitel.router.media.families import ImageFamily, family_of
from funitel.router.media.fetch import Fetcher
from funitel.router.media.interface import MediaSource, PreparedMedia
from funitel.router.media.plan import Call, Plan, Size
from funitel.router.sandbox.pool import Killed, SandboxPool, WorkerUnavailable
from funitel.router.settings import RouterSettings
from funitel.router.text.control_text import Spans
from funitel.router.text.model_files import ModelFiles

logger = logging.getLogger(__name__)

ITEMS_AT_ONCE = 4  # of a request
DETAILS = ("", "auto", "low", "high")
MAX_PROCESSED_BYTES = 255 << 20  # of one image: less than a message to a shard may have
MAX_REQUEST_BYTES = 1 << 30  # of all processed items of a request
MAX_OWN_BYTES = 2 << 30  # of processed items of requests that are prepared, for each key
MAX_PREPARING_BYTES = 4 << 30  # for all
MAX_WAITING_BYTES = 256 << 20  # of files that wait or are decoded, for each key
LARGE_BYTES = 1 << 20  # hashed in a thread
TIME_LIMIT_SECONDS = 60.0
CPU_LIMIT_SECONDS = 20.0
NICENESS = 10
BASE_MEMORY_BYTES = 512 << 20
BYTES_PER_PIXEL = 24  # a decoded image, with transparency, its background, what they become, and what it is resized to


class MediaService:
    """What the API knows of media of one model. Event loop only."""

    def __init__(
        self,
        settings: RouterSettings,
        family: ImageFamily,
        *,
        fetcher: Fetcher | None = None,
        has_several_keys: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            settings: of the router.
            family: of the model.
            fetcher: of images; one of the settings when not given.
            has_several_keys: whether one API key must leave a process to others.
        """
        self.kinds = frozenset({MediaKind.IMAGE})
        self.placeholders = {MediaKind.IMAGE: family.placeholder_id}
        self._family = family
        self._settings = settings
        self._fetcher = fetcher or Fetcher(settings)
        self._cache = PreparedCache(settings.media_processed_cache_mb << 20)
        self._waiting_bytes: Counter[bytes] = Counter()  # by key
        self._preparing_bytes: Counter[bytes] = Counter()  # by key
        self._processor = json.dumps(family.planner.to_json(), sort_keys=True).encode()
        self._processes = SandboxPool(
            "funitel.router.media.worker",
            {
                "planner": family.planner.to_json(),
                "max_pixels": settings.max_media_pixels,
                "max_bytes": MAX_PROCESSED_BYTES,
            },
            most=settings.validation_workers,
            time_limit=TIME_LIMIT_SECONDS,
            cpu_limit=CPU_LIMIT_SECONDS,
            memory_limit=BASE_MEMORY_BYTES + 2 * MAX_PROCESSED_BYTES + BYTES_PER_PIXEL * settings.max_media_pixels,
            max_answer_bytes=MAX_PROCESSED_BYTES + LARGE_BYTES,
            niceness=NICENESS,
            has_several_keys=has_several_keys,
        )

    @classmethod
    def create(cls, settings: RouterSettings, files: ModelFiles, tokenizer: Tokenizer) -> "MediaService | None":
        """Make the service of a model folder; None where the model takes text only, or its family is not known.

        Raises:
            StartupError: the folder's processor files are not valid, or the tokenizer lacks the placeholder.
        """
        family = family_of(files, tokenizer)
        return None if family is None else cls(settings, family, has_several_keys=settings.has_several_keys)

    def marker(self, kind: MediaKind) -> str:
        """What the chat template writes for an item of a kind, such as <image>."""
        assert kind in self.kinds
        return self._family.marker

    def prompt_marker(self, kind: MediaKind) -> str:
        """What a prompt without a template has for an item: the marker, and what the template writes around it."""
        assert kind in self.kinds
        return self._family.prompt_marker

    async def prepare(self, sources: Sequence[MediaSource], owner: bytes) -> list[PreparedMedia]:
        """Fetch, decode and process all media items of a request, in the order of the prompt.

        Args:
            sources: the items.
            owner: hash of the API key, for fairness.

        Raises:
            InvalidRequest: an item cannot be had, is not an image, exceeds a limit, or its kind is not taken.
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
                f"`{place}`: the images of the request have more than {num_bytes + size - 1} bytes when processed, at "
                f"most {MAX_REQUEST_BYTES} are taken",
                place,
            )
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
                raise InvalidRequest(
                    f"`{place}` is image {index + 1} of {len(sources)}: at most {most} are taken (--max-media-items)",
                    place,
                )

    async def _prepare(self, source: MediaSource, call: Call, owner: bytes) -> PreparedMedia:
        estimate = len(source.data or b"") or len(source.url) // 4 * 3
        self._check_room(owner, estimate)
        data = await self._fetcher.get(source, owner)
        key: Key = (await _digest(data), self._family.planner.variant(call).encode())
        if not self._settings.share_prefixes:
            key += (owner,)  # what is cached for others must not be found out by its time
        item = self._cache.get(key)
        if item is None:
            self._check_room(owner, len(data))
            self._waiting_bytes[owner] += len(data)
            try:
                item = await self._process(source.place, data, call, owner)
            finally:
                self._waiting_bytes[owner] -= len(data)
                self._waiting_bytes = +self._waiting_bytes
            self._cache.put(key, item)
        return item

    def _check_room(self, owner: bytes, num_bytes: int) -> None:
        waiting = self._waiting_bytes[owner]
        if waiting and waiting + num_bytes > MAX_WAITING_BYTES:
            raise Overloaded(": images of this client wait to be decoded", reason="media")

    async def _process(self, place: str, data: bytes, call: Call, owner: bytes) -> PreparedMedia:
        try:
            task = {"detail": call.detail, "is_alone": call.is_alone}
            found, values = await self._processes.run_attached(task, data, owner)
        except Killed as limit:
            raise InvalidRequest(f"`{place}` cannot be decoded: {limit}", place) from None
        except WorkerUnavailable as problem:
            logger.warning("an image cannot be decoded: %s", problem)
            raise Overloaded(": no process can be started to decode an image", reason="media") from None
        if isinstance(found, str):
            raise InvalidRequest(f"`{place}` {found}", place)
        plan = self._family.planner.plan(Size(*found), call)
        if len(values) != plan.num_bytes:
            raise InvalidRequest(
                f"`{place}` cannot be decoded: {len(values)} of {plan.num_bytes} bytes came of it", place
            )
        return PreparedMedia(await self._input(plan, values), plan.text, plan.runs)

    async def _input(self, plan: Plan, values: bytes) -> MediaInput:
        facts = json.dumps([plan.shape, plan.grid, plan.size]).encode()
        return MediaInput(
            key=await _digest(self._processor, facts, values),
            kind=MediaKind.IMAGE,
            shape=plan.shape,
            values=values,
            num_features=sum(plan.runs),
            grid=plan.grid,
            size=plan.size,
        )

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
        await self._processes.close()


async def _digest(*parts: bytes) -> bytes:
    """SHA-256 of some bytes, each behind its length."""
    if sum(map(len, parts)) > LARGE_BYTES:
        return await asyncio.to_thread(_hash, parts)
    return _hash(parts)


def _hash(parts: Sequence[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
