"""Open the media of a model folder: the encoder that its architecture has, and the cache of features."""

import logging
import re
from math import prod
from pathlib import Path

import torch

from funitel.model_server.checkpoint.storage import open_file
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.integrity import read_json, weight_files
from funitel.model_server.media.families.encoder import VisionEncoder
from funitel.model_server.media.families.pixels import read_rules
from funitel.model_server.media.families.sounds import SOUND_FAMILIES, SoundEncoder
from funitel.model_server.media.families.table import FAMILIES
from funitel.model_server.media.families.tower import load_tower
from funitel.model_server.media.service import FeatureService
from funitel.model_server.settings import ModelServerSettings

logger = logging.getLogger(__name__)

USUAL_GB = {"cpu": 0.5, "cuda": 2.0}
"""GiB of features where no setting says so."""


def cache_bytes(settings: ModelServerSettings, device: torch.device) -> int:
    """Bytes of features that a rank keeps; with 0 it takes no media."""
    asked = settings.media_cache_gb
    return int((USUAL_GB[device.type] if asked is None else asked) * 2**30)


_TENSORS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|connector|multi_modal_projector|embed_vision|image_newline)(\.|$)"
)


_SOUND_TENSORS = re.compile(r"(model\.)?(audio_tower|multi_modal_projector)\.")


def tower_bytes(folder: Path, architecture: str, dtype: torch.dtype, device: torch.device) -> int:
    """What `open_media` will hold of the checkpoint where no setting says otherwise; nothing is read but headers."""
    row, tensors = FAMILIES.get(architecture), _TENSORS
    if architecture in SOUND_FAMILIES:
        tensors = _SOUND_TENSORS
    elif row is None or read_rules(folder, row.statistics, normalises=row.normalises) is None:
        return 0
    size = 4 if device.type == "cpu" else dtype.itemsize
    files = {name: file for file, names in map(open_file, weight_files(folder)) for name in names}
    return size * sum(prod(file.get_slice(name).get_shape()) for name, file in files.items() if tensors.match(name))


def open_media(
    settings: ModelServerSettings, folder: Path, architecture: str, dtype: torch.dtype, device: torch.device
) -> tuple[FeatureService, Weights] | None:
    """The media of the model in `folder`, and the weights that count its tower; None where it takes text alone.

    The reason of the latter is logged where the model has a tower.

    Args:
        settings: of the shard.
        folder: of the model.
        architecture: that config.json names.
        dtype: of the tower, but on a CPU it is in float32.
        device: of the tower and of features.

    Raises:
        StartupError: the tower cannot be loaded.
    """
    if architecture in SOUND_FAMILIES:
        return _open_sounds(settings, folder, architecture, dtype, device)
    row, max_bytes = FAMILIES.get(architecture), cache_bytes(settings, device)
    if row is None or read_json(folder / "config.json").get("vision_config") is None:
        if row is None and read_json(folder / "config.json").get("vision_config") is not None:
            logger.info("text alone is served: no vision family of the table is for %s", architecture)
        return None
    rules = read_rules(folder, row.statistics, normalises=row.normalises)
    reason = _why_none(settings, max_bytes, "images")
    if reason is None and rules is None:
        reason = f"{folder} has no preprocessor_config.json"
    if reason is not None or rules is None:
        logger.info("text alone is served: %s", reason)
        return None
    weights = Weights(folder, torch.float32 if device.type == "cpu" else dtype, device, is_shown=False)
    model = load_tower(row.model, row.left_out, folder, weights)
    encoder = VisionEncoder(row, model, rules, device)
    logger.info(
        "images are taken: vision_tower=%s precision=%s weight_bytes=%d media_cache_bytes=%d",
        *(row.model, weights.dtype, weights.held_bytes, max_bytes),
    )
    return FeatureService(encoder, max_bytes, device), weights


def _open_sounds(
    settings: ModelServerSettings, folder: Path, architecture: str, dtype: torch.dtype, device: torch.device
) -> tuple[FeatureService, Weights] | None:
    """`open_media` of a model for sounds."""
    row, max_bytes = SOUND_FAMILIES[architecture], cache_bytes(settings, device)
    reason = _why_none(settings, max_bytes, "sounds")
    if reason is not None:
        logger.info("text alone is served: %s", reason)
        return None
    weights = Weights(folder, torch.float32 if device.type == "cpu" else dtype, device, is_shown=False)
    encoder = SoundEncoder(row, load_tower(row.model, row.left_out, folder, weights), device)
    logger.info(
        "sounds are taken: audio_tower=%s precision=%s weight_bytes=%d media_cache_bytes=%d",
        *(row.model, weights.dtype, weights.held_bytes, max_bytes),
    )
    return FeatureService(encoder, max_bytes, device), weights


def _why_none(settings: ModelServerSettings, max_bytes: int, noun: str) -> str | None:
    """Why the settings leave no room for media; None where they do."""
    if not max_bytes:
        return "--media-cache-gb is 0"
    if settings.stages is not None or settings.placing is not None:
        return f"{noun} are not for {settings.placing or f'--partition {settings.partition}'}"
    return None
