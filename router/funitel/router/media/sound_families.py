"""The table of model families that take sounds in prompts: how many features come of a sound, and what stands for it.

Sources: `processing_qwen2_audio.py`, `processing_voxtral.py` and `processing_gemma4.py` of transformers 5.23.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from funitel.proto.errors import StartupError
from funitel.router.audio.segments import FLOOR, FRAME, HOP, RATE, WINDOW, WINDOW_SECONDS
from funitel.router.media.families import FamilyFiles
from funitel.router.text.model_files import ModelFiles

logger = logging.getLogger(__name__)

WINDOW_FRAMES = WINDOW_SECONDS * RATE // HOP
_FRAMES_PER_POSITION = 2


class SoundPlan(NamedTuple):
    """What comes of a sound; `size` is what else the model has to know of it."""

    num_features: int
    size: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SoundFamily:
    """How a model takes sounds.

    Attributes:
        name: `model_type` of config.json.
        form: of the spectrogram, see `funitel.router.audio.window_worker`.
        num_mel_bins: of the spectrogram.
        plan: of numbers of samples and of frames.
        max_seconds: of a sound; None where the model has no bound of its own.
        marker: what the chat template writes for a sound.
        prompt_marker: what a prompt without a template has for one: the marker, and what the template has around it.
        text: what stands in place of the marker, with one placeholder.
        placeholder_id: that token.
    """

    name: str
    form: str
    num_mel_bins: int
    plan: Callable[[int, int], SoundPlan]
    max_seconds: float | None
    marker: str
    prompt_marker: str
    text: str
    placeholder_id: int


@dataclass(frozen=True, slots=True)
class SoundRow:
    """One family: its plan, and the text of its placeholder where the files do not say.

    `around` is what the template has around the marker, which is the placeholder; `ends` are the names of tokens that
    the processor puts around the placeholders.
    """

    plan: Callable[[Mapping[str, Any]], Callable[[int, int], SoundPlan]]
    placeholder: str
    around: str = "{}"
    max_seconds: float | None = None
    form: str = "windows"
    ends: tuple[str, str] | None = None


def sound_family_of(files: ModelFiles, tokenizer: Tokenizer) -> SoundFamily | None:
    """How the model of a folder takes sounds; None where it takes none, or has no row.

    Raises:
        StartupError: a value of its files is not one that is served, or its tokenizer lacks a token.
    """
    config = files.json("config.json")
    name = str(config.get("model_type"))
    row, tower = SOUND_FAMILIES.get(name), config.get("audio_config")
    if row is None or (row.form == "magnitudes" and not isinstance(tower, dict)):
        return None
    extractor = files.json("processor_config.json").get("feature_extractor")
    extractor = extractor if isinstance(extractor, dict) else files.json("preprocessor_config.json")
    if not extractor:
        logger.warning("sounds are refused: the model's folder has no preprocessor_config.json for %s", name)
        return None
    tower = tower if isinstance(tower, dict) else {}
    num_mel_bins = _number(tower, "num_mel_bins", 128)
    served = {"feature_size": num_mel_bins, "sampling_rate": RATE, "dither": 0, "padding_value": 0, **_FORMS[row.form]}
    for key, value in served.items():
        if extractor.get(key, value) != value:
            raise StartupError(
                f"the model's feature extractor has {key} {extractor[key]!r:.40}: sounds are served with {value}"
            )
    if (
        row.form == "windows"
        and _FRAMES_PER_POSITION * (positions := _number(tower, "max_source_positions", 1500)) != WINDOW_FRAMES
    ):
        raise StartupError(f"the model's audio_config has max_source_positions {positions}: 1500 are served")
    named = FamilyFiles(files, tokenizer).named
    placeholder = named("audio", row.placeholder)
    before, after = map(named, row.ends) if row.ends is not None else ("", "")
    placeholder_id = tokenizer.token_to_id(placeholder)
    assert placeholder_id is not None
    return SoundFamily(
        name=name,
        form=row.form,
        num_mel_bins=num_mel_bins,
        plan=row.plan(tower),
        max_seconds=row.max_seconds,
        marker=placeholder,
        prompt_marker=row.around.format(placeholder),
        text=f"{before}{placeholder}{after}",
        placeholder_id=placeholder_id,
    )


def _number(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    if type(value) is not int or value < 1:
        raise StartupError(f"the model's audio_config has {name} {value!r:.40}, which must be a number > 0")
    return value


def _heard(tower: Mapping[str, Any]) -> Callable[[int, int], SoundPlan]:
    """Qwen2-Audio: two positions to a feature, of those frames that are no padding; two frames to a position."""

    def plan(num_samples: int, num_frames: int) -> SoundPlan:
        heard = -(-num_samples // HOP)
        return SoundPlan(((heard - 1) // _FRAMES_PER_POSITION + 1) // 2, (heard,))

    return plan


def _whole_windows(tower: Mapping[str, Any]) -> Callable[[int, int], SoundPlan]:
    """Voxtral: all positions of all windows, so many to a feature as fill the width of the MLP."""
    width = _number(tower, "hidden_size", _number(tower, "d_model", 1280))
    inner = _number(tower, "intermediate_size", _number(tower, "encoder_ffn_dim", 5120))
    num_values = WINDOW_FRAMES // _FRAMES_PER_POSITION * width
    if num_values % inner:
        raise StartupError(f"the model's audio_config has intermediate_size {inner}, which must divide {num_values}")

    def plan(num_samples: int, num_frames: int) -> SoundPlan:
        return SoundPlan(num_frames // WINDOW_FRAMES * (num_values // inner))

    return plan


def _subsampled(tower: Mapping[str, Any]) -> Callable[[int, int], SoundPlan]:
    """Gemma 4: two convolutions of stride 2 over the frames."""

    def plan(num_samples: int, num_frames: int) -> SoundPlan:
        return SoundPlan(-(-num_frames // 4))

    return plan


_FORMS: Mapping[str, Mapping[str, Any]] = {
    "windows": {"hop_length": HOP, "n_fft": WINDOW, "chunk_length": WINDOW_SECONDS},
    "magnitudes": {
        **{"frame_length": FRAME, "hop_length": HOP, "min_frequency": 0, "max_frequency": RATE // 2, "preemphasis": 0},
        **{"fft_overdrive": False, "input_scale_factor": 1, "mel_floor": FLOOR},
        **{"per_bin_mean": None, "per_bin_stddev": None, "frame_length_ms": 20, "hop_length_ms": 10},
    },
}
"""What a feature extractor has to say for each form of spectrograms, where it says it."""

SOUND_FAMILIES: Mapping[str, SoundRow] = {
    "qwen2_audio": SoundRow(_heard, "<|AUDIO|>", "<|audio_bos|>{}<|audio_eos|>", max_seconds=float(WINDOW_SECONDS)),
    "voxtral": SoundRow(_whole_windows, "[AUDIO]", "[BEGIN_AUDIO]{}"),
    "gemma4": SoundRow(
        _subsampled, "<|audio|>", max_seconds=float(WINDOW_SECONDS), form="magnitudes", ends=("boa", "eoa")
    ),
}
"""Rows by `model_type` of config.json."""
