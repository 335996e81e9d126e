"""Pixels as an image processor of transformers gives them to a model: scaled, normalised, channels first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.files.integrity import read_json
from funitel.proto.errors import WeightsError

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and standard deviation of the channels, where a folder does not say."""
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NONE = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]

_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class PixelRules:
    """What becomes of the channels of a pixel: (value * factor - mean) / std."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, tiles: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Tiles [n, height, width, 3] uint8 as float32 [n, 3, height, width] on a device."""
        pixels = tiles.to(device).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        mean, std = (torch.tensor(each, device=device).view(1, -1, 1, 1) for each in (self.mean, self.std))
        return pixels.mul_(self.factor).sub_(mean).div_(std)


def read_rules(folder: Path, usual: Statistics, *, normalises: bool) -> PixelRules | None:
    """The rules of a model folder; None where it has none.

    Args:
        folder: with preprocessor_config.json, or processor_config.json with `image_processor`.
        usual: mean and standard deviation of the family's processor.
        normalises: whether that subtracts them where the folder does not say.

    Raises:
        WeightsError: a value is not what it has to be.
    """
    found = _read(folder)
    if found is None:
        return None
    path, config = found
    does = {name: config.get(name, usually) for name, usually in _DOES.items()}
    if config.get("do_normalize", normalises):
        mean, std = (_channels(path, config, name, usually) for name, usually in zip(_STATISTICS, usual, strict=True))
    else:
        mean, std = NONE
    factor = config.get("rescale_factor", 1 / 255) if does["do_rescale"] else 1.0
    if not _is_number(factor) or not factor > 0 or not all(each > 0 for each in std):
        raise WeightsError(f"{path}: rescale_factor and image_std must be > 0, given {factor!r} and {list(std)}")
    return PixelRules(float(factor), mean, std)


_DOES = {"do_rescale": True}
_STATISTICS = ("image_mean", "image_std")


def _read(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    for name in _FILES:
        path = folder / name
        if path.is_file():
            config = read_json(path)
            config = config.get("image_processor", config)
            if isinstance(config, Mapping) and any(key.startswith(("image_", "do_", "size")) for key in config):
                return path, config
    return None


def _channels(path: Path, config: Mapping[str, Any], name: str, usual: Sequence[float]) -> tuple[float, ...]:
    value = config.get(name)
    value = usual if value is None else [value] * 3 if _is_number(value) else value
    if not isinstance(value, Sequence) or len(value) != 3 or not all(map(_is_number, value)):
        raise WeightsError(f"{path}: {name} must be 3 finite numbers, given {value!r}")
    return tuple(map(float, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
