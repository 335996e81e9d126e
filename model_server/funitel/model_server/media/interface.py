"""What encoders of media make, and what they are asked."""

from collections.abc import Callable
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
    """An encoder of images or sounds. It knows neither calls nor the cache."""

    kinds: frozenset[MediaKind]
    has_whole_spans: bool
    placeholder_ids: dict[MediaKind, int]  # token that takes a feature

    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        """Compute the features of one item, alike on every rank.

        Raises:
            InvalidRequest: shape, grid or number of features do not fit the model.
        """
