"""The bound of the features that are kept."""

import pytest
import torch

from funitel.model_server.media.feature_cache import FeatureCache
from funitel.model_server.media.interface import MediaFeatures
from funitel.proto.errors import InvalidRequest, ResourceExhausted


def features(count: int) -> MediaFeatures:
    """Features of 8 bytes each, half of them added behind a layer."""
    return MediaFeatures(torch.zeros(count, 1), (torch.zeros(count, 1),))


def test_features_are_kept_until_they_are_dropped() -> None:
    cache = FeatureCache(100)
    first, second = features(5), features(7)
    cache.put(b"a", first)
    cache.put(b"b", second)
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (first, second, None)
    assert (len(cache), cache.used_bytes) == (2, 96)
    cache.drop([b"a", b"c"])
    assert (cache.get(b"a"), len(cache), cache.used_bytes) == (None, 1, 56)
    cache.put(b"b", features(10))
    assert cache.used_bytes == 80
    cache.clear()
    assert (cache.get(b"b"), len(cache), cache.used_bytes) == (None, 0, 0)


def test_a_full_cache_refuses_and_drops_nothing() -> None:
    cache = FeatureCache(100)
    cache.put(b"a", features(10))
    with pytest.raises(
        ResourceExhausted,
        match=r"^the media cache is full: 24 bytes are needed, 20 of 100 are free; --media-cache-gb sets its size$",
    ):
        cache.put(b"b", features(3))
    assert (len(cache), cache.used_bytes) == (1, 80)
    cache.check_room(20)
    with pytest.raises(InvalidRequest, match=r"^num_features need 101 bytes, more than the 100 of --media-cache-gb$"):
        cache.check_room(101)
