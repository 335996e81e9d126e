"""A media service whose images are made of their URLs, and the requests and facts that go with it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tokenizers

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaFacts, MediaInput, MediaKind, MediaSpan
from funitel.router.core.request import RequestMedia
from funitel.router.media.interface import MediaSource, PreparedMedia
from funitel.router.media.service import MediaService

IMAGE = "<image>"
RUNS = (3, 2)  # placeholders of an image, with a comma between
NUM_TOKENS = 6
FACTS = MediaFacts(kinds=frozenset({MediaKind.IMAGE}), cache_bytes=1000, feature_bytes=10)


def key_of(url: str) -> bytes:
    return hashlib.sha256(url.encode()).digest()


def image(url: str, num_features: int = 5) -> MediaInput:
    return MediaInput(
        key=key_of(url), kind=MediaKind.IMAGE, shape=(1, 1, 1, 3), values=b"abc", num_features=num_features
    )


def placed(url: str, position: int, length: int = NUM_TOKENS, num_features: int = 5) -> RequestMedia:
    return RequestMedia(MediaSpan(key_of(url), position, length), image(url, num_features))


@dataclass
class FakeMedia(MediaService):
    """Prepares every image but those with "bad" in their URL; `seen` are those that were asked for."""

    placeholder: int
    kinds: frozenset[MediaKind] = frozenset({MediaKind.IMAGE})
    seen: list[MediaSource] = field(default_factory=list)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.placeholders = {MediaKind.IMAGE: self.placeholder}

    def marker(self, kind: MediaKind) -> str:
        return IMAGE

    def prompt_marker(self, kind: MediaKind) -> str:
        return f"({IMAGE})"

    async def prepare(self, sources: Sequence[MediaSource], owner: bytes) -> list[PreparedMedia]:
        self.seen += sources
        bad = next((source for source in sources if "bad" in source.url), None)
        if bad is not None:
            raise InvalidRequest(f"`{bad.place}` is no image", bad.place)
        return [PreparedMedia(image(source.url), f"{IMAGE},{IMAGE}", RUNS) for source in sources]

    async def close(self) -> None:
        self.is_closed = True


def with_images(model: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMedia:
    """Let a model folder take images: its tokenizer has the placeholder."""
    path = str(model / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_special_tokens([IMAGE])
    tokenizer.save(path)
    media = FakeMedia(tokenizer.token_to_id(IMAGE))
    monkeypatch.setattr(MediaService, "create", lambda *_: media)
    return media
