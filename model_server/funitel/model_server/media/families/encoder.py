"""The encoder of images of one checkpoint."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from funitel.model_server.media.families.pixels import PixelRules
from funitel.model_server.media.families.table import TowerRow
from funitel.model_server.media.interface import MediaFeatures, Yield
from funitel.model_server.media.small_parts import SmallParts
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaInput, MediaKind


class VisionEncoder:
    """A vision tower as a `MediaEncoder`.

    Args:
        row: its family.
        model: see `load_tower`.
        rules: what becomes of pixels.
        device: of the model.
    """

    kinds = frozenset([MediaKind.IMAGE])

    def __init__(self, row: TowerRow, model: Any, rules: PixelRules, device: torch.device) -> None:
        config = model.config
        self.has_axes = row.has_axes
        self.has_whole_spans = row.has_whole_spans(config)
        self.placeholder_ids = {MediaKind.IMAGE: int(config.image_token_id)}
        num_deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        dtype = next(iter(model.parameters())).dtype
        self.feature_bytes = config.get_text_config().hidden_size * dtype.itemsize * (1 + num_deep)
        self._row = row
        self._model = model
        self._rules = rules
        self._device = device

    @torch.inference_mode()
    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        """See MediaEncoder."""
        [found] = self.encode_alike([media], pause)
        return found

    def has_batches(self, kind: MediaKind) -> bool:
        """See MediaEncoder."""
        return self._row.has_batches

    @torch.inference_mode()
    def encode_alike(self, media: Sequence[MediaInput], pause: Yield) -> list[MediaFeatures]:
        """See MediaEncoder."""
        is_cut = self._device.type == "cpu"
        with SmallParts(pause) if is_cut else nullcontext():
            each = [self._inputs(item) for item in media]
            inputs = {name: torch.cat([own[name] for own in each]).to(self._device) for name in each[0]}
            found = self._row.features(self._model, self._model.get_image_features(**inputs, return_dict=True))
            parts = [torch.chunk(features, len(media)) for features in (found.features, *found.deep)]
        alone = [[part[place].contiguous() for part in parts] for place in range(len(media))]
        return [MediaFeatures(features, tuple(deep)) for features, *deep in alone]

    def _inputs(self, media: MediaInput) -> dict[str, torch.Tensor]:
        """What the tower takes of an item."""
        return self._row.inputs(self._model, self._rules.normalised(_tiles_of(media), self._device), media)


def _tiles_of(media: MediaInput) -> torch.Tensor:
    """The tiles of an item: [n, height, width, 3] uint8."""
    if len(media.shape) != 4 or not all(media.shape) or media.shape[3] != 3:
        raise InvalidRequest(f"shape must be tiles, height, width and 3, given {list(media.shape)}", "shape")
    if len(media.values) != math.prod(media.shape):
        raise InvalidRequest(
            f"values must be the {math.prod(media.shape)} bytes of shape, given {len(media.values)}", "values"
        )
    return torch.from_numpy(np.frombuffer(media.values, dtype=np.uint8).reshape(media.shape).copy())
