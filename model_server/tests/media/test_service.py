"""The media of a shard: what is computed once, what is refused, and steps beside it."""

import threading
from concurrent.futures import wait

import pytest
import torch

from funitel.model_server.media.interface import MediaFeatures, Yield
from funitel.model_server.media.service import MediaService
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
        self.goes_on = threading.Event()
        self.goes_on.set()

    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        self.calls.append(media.key)
        while not self.goes_on.wait(0.001):
            pause()
        return MediaFeatures(torch.full((media.num_features, 2), float(len(self.calls))))


def sound(key: bytes, num_features: int = 3) -> MediaInput:
    return MediaInput(key=key, kind=MediaKind.AUDIO, shape=(1, 1), values=b"\0\0\0\0", num_features=num_features)


def test_an_item_is_encoded_once() -> None:
    encoder = Sounds()
    service = MediaService(encoder, 100, CPU)
    assert service.facts == MediaFacts(kinds=encoder.kinds, cache_bytes=100, feature_bytes=8)
    futures = [service.encode(sound(key)) for key in (b"a", b"b", b"a", b"b")]
    wait(futures)
    assert [future.result() for future in futures] == [24] * 4
    assert encoder.calls == [b"a", b"b"]
    assert service.features(b"b").features.tolist() == [[2.0, 2.0]] * 3
    service.drop([b"b", b"z"])
    with pytest.raises(InvalidRequest, match=r"^media key 62 is not encoded$"):
        service.features(b"b")


def test_what_has_no_room_is_refused_before_it_is_computed() -> None:
    encoder = Sounds()
    service = MediaService(encoder, 100, CPU)
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
    service = MediaService(encoder, 100, CPU)
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
