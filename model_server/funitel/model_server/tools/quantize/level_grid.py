"""Choose the levels of 4-bit groups: first by a search, later by fitting the scales to the codes that came out.

Pure functions of tensors. The search shrinks the range of a group and keeps what costs least, as AWQ (arXiv 2306.00978)
and llama.cpp's k-quants do; the fit is least squares, one group after the other with all others held.
"""

from dataclasses import dataclass

import torch

from funitel.model_server.quantized.bit_packing import Codes

BITS = 4
TOP = 2**BITS - 1
MIDDLE = 2 ** (BITS - 1)
# Shares of the range of a group that its levels may span: cutting off outliers makes all other levels finer.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
# A scale that least squares move further than this from the one searched is no better on other inputs.
_FURTHEST = 2.0


@dataclass(frozen=True, slots=True)
class LevelGrid:
    """Levels of every group of a matrix: code c of a row stands for (c - zero) * scale."""

    scales: torch.Tensor  # [rows, num_groups] float32, of values that float16 holds
    zeros: torch.Tensor  # [rows, num_groups] float32, whole numbers
    group_size: int

    def round_column(self, column: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [rows] nearest to the values [rows] of input `index`, and the values that they stand for."""
        group = index // self.group_size
        scales, zeros = self.scales[:, group], self.zeros[:, group]
        codes = (column / scales).round_().add_(zeros).clamp_(0, TOP)
        return codes, (codes - zeros) * scales

    def round(self, weight: torch.Tensor) -> Codes:
        """Codes nearest to weights [rows, inputs]."""
        groups = self._groups(weight)
        codes = (weight / self.scales[:, groups]).round_().add_(self.zeros[:, groups]).clamp_(0, TOP)
        return self.codes(codes)

    def codes(self, codes: torch.Tensor) -> Codes:
        """Codes [rows, inputs] with these levels, as they are stored."""
        return Codes(codes.to(torch.uint8), self.scales.half(), self.zeros.to(torch.uint8), self._groups(codes))

    def refitted(self, codes: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> "LevelGrid":
        """The same codes [rows, inputs] with scales of less error in the outputs: least squares, a group at a time.

        `hessian` [inputs, inputs] weighs errors of `weight` [rows, inputs].
        """
        scales = self.scales.clone()
        groups = self._groups(codes)
        steps = codes - self.zeros[:, groups]
        gradient = (steps * scales[:, groups] - weight) @ hessian
        for group in range(scales.shape[1]):
            some = slice(group * self.group_size, (group + 1) * self.group_size)
            part = steps[:, some]
            curvature = ((part @ hessian[some, some]) * part).sum(1)
            old = scales[:, group]
            best = (old - (gradient[:, some] * part).sum(1) / curvature.clamp_min(1e-30)).half().float()
            is_near = (best < old * _FURTHEST) & (best > old / _FURTHEST)
            new = torch.where(is_near & (curvature > 0), best, old)
            gradient.addmm_((new - old)[:, None] * part, hessian[some])
            scales[:, group] = new
        return LevelGrid(scales, self.zeros, self.group_size)

    def _groups(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.arange(weight.shape[1], device=weight.device) // self.group_size


def full_range(weight: torch.Tensor, group_size: int, *, symmetric: bool) -> LevelGrid:
    """Levels from the least to the largest weight of each group: what plain rounding has.

    Args:
        weight: [rows, inputs].
        group_size: inputs that share a scale; the last group may be smaller.
        symmetric: the zero point is in the middle, with a level more below it.
    """
    return _spanning(_grouped(weight, group_size), 1.0, 0, group_size, symmetric=symmetric)


def searched(weight: torch.Tensor, importance: torch.Tensor, group_size: int, *, symmetric: bool) -> LevelGrid:
    """Levels with the least sum of squared errors of each group, every input's error times its importance [inputs]."""
    blocks, weights = _grouped(weight, group_size), _grouped(importance[None, :], group_size)
    best = _spanning(blocks, 1.0, 0, group_size, symmetric=symmetric)
    least = _errors(blocks, weights, best)
    for share in _SHARES:
        for shift in (0,) if symmetric else (-1, 0, 1):
            grid = _spanning(blocks, share, shift, group_size, symmetric=symmetric)
            errors = _errors(blocks, weights, grid)
            is_better = errors < least
            least = torch.where(is_better, errors, least)
            scales = torch.where(is_better, grid.scales, best.scales)
            best = LevelGrid(scales, torch.where(is_better, grid.zeros, best.zeros), group_size)
    return best


def _grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """[rows, num_groups, group_size]; zeros fill up the last group."""
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % group_size))
    return padded.reshape(len(weight), -1, group_size)


def _spanning(blocks: torch.Tensor, share: float, shift: int, group_size: int, *, symmetric: bool) -> LevelGrid:
    """Levels over a share of the range of each group, the zero point `shift` levels from where it would be.

    Zero points are 1 to 15: stored reduced by one, 0 would be read as 16 by some programs.
    """
    if symmetric:
        scales = 2 * blocks.abs().amax(2) / TOP
        zeros = torch.full_like(scales, MIDDLE)
    else:
        low, high = blocks.amin(2).clamp_max(0), blocks.amax(2).clamp_min(0)
        scales = (high - low) / TOP
        zeros = (-low / scales.clamp_min(1e-30)).round_().add_(shift).clamp_(1, TOP)
    scales = (scales * share).half().float()
    return LevelGrid(torch.where(scales == 0, torch.ones_like(scales), scales), zeros, group_size)


def _errors(blocks: torch.Tensor, importance: torch.Tensor, grid: LevelGrid) -> torch.Tensor:
    scales, zeros = grid.scales[:, :, None], grid.zeros[:, :, None]
    codes = (blocks / scales).round_().add_(zeros).clamp_(0, TOP)
    errors = codes.sub_(zeros).mul_(scales).sub_(blocks).square_()
    return (errors * importance).sum(2)
