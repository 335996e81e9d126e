"""The media of a shard: an encoder on a thread of its own, beside the steps, and the features that it has made."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from funitel.model_server.media.feature_cache import FeatureCache
from funitel.model_server.media.interface import MediaEncoder, MediaFeatures
from funitel.model_server.media.time_slices import TimeSlices
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaFacts, MediaInput


class MediaService:
    """What a rank does with media; there are no collectives in it.

    Args:
        encoder: computes features.
        max_bytes: of features that are kept.
        device: that of the model. On a CPU encoder and steps take turns; a GPU computes both.
    """

    def __init__(self, encoder: MediaEncoder, max_bytes: int, device: torch.device) -> None:
        self.encoder = encoder
        self.cache = FeatureCache(max_bytes)
        self._slices = TimeSlices() if device.type == "cpu" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="funitel-media")

    @property
    def facts(self) -> MediaFacts:
        """What the router is told."""
        return MediaFacts(
            kinds=self.encoder.kinds,
            has_whole_spans=self.encoder.has_whole_spans,
            cache_bytes=self.cache.max_bytes,
            feature_bytes=self.encoder.feature_bytes,
        )

    def step(self) -> AbstractContextManager[None]:
        """Compute a step inside, while the encoder waits."""
        return nullcontext() if self._slices is None else self._slices.step()

    def encode(self, media: MediaInput) -> Future[int]:
        """Compute the features of one item and keep them, behind those that were asked for before; gives their bytes.

        Nothing is computed for a key that is known. Of the future's errors are InvalidRequest: the item does not fit
        the model, or never the cache; and ResourceExhausted: other items have to be dropped first.
        """
        return self._thread.submit(self._encode, media)

    def _encode(self, media: MediaInput) -> int:
        known = self.cache.get(media.key)
        if known is not None:
            return known.num_bytes
        if media.kind not in self.encoder.kinds:
            raise InvalidRequest(f"kind {media.kind.name.lower()} is not taken by this model", "kind")
        self.cache.check_room(media.num_features * self.encoder.feature_bytes)
        if self._slices is None:
            found = self.encoder.encode(media, _go_on)
        else:
            with self._slices.encoding():
                found = self.encoder.encode(media, self._slices.pause)
        if len(found.features) != media.num_features:
            raise InvalidRequest(
                f"num_features must be {len(found.features)} for this item, given {media.num_features}", "num_features"
            )
        self.cache.put(media.key, found)
        return found.num_bytes

    def features(self, key: bytes) -> MediaFeatures:
        """The features of an item. Raises: InvalidRequest: it is not encoded."""
        found = self.cache.get(key)
        if found is None:
            raise InvalidRequest(f"media key {key.hex()[:16]} is not encoded", "media")
        return found

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop features; an unknown key is no error."""
        self.cache.drop(keys)

    def clear(self) -> None:
        """Drop all features, once what is being encoded is done."""
        self._thread.submit(self.cache.clear).result()


def _go_on() -> None:
    """Nothing waits for a GPU that computes both."""
