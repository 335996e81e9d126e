"""What encoders of media make, and what they are asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from funitel.proto.step import MediaInput, MediaKind

Yield = Callable[[], None]
"""Called between two small parts of an encoder's work: it returns once the next may be computed."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaFeatures:
    """The features of one media item, each as wide as a hidden state of the decoder.

    `deep` are added to the residual behind layer 0, layer 1 and so on, where the model has such.
    """

    features: torch.Tensor  # [num_features, hidden_size]
    deep: tuple[torch.Tensor, ...] = ()  # each [num_features, hidden_size]

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(each.nbytes for each in (self.features, *self.deep))


class MediaEncoder(Protocol):
    """An encoder of images or sounds. It knows neither calls nor the cache.

    It is registered by giving a `FeatureService` of it to `make_executor`.
    """

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """Kinds of media that it takes."""

    @property
    def feature_bytes(self) -> int:
        """Memory of one feature, `deep` included."""

    @property
    def has_whole_spans(self) -> bool:
        """Whether tokens of one item see each other."""

    @property
    def has_axes(self) -> bool:
        """Whether rotary positions of the decoder have three axes, which the grids of items set."""

    @property
    def placeholder_ids(self) -> dict[MediaKind, int]:
        """Tokens that take a feature; none where features are not put in the place of embeddings."""

    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        """Compute the features of one item, alike on every rank.

        Raises:
            InvalidRequest: shape, grid or number of features do not fit the model.
        """

    def has_batches(self, kind: MediaKind) -> bool:
        """Whether `encode_alike` takes several items of a kind."""

    def encode_alike(self, media: Sequence[MediaInput], pause: Yield) -> list[MediaFeatures]:
        """Compute the features of items of one kind, shape, grid and size in one forward, up to rounding as alone.

        Raises: as `encode`; no item has features then.
        """
