"""The layers of an encoder in C++ on AMX tiles, by the C interface of `cpu/encoder.cpp`: float32 in all but name.

Tiles multiply bfloat16, so each number is the sum of two; `tiles.h` says what that changes.
"""

import ctypes
from pathlib import Path

import torch

from funitel.model_server.cpu.build import Functions, cpu_flags, open_library
from funitel.model_server.cpu.compiler import CannotBuild
from funitel.model_server.models.encoder.layers import DistanceBias, attend
from funitel.model_server.models.encoder.model import LayerWeights
from funitel.model_server.models.encoder.packed import Packed
from funitel.model_server.spec.encoder import EncoderSpec
from funitel.proto.errors import NotEnoughMemory

_NEEDS = frozenset({"amx_tile", "amx_bf16", "avx512_bf16"})
_ACTIVATIONS = {"gelu": 1, "gelu_tanh": 2, "relu": 3}  # as in `activations.h`
_SQUARE = 32  # what sizes must divide into
_NUMBER, _ADDRESS = ctypes.c_int32, ctypes.c_void_p
_FUNCTIONS: Functions = {
    "funitel_encoder": (_ADDRESS, [_ADDRESS]),
    "funitel_encoder_release": (None, [_ADDRESS]),
    "funitel_encoder_dense": (_NUMBER, [_ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _ADDRESS]),
    "funitel_encoder_norm": (None, [_ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _ADDRESS]),
    "funitel_encoder_run": (None, [_ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _ADDRESS, _ADDRESS]),
}


class _Shape(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("hidden_size", "intermediate_size", "num_layers", "activation", "num_threads")
        ),
        ("eps", ctypes.c_float),
    ]


def open_layers(cache_dir: Path, spec: EncoderSpec, num_threads: int) -> "FusedLayers":
    """Layers of the sizes of `spec` that are still to be taken; the library is built where it is not in the cache.

    Raises:
        CannotBuild: this processor has no tiles, the sizes are not for them, or there is no compiler that knows them.
    """
    missing = sorted(_NEEDS - cpu_flags())
    if missing:
        raise CannotBuild(f"the CPU lacks {missing[0]}")
    if spec.hidden_size % _SQUARE or spec.intermediate_size % _SQUARE:
        raise CannotBuild(f"sizes {spec.hidden_size} and {spec.intermediate_size} do not divide into {_SQUARE}")
    try:
        library = open_library(cache_dir, _FUNCTIONS, source="encoder.cpp")
    except OSError as error:
        raise CannotBuild(str(error)) from error
    return FusedLayers(library, spec, num_threads)


class FusedLayers:
    """All layers of an encoder, see `Layers`; attention itself is torch's. Released with the object.

    Raises:
        CannotBuild: the kernel has no tiles to give, or there is no memory.
    """

    def __init__(self, library: ctypes.CDLL, spec: EncoderSpec, num_threads: int) -> None:
        self._library = library
        self._num_layers = 0  # taken so far
        self._num_heads = spec.num_heads
        shape = _Shape(
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_layers,
            _ACTIVATIONS[spec.activation],
            num_threads,
            spec.norm_eps,
        )
        self._handle = library.funitel_encoder(ctypes.byref(shape))
        if not self._handle:
            raise CannotBuild("the kernel gives no tiles, or there is no memory")

    def take(self, weights: LayerWeights) -> None:
        """See Layers."""
        number, self._num_layers = self._num_layers, self._num_layers + 1
        for which, (weight, bias) in enumerate((weights.qkv, weights.out, weights.up, weights.down)):
            pointers = weight.data_ptr(), bias.data_ptr()
            if not self._library.funitel_encoder_dense(self._handle, number, which, *pointers):
                raise NotEnoughMemory(f"there is no memory for layer {number} of the encoder")
        for which, norm in enumerate((weights.attention_norm, weights.mlp_norm)):
            pointers = norm.weight.data_ptr(), norm.bias.data_ptr()
            self._library.funitel_encoder_norm(self._handle, number, which, *pointers)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.funitel_encoder_release(self._handle)
            self._handle = None

    def __call__(self, x: torch.Tensor, packed: Packed, bias: DistanceBias | None) -> torch.Tensor:
        """See Layers."""
        num_tokens, size = x.shape
        qkv = x.new_empty(num_tokens, 3 * size)
        attended = x
        for layer in range(-1, self._num_layers):
            if layer >= 0:
                attended = attend(qkv, packed, self._num_heads, bias)
            self._library.funitel_encoder_run(
                self._handle, layer, num_tokens, attended.data_ptr(), x.data_ptr(), qkv.data_ptr()
            )
        return x
