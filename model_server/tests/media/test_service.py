"""The media of a shard: what is computed once, what is refused, and steps beside it."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

import pytest
import torch

from funitel.model_server.media.interface import MediaFeatures, Yield
from funitel.model_server.media.service import MAX_BATCH_BYTES, FeatureService
from funitel.proto.errors import InvalidRequest, ResourceExhausted
from funitel.proto.step import MediaFacts, MediaInput, MediaKind

CPU = torch.device("cpu")


class Sounds:
    """An encoder of sounds with features of 8 bytes, as many as `num_features` says."""

    kinds = frozenset([MediaKind.AUDIO])
    feature_bytes = 8
    has_whole_spans = False
    has_axes = False
    placeholder_ids = {MediaKind.AUDIO: 7}

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.batches: list[int] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def has_batches(self, kind: MediaKind) -> bool:
        return True

    def encode_alike(self, media: Sequence[MediaInput], pause: Yield) -> list[MediaFeatures]:
        self.batches.append(len(media))
        return [self.encode(each, pause) for each in media]

    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        self.calls.append(media.key)
        while not self.goes_on.wait(0.001):
            pause()
        return MediaFeatures(torch.full((media.num_features, 2), float(len(self.calls))))


def sound(key: bytes, num_features: int = 3, num_bytes: int = 4) -> MediaInput:
    values = bytes(num_bytes)
    return MediaInput(key=key, kind=MediaKind.AUDIO, shape=(1, 1), values=values, num_features=num_features)


def test_an_item_is_encoded_once() -> None:
    encoder = Sounds()
    service = FeatureService(encoder, 100, CPU)
    assert service.facts == MediaFacts(kinds=encoder.kinds, cache_bytes=100, feature_bytes=8)
    futures = [service.encode(sound(key)) for key in (b"a", b"b", b"a", b"b")]
    wait(futures)
    assert [future.result() for future in futures] == [24] * 4
    assert encoder.calls == [b"a", b"b"]
    assert service.features(b"b").features.tolist() == [[2.0, 2.0]] * 3
    service.drop([b"b", b"z"])
    with pytest.raises(InvalidRequest, match=r"^media key 62 is not encoded$"):
        service.features(b"b")


def begun(encoder: Sounds, service: FeatureService) -> "Future[int]":
    """An item that is being encoded, behind which others wait."""
    encoder.goes_on.clear()
    found = service.encode(sound(b"begun", 1))
    while not encoder.calls:
        time.sleep(0.001)
    return found


def test_small_items_of_one_form_are_encoded_together() -> None:
    encoder = Sounds()
    service = FeatureService(encoder, 1000, CPU)
    futures = [begun(encoder, service)]
    asked = [sound(b"a"), sound(b"b"), sound(b"a"), sound(b"c"), sound(b"d", 5), sound(b"e"), sound(b"f")]
    asked += [sound(bytes([place]), 2, MAX_BATCH_BYTES // 2) for place in range(3)]
    futures += [service.encode(each) for each in asked]
    encoder.goes_on.set()
    assert [future.result(10) for future in futures] == [8] + [8 * each.num_features for each in asked]
    assert encoder.batches == [3, 2, 2]
    assert encoder.calls == [b"begun", b"a", b"b", b"c", b"d", b"e", b"f", b"\0", b"\1", b"\2"]


def test_items_that_have_no_room_together_are_encoded_one_by_one() -> None:
    encoder = Sounds()
    service = FeatureService(encoder, 60, CPU)
    futures = [begun(encoder, service), *(service.encode(sound(key)) for key in (b"a", b"b", b"c"))]
    left = service.encode(sound(b"left"))
    assert left.cancel()
    encoder.goes_on.set()
    assert [future.result(10) for future in futures[:3]] == [8, 24, 24]
    with pytest.raises(ResourceExhausted, match="the media cache is full"):
        futures[3].result(10)
    assert encoder.batches == []
    service.clear()
    assert b"left" not in encoder.calls


def test_what_has_no_room_is_refused_before_it_is_computed() -> None:
    encoder = Sounds()
    service = FeatureService(encoder, 100, CPU)
    service.encode(sound(b"a", 10)).result()
    with pytest.raises(ResourceExhausted, match="the media cache is full"):
        service.encode(sound(b"b", 5)).result()
    with pytest.raises(InvalidRequest, match="num_features need 104 bytes, more than the 100 of --media-cache-gb"):
        service.encode(sound(b"b", 13)).result()
    assert encoder.calls == [b"a"]
    service.drop([b"a"])
    assert service.encode(sound(b"b", 5)).result() == 40


def test_clearing_waits_for_what_is_encoded() -> None:
    encoder = Sounds()
    service = FeatureService(encoder, 100, CPU)
    encoder.goes_on.clear()
    encoding = service.encode(sound(b"a"))
    clearing = threading.Thread(target=service.clear)
    clearing.start()
    with service.step():  # goes on meanwhile
        assert not encoding.done()
    encoder.goes_on.set()
    clearing.join(10)
    assert encoding.done()
    assert len(service.cache) == 0
