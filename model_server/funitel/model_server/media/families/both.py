"""The encoders of a model that takes media of several kinds, as one."""

from collections.abc import Sequence

from funitel.model_server.media.interface import MediaEncoder, MediaFeatures, Yield
from funitel.proto.step import MediaInput, MediaKind


class SeveralEncoders:
    """A `MediaEncoder` of several, each for kinds of its own. Features of all are as large."""

    def __init__(self, encoders: Sequence[MediaEncoder]) -> None:
        self._by_kind = {kind: encoder for encoder in encoders for kind in encoder.kinds}
        self.kinds = frozenset(self._by_kind)
        self.feature_bytes = max(each.feature_bytes for each in encoders)
        self.has_whole_spans = any(each.has_whole_spans for each in encoders)
        self.has_axes = any(each.has_axes for each in encoders)
        self.placeholder_ids = {kind: token for each in encoders for kind, token in each.placeholder_ids.items()}

    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        """See MediaEncoder; the kind is one of `kinds`."""
        return self._by_kind[media.kind].encode(media, pause)

    def has_batches(self, kind: MediaKind) -> bool:
        """See MediaEncoder."""
        return self._by_kind[kind].has_batches(kind)

    def encode_alike(self, media: Sequence[MediaInput], pause: Yield) -> list[MediaFeatures]:
        """See MediaEncoder."""
        return self._by_kind[media[0].kind].encode_alike(media, pause)
