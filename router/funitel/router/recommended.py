"""The sampling recommended for a model, used on `/v1` where a request says nothing about sampling.

`generation_config.json` says it for hub checkpoints that sample by default; `funitel.json`, written beside converted
weights, for models of the catalogue. Native routes keep TGI's defaults.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.proto.errors import StartupError


@dataclass(frozen=True, slots=True)
class RecommendedSampling:
    """None where nothing is recommended; temperature 0 is greedy."""

    temperature: float | None = None
    top_p: float | None = None


def read_recommended(folder: Path) -> RecommendedSampling:
    """Read a model folder.

    Raises:
        StartupError: a file is not JSON, or recommends what cannot be.
    """
    values = _json(folder / "generation_config.json")
    if not values.get("do_sample"):
        values = _json(folder / "funitel.json").get("sampling", {})
    temperature, top_p = values.get("temperature"), values.get("top_p")
    for name, value, most in (("temperature", temperature, 100.0), ("top_p", top_p, 1.0)):
        if value is not None and not (isinstance(value, float | int) and 0 <= value <= most):
            raise StartupError(f"{folder} recommends {name} {value!r}, which must be >= 0 and <= {most}")
    return RecommendedSampling(temperature, None if top_p == 1.0 else top_p)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{path} is not readable JSON: {error}") from error
    return values if isinstance(values, dict) else {}
