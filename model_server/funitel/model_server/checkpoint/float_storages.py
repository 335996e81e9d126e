"""Formats of quantised linear layers with floating-point codes: float8, NVFP4, and stacks of experts in float8."""

import math
from math import prod

import torch

from funitel.model_server.checkpoint.quantized_storage import (
    ACTIVATION_SCALES,
    QuantizedStorage,
    matrix_shape,
    raise_not_finite,
)
from funitel.model_server.checkpoint.storage import Files, Range, Storage, cut
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.config import FP8, Quantization
from funitel.proto.errors import WeightsError


class Float8Storage(QuantizedStorage):
    """Weights [outputs, inputs] in float8, and what they are multiplied by.

    weight_scale has one number, or one for each output; of blocks it is [blocks of outputs, blocks of inputs], and is
    called weight_scale_inv where the configuration is not compressed-tensors'.
    """

    parts = ("weight", "weight_scale", "weight_scale_inv", *ACTIVATION_SCALES)
    marks = ("weight_scale", "weight_scale_inv")
    dtype = "F8_E4M3"

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        self.shape = self._shape_of_weight()
        is_inverse = quantization.group_size != -1 and not quantization.is_compressed
        given = [name for name in self.marks if f"{stem}.{name}" in self.names]
        self._part = given[-1] if given else "weight_scale_inv" if is_inverse else "weight_scale"
        self._scale_outputs = quantization.group_outputs
        if quantization.group_size != -1:
            self._expect(self._part, -(-self.shape[0] // self._scale_outputs), self._num_groups)
            return
        found = tuple(self._slice(self._part).get_shape())
        if found in ((), (1,), (1, 1)):
            self._scale_outputs = max(1, self.shape[0])
        elif found not in ((self.shape[0],), (self.shape[0], 1)):
            raise WeightsError(
                f"tensor {stem}.{self._part} has shape {list(found)}, expected one number or {self.shape[0]}"
            )

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        (first, end), group_of = self._groups("g_idx", columns)
        scales = self._finite(self._part, self._whole_scales())[:, first:end]
        places = torch.arange(*rows) // self._scale_outputs
        codes = cut(self._slice("weight"), rows, columns).contiguous()
        if bool(((codes.view(torch.uint8) & _NAN) == _NAN).any()):
            raise WeightsError(f"tensor {self.stem}.weight holds values that are not numbers: its file is damaged")
        return Codes(
            codes=codes,
            scales=scales[places],
            zeros=torch.zeros((len(places), end - first), dtype=torch.uint8),
            groups=group_of,
        )

    def _whole_scales(self) -> torch.Tensor:
        name = f"{self.stem}.{self._part}"
        return self._files[name].get_tensor(name).float().reshape(-1, self._num_groups)


class Float4Storage(QuantizedStorage):
    """NVFP4: numbers of 4 bits (e2m1), two in a byte, a scale in e4m3 for each 16 inputs, and one for the matrix.

    compressed-tensors: weight_packed [outputs, inputs / 2], weight_scale [outputs, inputs / 16], and
    weight_global_scale, which divides. ModelOpt: weight, weight_scale, and weight_scale_2, which multiplies.
    Codes are the same numbers in e4m3, which has all of them. Sources: compressed-tensors, ModelOpt.
    """

    parts = ("weight_packed", "weight", "weight_scale", "weight_global_scale", "weight_scale_2", *ACTIVATION_SCALES)
    marks = ("weight_packed", "weight_scale_2")

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        self._divides = f"{stem}.weight_packed" in self.names
        self._packed = "weight_packed" if self._divides else "weight"
        source = self._slice(self._packed)
        num_outputs, num_bytes = matrix_shape(source, f"{stem}.{self._packed}")
        if source.get_dtype() != "U8":
            raise WeightsError(f"tensor {stem}.{self._packed} is {source.get_dtype()}, expected U8: two numbers a byte")
        self.shape = (num_outputs, 2 * num_bytes)
        self._expect("weight_scale", num_outputs, self._num_groups)

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        groups, group_of = self._groups("g_idx", columns)
        first = columns[0] // 2
        packed = cut(self._slice(self._packed), rows, (first, -(-columns[1] // 2)))
        numbers = _FLOAT4[torch.stack((packed & 15, packed >> 4), dim=-1).int()].flatten(1)
        scales = self._scales("weight_scale", rows, groups).float() * self._global_scale()
        return Codes(
            codes=numbers[:, columns[0] - 2 * first : columns[1] - 2 * first].contiguous(),
            scales=self._finite("weight_scale", scales),
            zeros=torch.zeros(scales.shape, dtype=torch.uint8),
            groups=group_of,
        )

    def _global_scale(self) -> float:
        """What multiplies all scales."""
        part = "weight_global_scale" if self._divides else "weight_scale_2"
        found = self._slice(part).get_shape(), self._whole_number(part)
        if prod(found[0]) != 1 or not 0 < found[1] < math.inf:
            raise WeightsError(f"tensor {self.stem}.{part} must be one number > 0, found {found[1]} of {found[0]}")
        return 1 / found[1] if self._divides else found[1]

    def _whole_number(self, part: str) -> float:
        name = f"{self.stem}.{part}"
        values = self._files[name].get_tensor(name).flatten()
        return float(values[0]) if values.numel() else math.nan


class Float8StackStorage(Storage):
    """One matrix of a stack [matrices, a, b] in float8, with scales [matrices, blocks of a, blocks of b].

    One scale a matrix, or one for each of its lines, are blocks too. The stack lies as the family stores it.

    Args:
        name, scale_name: the tensors.
        place: of the matrix.
        block: sizes of a block, -1 where the configuration does not say.

    Raises:
        WeightsError: the tensors are no stacks, or have fewer matrices, or the scales are not finite.
    """

    def __init__(self, files: Files, name: str, scale_name: str, place: int, block: tuple[int, int]) -> None:
        if scale_name not in files:
            raise WeightsError(f"the checkpoint lacks tensor {scale_name}")
        self.names = (name, scale_name)
        self._slice = files[name].get_slice(name)
        self._stack: tuple[int, ...] = tuple(self._slice.get_shape())
        if len(self._stack) != 3 or place >= self._stack[0]:
            raise WeightsError(f"tensor {name} has shape {list(self._stack)}, expected a stack with a matrix {place}")
        self.shape = self._stack[1:]
        scales = files[scale_name].get_tensor(scale_name)
        self._scales = scales.float().reshape(*scales.shape, *(1,) * (3 - scales.ndim))
        found = tuple(self._scales.shape)
        self._block = tuple(
            given if given != -1 else 1 if count == size else max(size, 1)
            for given, count, size in zip(block, found[1:3], self.shape, strict=True)
        )
        expected = self._stack[0], *(-(-size // each) for size, each in zip(self.shape, self._block, strict=True))
        if found != expected:
            raise WeightsError(f"tensor {scale_name} has shape {list(scales.shape)}, expected {list(expected)}")
        self._place = place

    @property
    def num_elements(self) -> int:
        """See Storage."""
        return prod(self._stack)

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        scales = self._scales[self._place]
        if not bool(torch.isfinite(scales).all()):
            raise_not_finite(self.names[1], scales)
        first, second = (part or (0, size) for part, size in zip((rows, columns), self.shape, strict=True))
        scales = scales[torch.arange(*first) // self._block[0]][:, torch.arange(*second) // self._block[1]]
        part = self._slice[self._place : self._place + 1, slice(*first), slice(*second)][0]
        return (part.to(device).float() * scales.to(device)).to(dtype).contiguous()


def open_float8_stack(
    files: Files, name: str, place: int, quantization: Quantization | None
) -> Float8StackStorage | None:
    """A matrix of a stack of that name where it is in float8, which has scales of its own. Raises: `WeightsError`."""
    if quantization is None or quantization.method != FP8 or files[name].get_slice(name).get_dtype() != "F8_E4M3":
        return None
    named = (f"{name}_scale_inv", f"{name}_scale", f"{name}_weight_scale")
    scale_name = next((each for each in named if each in files), named[0])
    block = quantization.group_outputs, quantization.group_size
    return Float8StackStorage(files, name, scale_name, place, block if block[1] != -1 else (-1, -1))


_NAN = 0x7F  # of e4m3, with either sign
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT4 = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)]).to(torch.float8_e4m3fn)  # by their 4 bits
