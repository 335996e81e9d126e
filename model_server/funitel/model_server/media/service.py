"""The media of a shard: an encoder on a thread of its own, beside the steps, and the features that it has made."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from funitel.model_server.media.feature_cache import FeatureCache
from funitel.model_server.media.interface import MediaEncoder, MediaFeatures, Yield
from funitel.model_server.media.time_slices import TimeSlices
from funitel.proto.errors import FunitelError, InvalidRequest
from funitel.proto.step import MediaFacts, MediaInput

MAX_BATCH_BYTES = 1 << 20
"""Of the values of items in one forward: 1,365 patches of 16 x 16 pixels. Larger ones gain nothing by company."""
_Asked = tuple[MediaInput, Future[int]]


class FeatureService:
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
        self._asked: deque[_Asked] = deque()  # the first in line first
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

        Small items of one form that were asked for one after the other are computed in one forward.
        Nothing is computed for a key that is known. Of the future's errors are InvalidRequest: the item does not fit
        the model, or never the cache; and ResourceExhausted: other items have to be dropped first.
        """
        future: Future[int] = Future()
        self._asked.append((media, future))
        self._thread.submit(self._encode_next)
        return future

    def _encode_next(self) -> None:
        """Encode the item that was asked for first, with others of its form, unless that was done with another."""
        if not self._asked:
            return
        batch = [self._asked.popleft()]
        budget = MAX_BATCH_BYTES - len(batch[0][0].values)
        first = batch[0][0]
        while self._asked and first.kind in self.encoder.kinds and self.encoder.has_batches(first.kind):
            budget -= len(self._asked[0][0].values)
            if budget < 0 or _form(self._asked[0][0]) != _form(first):
                break
            batch.append(self._asked.popleft())
        self._answer([asked for asked in batch if asked[1].set_running_or_notify_cancel()])

    def _answer(self, batch: Sequence[_Asked]) -> None:
        """Encode items of one form; after a failure each of several alone, so that only those fail that have to."""
        try:
            found = {media.key: self.cache.get(media.key) for media, _ in batch}
            missing = {media.key: media for media, _ in batch if found[media.key] is None}
            found |= self._encode(list(missing.values())) if missing else {}
        except Exception as error:
            if len(batch) > 1 and isinstance(error, FunitelError):
                for asked in batch:
                    self._answer([asked])
                return
            for _, future in batch:
                future.set_exception(error)
            return
        for media, future in batch:
            features = found[media.key]
            assert features is not None
            future.set_result(features.num_bytes)

    def _encode(self, media: Sequence[MediaInput]) -> dict[bytes, MediaFeatures]:
        """Compute the features of items of one form, and keep them; by key."""
        first = media[0]
        if first.kind not in self.encoder.kinds:
            raise InvalidRequest(f"kind {first.kind.name.lower()} is not taken by this model", "kind")
        self.cache.check_room(sum(each.num_features for each in media) * self.encoder.feature_bytes)
        if self._slices is None:
            found = self._features_of(media, _go_on)
        else:
            with self._slices.encoding():
                found = self._features_of(media, self._slices.pause)
        for each, own in zip(media, found, strict=True):
            if len(own.features) != each.num_features:
                raise InvalidRequest(
                    f"num_features must be {len(own.features)} for this item, given {each.num_features}",
                    "num_features",
                )
            self.cache.put(each.key, own)
        return {each.key: own for each, own in zip(media, found, strict=True)}

    def _features_of(self, media: Sequence[MediaInput], pause: Yield) -> list[MediaFeatures]:
        return self.encoder.encode_alike(media, pause) if len(media) > 1 else [self.encoder.encode(media[0], pause)]

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


def _form(media: MediaInput) -> tuple[object, ...]:
    """What items of one forward have in common."""
    return media.kind, media.shape, media.grid, media.size, media.num_features
