"""Open the media of a model folder: the encoder that its architecture has, and the cache of features."""

import logging
import re
from math import prod
from pathlib import Path

import torch

from funitel.model_server.checkpoint.storage import open_file
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.integrity import read_json, weight_files
from funitel.model_server.media.families.both import SeveralEncoders
from funitel.model_server.media.families.encoder import VisionEncoder
from funitel.model_server.media.families.pixels import read_rules
from funitel.model_server.media.families.sounds import SOUND_FAMILIES, SoundEncoder
from funitel.model_server.media.families.table import FAMILIES
from funitel.model_server.media.families.tower import load_tower
from funitel.model_server.media.interface import MediaEncoder
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


_SOUND_TENSORS = re.compile(r"(model\.)?(audio_tower|multi_modal_projector|embed_audio)\.")


def tower_bytes(folder: Path, architecture: str, dtype: torch.dtype, device: torch.device) -> int:
    """What `open_media` will hold of the checkpoint where no setting says otherwise; nothing is read but headers."""
    config, row = read_json(folder / "config.json"), FAMILIES.get(architecture)
    taken: list[re.Pattern[str]] = []
    if row is not None and read_rules(folder, row.statistics, normalises=row.normalises) is not None:
        taken.append(_TENSORS)
    if architecture in SOUND_FAMILIES and config.get("audio_config") is not None:
        taken.append(_SOUND_TENSORS)
    if not taken:
        return 0
    size = 4 if device.type == "cpu" else dtype.itemsize
    files = {name: file for file, names in map(open_file, weight_files(folder)) for name in names}
    held = {name: file for name, file in files.items() if any(each.match(name) for each in taken)}
    return size * sum(prod(file.get_slice(name).get_shape()) for name, file in held.items())


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
    config, max_bytes = read_json(folder / "config.json"), cache_bytes(settings, device)
    weights = Weights(folder, torch.float32 if device.type == "cpu" else dtype, device, is_shown=False)
    encoders: list[MediaEncoder] = []
    reasons = []
    if config.get("vision_config") is not None:
        row = FAMILIES.get(architecture)
        rules = None if row is None else read_rules(folder, row.statistics, normalises=row.normalises)
        reason = _why_none(settings, max_bytes, "images")
        if row is None:
            reasons.append(f"no vision family of the table is for {architecture}")
        elif reason is not None or rules is None:
            reasons.append(reason or f"{folder} has no preprocessor_config.json")
        else:
            encoders.append(VisionEncoder(row, load_tower(row.model, row.left_out, folder, weights), rules, device))
    if config.get("audio_config") is not None and (sounds := SOUND_FAMILIES.get(architecture)) is not None:
        reason = _why_none(settings, max_bytes, "sounds")
        if reason is not None:
            reasons.append(reason)
        else:
            encoders.append(SoundEncoder(sounds, load_tower(sounds.model, sounds.left_out, folder, weights), device))
    if reasons:
        logger.info("%s: %s", "not all media are taken" if encoders else "text alone is served", "; ".join(reasons))
    if not encoders:
        return None
    kinds = sorted(kind.name.lower() for each in encoders for kind in each.kinds)
    logger.info(
        "media are taken: kinds=%s precision=%s weight_bytes=%d media_cache_bytes=%d",
        *(",".join(kinds), weights.dtype, weights.held_bytes, max_bytes),
    )
    return FeatureService(encoders[0] if len(encoders) == 1 else SeveralEncoders(encoders), max_bytes, device), weights


def _why_none(settings: ModelServerSettings, max_bytes: int, noun: str) -> str | None:
    """Why the settings leave no room for media; None where they do."""
    if not max_bytes:
        return "--media-cache-gb is 0"
    if settings.stages is not None or settings.placing is not None:
        return f"{noun} are not for {settings.placing or f'--partition {settings.partition}'}"
    return None
