"""The media of a model's requests: fetch, decode and process them, and put them into prompts."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from funitel.proto.step import MediaKind
from funitel.router.core.request import RequestMedia
from funitel.router.media import expand
from funitel.router.media.interface import MediaSource, PreparedMedia
from funitel.router.settings import RouterSettings
from funitel.router.text.control_text import Spans
from funitel.router.text.model_files import ModelFiles


class MediaService:
    """What the API knows of media of one model. Event loop only."""

    kinds: frozenset[MediaKind]
    placeholders: dict[MediaKind, int]  # the token that takes a feature, by kind

    @classmethod
    def create(cls, settings: RouterSettings, files: ModelFiles, tokenizer: Tokenizer) -> "MediaService | None":
        """Make the service of a model folder; None where the model takes text only, or its family is not known.

        Raises:
            StartupError: the folder's processor files are not valid, or the tokenizer lacks the placeholder.
        """
        raise NotImplementedError

    def marker(self, kind: MediaKind) -> str:
        """What the chat template writes for an item of a kind, such as <image>."""
        raise NotImplementedError

    def prompt_marker(self, kind: MediaKind) -> str:
        """What a prompt without a template has for an item: the marker, and what the template writes around it."""
        raise NotImplementedError

    async def prepare(self, sources: Sequence[MediaSource], owner: bytes) -> list[PreparedMedia]:
        """Fetch, decode and process all media items of a request, in the order of the prompt.

        Args:
            sources: the items.
            owner: hash of the API key, for fairness.

        Raises:
            InvalidRequest: an item cannot be had, is not an image, exceeds a limit, or its kind is not taken.
            Overloaded: too many items of this owner wait.
        """
        raise NotImplementedError

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
        raise NotImplementedError
