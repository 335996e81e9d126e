"""Flags that some models do not honour."""

from collections.abc import Mapping
from pathlib import Path

from funitel.model_server.quantized.config import check_flag
from funitel.model_server.quantized.published import find_quantization
from funitel.model_server.settings import NATIVE, ModelServerSettings
from funitel.proto.errors import SettingsError


def decoder_flags(settings: ModelServerSettings) -> dict[str, object]:
    """The flags that change the answers of decoders in the registry, with their values."""
    return {
        "--quantize": settings.quantize,
        "--kv-cache-dtype": settings.kv_cache_dtype,
        "--rope-scaling": settings.rope_scaling,
        "--rope-factor": settings.rope_factor,
        "--media-cache-gb": settings.media_cache_gb or None,
    }


def check_honoured(given: Mapping[str, object], models: str) -> None:
    """Raise SettingsError where a flag of `given` has a value, which `models` do not honour."""
    for flag, value in given.items():
        if value is not None:
            raise SettingsError(f"{flag} {value} is not for {models}")


def check_engine(settings: ModelServerSettings, models: str) -> None:
    """Raise SettingsError for an `--engine` of others where `models` are those that only our own code computes."""
    if settings.engine not in (None, NATIVE):
        raise SettingsError(f"--engine {settings.engine} is not for {models}")


def check_quantize(asked: str | None, folder: Path, models: str) -> None:
    """Raise SettingsError for a `--quantize` that does not confirm what a checkpoint of `models` says of itself."""
    quantization = find_quantization(folder)
    if quantization is None:
        check_honoured({"--quantize": asked}, models)
    else:
        check_flag(asked, quantization)
