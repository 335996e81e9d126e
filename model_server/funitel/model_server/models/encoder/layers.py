"""The building blocks of an encoder, each with its own tensors."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.models.encoder.packed import Packed

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}
# What oneDNN computes along with the product: its name and its variant.
_FUSED = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
_TUNED_ROWS = 512  # tokens of a usual batch, for which oneDNN lays weights out
_MAX_DISTANCE = 128  # of relative positions that have a bucket of their own

Linear = tuple[torch.Tensor, torch.Tensor]  # weights [outputs, inputs], bias [outputs]


class Dense:
    """A linear layer with its activation; on a CPU in float32 one operation, bias and activation included."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str = "none") -> None:
        self.bias = bias
        self.activation = activation
        fits = weight.device.type == "cpu" and weight.dtype is torch.float32
        self.is_packed = fits and activation in _FUSED
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TUNED_ROWS) if self.is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            name, variant = _FUSED[self.activation]
            fused: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, name, [], variant)
            return fused
        y = F.linear(x, self.weight, self.bias)
        return y if self.activation == "none" else _ACTIVATIONS[self.activation](y)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product of a layer without activation, and a residual of the same shape added to it."""
        if self.is_packed:
            fused: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
            return fused
        return F.linear(x, self.weight, self.bias) + residual


def read_linear(weights: Weights, name: str, num_outputs: int, num_inputs: int) -> Linear:
    """Weights and bias of a dense layer of the checkpoint."""
    return (weights.read(f"{name}.weight", [num_outputs, num_inputs]), weights.read(f"{name}.bias", [num_outputs]))


def read_dense(weights: Weights, name: str, num_outputs: int, num_inputs: int, activation: str = "none") -> Dense:
    """A dense layer of the checkpoint, with its bias."""
    return Dense(*read_linear(weights, name, num_outputs, num_inputs), activation)


class LayerNorm:
    """Layer norm; old checkpoints call its two tensors gamma and beta."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        old = weights.has(f"{name}.gamma")
        self.weight = weights.read(f"{name}.{'gamma' if old else 'weight'}", [size])
        self.bias = weights.read(f"{name}.{'beta' if old else 'bias'}", [size])
        self.size = (size,)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)


class DistanceBias:
    """What is added to the scores of two tokens for their distance. Source: T5, arXiv 1910.10683, section 2.1."""

    def __init__(self, weights: Weights, name: str, num_buckets: int, num_heads: int, longest: int) -> None:
        table = weights.read(f"{name}.weight", [num_buckets, num_heads])
        distances = torch.arange(1 - longest, longest)
        self._by_distance = table[_buckets(distances, num_buckets)].t().contiguous()  # [heads, 2 * longest - 1]
        self._longest = longest

    def of(self, length: int) -> torch.Tensor:
        """The bias [heads, length, length] between the tokens of a text."""
        there = torch.arange(length, device=self._by_distance.device)
        return self._by_distance[:, there[None, :] - there[:, None] + self._longest - 1]


def _buckets(distances: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Half of the buckets are for each direction; half of those are exact, the others grow with the distance."""
    half = num_buckets // 2
    exact = half // 2
    far = distances.abs()
    scaled = torch.log(far.float().clamp(min=1) / exact) / math.log(_MAX_DISTANCE / exact) * (half - exact)
    rough = (exact + scaled.long()).clamp(max=half - 1)
    return torch.where(far < exact, far, rough) + half * (distances > 0)


def attend(qkv: torch.Tensor, packed: Packed, num_heads: int, bias: DistanceBias | None) -> torch.Tensor:
    """Let every token of a text see all of its text: [num_tokens, 3 * hidden] -> [num_tokens, hidden].

    Texts of one length are one call; no token of one text sees another's, and there is none that is padding.
    """
    num_tokens, triple = qkv.shape
    attended = qkv.new_empty(num_tokens, triple // 3)
    for group in packed.groups:
        rows = slice(group.start, group.start + group.num_tokens)
        heads = qkv[rows].view(group.count, group.length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        mask = None if bias is None else bias.of(group.length).to(qkv.dtype)
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        attended[rows] = found.transpose(1, 2).reshape(group.num_tokens, -1)
    return attended
