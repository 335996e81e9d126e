"""Round a matrix of weights to integers, each weight by itself: int8, q4 and the baseline of GPTQ."""

import torch

from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.config import Q4_GROUP


def round_int8(weight: torch.Tensor, scale_dtype: torch.dtype) -> Codes:
    """One scale for each output, its largest weight at +-127. `weight` is [outputs, inputs]."""
    scales = _usable(weight.abs().amax(dim=1, keepdim=True) / 127, scale_dtype)
    codes = (weight / scales.float()).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return Codes(codes, scales, torch.full_like(scales, 128, dtype=torch.uint8), _in_order(weight, weight.shape[1]))


def round_q4(weight: torch.Tensor, scale_dtype: torch.dtype) -> Codes:
    """Blocks of 32 inputs as GGUF's Q4_0: the weight furthest from zero is exactly at -8, so a scale has its sign."""
    blocks = weight.reshape(weight.shape[0], -1, Q4_GROUP)  # [outputs, blocks, 32]
    furthest = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
    scales = _usable(furthest.squeeze(2) / -8, scale_dtype)
    codes = (blocks / scales.float()[:, :, None]).round_().clamp_(-8, 7).add_(8).flatten(1).to(torch.uint8)
    return Codes(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), _in_order(weight, Q4_GROUP))


def symmetric_scales(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales [rows, 1] in float16 that spread the codes of each row evenly around zero, as GPTQ's usual format does."""
    return _usable(2 * weight.abs().amax(dim=1, keepdim=True) / (2**bits - 1), torch.float16)


def round_symmetric(weight: torch.Tensor, bits: int, group_size: int) -> Codes:
    """Round each weight to the nearest of its group's levels, `group_size` inputs to a group."""
    parts = torch.split(weight, group_size, dim=1)
    scales = torch.cat([symmetric_scales(part, bits) for part in parts], dim=1)
    groups = _in_order(weight, group_size)
    zero = 2 ** (bits - 1)
    codes = (weight / scales.float()[:, groups]).round_().add_(zero).clamp_(0, 2**bits - 1).to(torch.uint8)
    return Codes(codes, scales, torch.full_like(scales, zero, dtype=torch.uint8), groups)


def _usable(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as they will be stored; 1 where they would be 0, for weights that are all zero."""
    stored = scales.to(dtype)
    return torch.where(stored == 0, torch.ones_like(stored), stored)


def _in_order(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return torch.arange(weight.shape[1], device=weight.device) // group_size
