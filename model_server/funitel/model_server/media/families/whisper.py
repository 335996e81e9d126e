"""The audio encoder of Whisper: a log-mel spectrogram -> features that the decoder looks at."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.layers.linear import ACTIVATIONS, Matmul, NormLayer
from funitel.model_server.media.families.load import cache_bytes
from funitel.model_server.media.interface import MediaFeatures, Yield
from funitel.model_server.media.service import FeatureService
from funitel.model_server.media.small_parts import SmallParts
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.encoder_decoder import Seq2SeqSpec
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.step import MediaInput, MediaKind

_FRAMES_PER_FEATURE = 2  # the stride of the second convolution


class WhisperEncoder:
    """Two convolutions, then layers in which every frame sees all others; alike on every rank, whole.

    Args:
        whole: the spec of the model; its encoder has as many positions as a sound has features.
        weights: of the checkpoint; raises WeightsError for a tensor that is missing, or has another shape.
    """

    kinds = frozenset({MediaKind.AUDIO})
    has_whole_spans = False
    has_axes = False
    placeholder_ids: dict[MediaKind, int] = {}

    def __init__(self, whole: Seq2SeqSpec, weights: Weights) -> None:
        spec, num_mel_bins = whole.encoder, whole.num_mel_bins
        prefix, width = f"{weights.prefix}encoder", spec.hidden_size
        self.shape = (num_mel_bins, _FRAMES_PER_FEATURE * spec.max_position_embeddings)
        self.num_features = spec.max_position_embeddings
        self.feature_bytes = width * weights.dtype.itemsize
        self._device, self._dtype = weights.device, weights.dtype
        self._convolutions = [
            (
                weights.read(f"{prefix}.{name}.weight", [width, channels, 3]),
                weights.read(f"{prefix}.{name}.bias", [width]),
            )
            for name, channels in (("conv1", num_mel_bins), ("conv2", width))
        ]
        self._positions = weights.read(f"{prefix}.embed_positions.weight", [self.num_features, width])
        layers = range(spec.num_layers)
        self._layers = [_Layer(spec, weights, f"{prefix}.layers.{i}") for i in layers]
        self._norm = NormLayer(spec, weights, f"{prefix}.layer_norm", width)

    def has_batches(self, kind: MediaKind) -> bool:
        """See MediaEncoder: a sound is long enough alone."""
        return False

    def encode_alike(self, media: Sequence[MediaInput], pause: Yield) -> list[MediaFeatures]:
        """See MediaEncoder."""
        return [self.encode(each, pause) for each in media]

    @torch.inference_mode()
    def encode(self, media: MediaInput, pause: Yield) -> MediaFeatures:
        """See MediaEncoder: [mel bins, frames] float32 -> [frames / 2, hidden_size]."""
        num_bytes = 4 * self.shape[0] * self.shape[1]
        if media.shape != self.shape or len(media.values) != num_bytes:
            raise InvalidRequest(f"shape must be {list(self.shape)} of float32, given {list(media.shape)}", "shape")
        if media.num_features != self.num_features:
            raise InvalidRequest(
                f"num_features must be {self.num_features}, given {media.num_features}", "num_features"
            )
        with SmallParts(pause) if self._device.type == "cpu" else nullcontext():
            return self._encode(np.frombuffer(media.values, dtype="<f4").reshape(1, *self.shape))

    def _encode(self, mel: np.ndarray) -> MediaFeatures:
        x = torch.from_numpy(mel.copy()).to(self._device, self._dtype)
        for stride, (weight, bias) in enumerate(self._convolutions, 1):
            x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        x = x[0].t() + self._positions
        for layer in self._layers:
            x = layer(x)
        return MediaFeatures(self._norm(x))


class _Layer:
    """Attention and MLP, each normalised before and added to the residual: [frames, hidden_size] each."""

    def __init__(self, spec: ModelSpec, weights: Weights, name: str) -> None:
        width, inner = spec.hidden_size, spec.intermediate_size
        attention = f"{name}.self_attn"

        def read(stem: str, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = weights.read_linear(stem, num_outputs, num_inputs)
            bias = f"{stem}.bias"
            has_bias = stem != f"{attention}.k_proj"
            return weight, weights.read(bias, [num_outputs]) if has_bias else weight.new_zeros(num_outputs)

        qkv = [read(f"{attention}.{part}_proj", width, width) for part in "qkv"]
        self._heads = (3, spec.num_heads, spec.head_dim)
        self._scale = spec.score_scale
        self._activation = ACTIVATIONS[spec.activation]
        self._qkv = Matmul(torch.cat([weight for weight, _ in qkv]), torch.cat([bias for _, bias in qkv]))
        self._out = Matmul(*read(f"{attention}.out_proj", width, width))
        self._up = Matmul(*read(f"{name}.fc1", inner, width))
        self._down = Matmul(*read(f"{name}.fc2", width, inner))
        self._attention_norm = NormLayer(spec, weights, f"{name}.self_attn_layer_norm", width)
        self._mlp_norm = NormLayer(spec, weights, f"{name}.final_layer_norm", width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._qkv(self._attention_norm(x)).view(-1, *self._heads).permute(1, 2, 0, 3)[:, None].unbind()
        attended = F.scaled_dot_product_attention(q, k, v, scale=self._scale)
        x = x + self._out(attended[0].transpose(0, 1).flatten(1))
        return x + self._down(self._activation(self._up(self._mlp_norm(x))))


def open_whisper(settings: ModelServerSettings, spec: Seq2SeqSpec, weights: Weights) -> FeatureService:
    """The encoder, with a cache of features: these lie in the pool, too, as soon as a sequence runs that hears them.

    Raises:
        SettingsError: the cache has no room for the features of a sound.
        WeightsError: see WhisperEncoder.
    """
    encoder = WhisperEncoder(spec, weights)
    max_bytes, least = cache_bytes(settings, weights.device), encoder.num_features * encoder.feature_bytes
    if max_bytes < least:
        raise SettingsError(
            f"--media-cache-gb must have room for {least} bytes, the features of a sound, "
            f"given {settings.media_cache_gb}"
        )
    return FeatureService(encoder, max_bytes, weights.device)
