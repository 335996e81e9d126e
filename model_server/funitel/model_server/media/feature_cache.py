"""The features of media items by key, bounded in bytes. What is dropped is the router's choice."""

from collections.abc import Iterable
from threading import Lock

from funitel.model_server.media.interface import MediaFeatures
from funitel.proto.errors import InvalidRequest, ResourceExhausted

SETTING = "--media-cache-gb"


class FeatureCache:
    """At most `max_bytes` of features. All methods may be called from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._found: dict[bytes, MediaFeatures] = {}
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Memory that all features take."""
        return self._used

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: bytes) -> MediaFeatures | None:
        """The features of an item; None where there are none."""
        return self._found.get(key)

    def check_room(self, num_bytes: int) -> None:
        """Check that so many bytes more have room.

        Raises:
            InvalidRequest: they never will.
            ResourceExhausted: other items have to be dropped first.
        """
        if num_bytes > self.max_bytes:
            raise InvalidRequest(
                f"num_features need {num_bytes} bytes, more than the {self.max_bytes} of {SETTING}", "num_features"
            )
        if num_bytes > self.max_bytes - self._used:
            raise ResourceExhausted(
                f"the media cache is full: {num_bytes} bytes are needed, "
                f"{self.max_bytes - self._used} of {self.max_bytes} are free; {SETTING} sets its size"
            )

    def put(self, key: bytes, features: MediaFeatures) -> None:
        """Keep the features of an item; those of the same key are replaced. Raises: as `check_room`."""
        with self._lock:
            former = self._found.pop(key, None)
            self._used -= 0 if former is None else former.num_bytes
            self.check_room(features.num_bytes)
            self._found[key] = features
            self._used += features.num_bytes

    def drop(self, keys: Iterable[bytes]) -> None:
        """Drop the features of items; an unknown key is no error."""
        with self._lock:
            for key in keys:
                former = self._found.pop(key, None)
                self._used -= 0 if former is None else former.num_bytes

    def clear(self) -> None:
        """Drop all features."""
        with self._lock:
            self._found.clear()
            self._used = 0
