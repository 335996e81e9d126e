"""The encoders of sounds in prompts: transformers' audio towers and projectors, over log-mel spectrograms."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from funitel.model_server.media.interface import MediaFeatures, Yield
from funitel.model_server.media.small_parts import SmallParts
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaInput, MediaKind

Model = Any  # a model of transformers without its text
FRAMES_PER_POSITION = 2  # the stride of the second convolution
LEAST_FRAMES = 3  # of which one feature comes, where two positions are pooled to one


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundTowerRow:
    """A family.

    `model` is the class in transformers, of which the parts `left_out` are dropped. `features` makes
    [num_features, hidden_size] of a spectrogram [mel bins, frames]; `num_mel_bins` where the config does not say.
    """

    model: str
    features: Callable[[Model, torch.Tensor, MediaInput], torch.Tensor]
    left_out: tuple[str, ...] = ("language_model",)
    num_mel_bins: int | None = None


class SoundEncoder:
    """An audio tower with its projector as a `MediaEncoder`.

    Args:
        row: its family.
        model: see `load_tower`.
        device: of the model.
    """

    kinds = frozenset([MediaKind.AUDIO])
    has_axes = False
    has_whole_spans = False

    def __init__(self, row: SoundTowerRow, model: Any, device: torch.device) -> None:
        config = model.config
        self.placeholder_ids = {MediaKind.AUDIO: int(config.audio_token_id)}
        dtype = next(iter(model.parameters())).dtype
        self.feature_bytes = config.get_text_config().hidden_size * dtype.itemsize
        self._row = row
        self._model = model
        self._device = device

    def has_batches(self, kind: MediaKind) -> bool:
        """See MediaEncoder: a sound is long enough alone."""
        return False

    def encode_alike(self, media: Sequence[MediaInput], pause: Yield) -> list[MediaFeatures]:
        """See MediaEncoder."""
        return [self.encode(each, pause) for each in media]

    @torch.inference_mode()
    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        """See MediaEncoder."""
        num_mel_bins = self._row.num_mel_bins or self._model.config.audio_config.num_mel_bins
        mel = _spectrogram_of(media, num_mel_bins).to(self._device)
        is_cut = self._device.type == "cpu"
        with SmallParts(pause) if is_cut else nullcontext():
            return MediaFeatures(self._row.features(self._model, mel, media).contiguous())


def _spectrogram_of(media: MediaInput, num_mel_bins: int) -> torch.Tensor:
    """The spectrogram of an item: [mel bins, frames] float32."""
    if len(media.shape) != 2 or not all(media.shape) or media.shape[0] != num_mel_bins:
        raise InvalidRequest(f"shape must be {num_mel_bins} and frames, given {list(media.shape)}", "shape")
    num_bytes = 4 * math.prod(media.shape)
    if len(media.values) != num_bytes:
        raise InvalidRequest(f"values must be the {num_bytes} bytes of shape, given {len(media.values)}", "values")
    return torch.from_numpy(np.frombuffer(media.values, dtype="<f4").reshape(media.shape).copy())


def _window_frames(model: Model) -> int:
    return FRAMES_PER_POSITION * int(model.config.audio_config.max_source_positions)


def _of_one_window(model: Model, mel: torch.Tensor, media: MediaInput) -> torch.Tensor:
    """Qwen2-Audio: one window, of which `size` says how many frames are heard; the others are padding."""
    window = _window_frames(model)
    if mel.shape[1] != window:
        raise InvalidRequest(f"shape must have {window} frames, given {mel.shape[1]}", "shape")
    if len(media.size) != 1 or not LEAST_FRAMES <= media.size[0] <= window:
        raise InvalidRequest(
            f"size must be one number of frames, {LEAST_FRAMES} to {window}, given {list(media.size)}", "size"
        )
    num_positions = (media.size[0] - 1) // FRAMES_PER_POSITION + 1
    places = torch.arange(window // FRAMES_PER_POSITION, device=mel.device)
    mask = (places < num_positions).expand(1, 1, len(places), len(places))
    hidden = model.audio_tower(mel[None], attention_mask=mask).last_hidden_state
    found: torch.Tensor = model.multi_modal_projector(hidden[0, : num_positions // 2])
    return found


def _of_windows(model: Model, mel: torch.Tensor, media: MediaInput) -> torch.Tensor:
    """Voxtral: windows, one after the other, all of them heard."""
    window = _window_frames(model)
    if mel.shape[1] % window:
        raise InvalidRequest(f"shape must have a multiple of {window} frames, given {mel.shape[1]}", "shape")
    parts = [
        model.get_audio_features(each[None], return_dict=True).pooler_output for each in torch.split(mel, window, 1)
    ]
    return torch.cat(parts)


def _of_frames(model: Model, mel: torch.Tensor, media: MediaInput) -> torch.Tensor:
    """Gemma 4: all frames, of up to four of which one feature comes."""
    is_heard = torch.ones(1, mel.shape[1], dtype=torch.bool, device=mel.device)
    found: torch.Tensor = model.get_audio_features(mel.t()[None], is_heard, return_dict=True).pooler_output[0]
    return found


SOUND_FAMILIES: Mapping[str, SoundTowerRow] = {
    "Qwen2AudioForConditionalGeneration": SoundTowerRow(model="Qwen2AudioModel", features=_of_one_window),
    "VoxtralForConditionalGeneration": SoundTowerRow(model="VoxtralModel", features=_of_windows),
    "Gemma4ForConditionalGeneration": SoundTowerRow(
        model="Gemma4Model",
        features=_of_frames,
        left_out=("language_model", "vision_tower", "embed_vision"),
        num_mel_bins=128,
    ),
}
"""By the architecture that config.json names."""
