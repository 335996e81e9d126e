"""The encoder of images of one checkpoint."""

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from funitel.model_server.media.families.pixels import PixelRules
from funitel.model_server.media.families.table import FamilyRow
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

    def __init__(self, row: FamilyRow, model: Any, rules: PixelRules, device: torch.device) -> None:
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
        tiles = _tiles_of(media)
        is_cut = self._device.type == "cpu"
        with SmallParts(pause) if is_cut else nullcontext():
            pixels = self._rules.normalised(tiles, self._device)
            inputs = self._row.inputs(self._model, pixels, media)
            on_device = {name: each.to(self._device) for name, each in inputs.items()}
            found = self._row.features(self._model, self._model.get_image_features(**on_device, return_dict=True))
        return MediaFeatures(found.features.contiguous(), tuple([each.contiguous() for each in found.deep]))


def _tiles_of(media: MediaInput) -> torch.Tensor:
    """The tiles of an item: [n, height, width, 3] uint8."""
    if len(media.shape) != 4 or not all(media.shape) or media.shape[3] != 3:
        raise InvalidRequest(f"shape must be tiles, height, width and 3, given {list(media.shape)}", "shape")
    if len(media.values) != math.prod(media.shape):
        raise InvalidRequest(
            f"values must be the {math.prod(media.shape)} bytes of shape, given {len(media.values)}", "values"
        )
    return torch.from_numpy(np.frombuffer(media.values, dtype=np.uint8).reshape(media.shape).copy())
