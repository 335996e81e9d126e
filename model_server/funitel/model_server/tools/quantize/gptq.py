"""GPTQ: round a layer's weights one input at a time, and let the inputs still to come make up for each error.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1, with groups and act-order as its reference implementation
has them. Pure functions of tensors; `walk` brings the activations.
"""

import logging

import torch

from funitel.model_server.quantized.bit_packing import Codes, symmetric_scales
from funitel.proto.errors import WeightsError

logger = logging.getLogger(__name__)

BITS = 4
# Errors of so many inputs are spread at once over those after them: one large product instead of many small ones.
BLOCK = 128
# Where the Hessian is too close to singular, dampening grows by steps of ten up to this share of its mean diagonal.
_MAX_DAMPENING = 10.0


class Hessian:
    """Mean of x x^T over the inputs x of a layer: what an error in one weight does to the output beside the others."""

    def __init__(self, num_inputs: int, device: torch.device) -> None:
        self.num_rows = 0
        self._sum = torch.zeros((num_inputs, num_inputs), dtype=torch.float32, device=device)

    def add(self, inputs: torch.Tensor) -> None:
        """Count inputs [rows, num_inputs] in."""
        inputs = inputs.float()
        self._sum.addmm_(inputs.t(), inputs)
        self.num_rows += inputs.shape[0]

    @property
    def mean(self) -> torch.Tensor:
        """[num_inputs, num_inputs] float32."""
        return self._sum / max(self.num_rows, 1)


def quantize_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, *, group_size: int, percdamp: float, act_order: bool
) -> Codes:
    """Quantise weights [outputs, inputs] to 4 bits, symmetric around zero.

    Args:
        weight: the layer's weights.
        hessian: [inputs, inputs], from `Hessian`.
        group_size: inputs that share a scale; -1 for one group.
        percdamp: dampening, as a share of the Hessian's mean diagonal.
        act_order: begin with the inputs that matter most; groups then gather inputs in that order.

    Raises:
        WeightsError: the activations are not finite, or no dampening makes the Hessian invertible.
    """
    num_inputs = weight.shape[1]
    size = num_inputs if group_size == -1 else group_size
    order = torch.arange(num_inputs, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    left = weight.float()[:, order]  # what is still to be rounded, errors of others made up for
    factor = _inverse_factor(hessian[order][:, order], percdamp)
    zero, top = 2 ** (BITS - 1), 2**BITS - 1
    codes = torch.empty(left.shape, dtype=torch.uint8, device=left.device)
    all_scales = []
    for group_start in range(0, num_inputs, size):
        group_end = min(group_start + size, num_inputs)
        all_scales.append(symmetric_scales(left[:, group_start:group_end], BITS))
        scales = all_scales[-1].float()[:, 0]
        for start in range(group_start, group_end, BLOCK):
            end = min(start + BLOCK, group_end)
            errors = torch.empty_like(left[:, start:end])
            for i in range(start, end):
                code = (left[:, i] / scales).round_().add_(zero).clamp_(0, top)
                codes[:, i] = code.to(torch.uint8)
                error = (left[:, i] - (code - zero) * scales) / factor[i, i]
                left[:, i:end].addr_(error, factor[i, i:end], alpha=-1)
                errors[:, i - start] = error
            left[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    place = order.argsort()  # of each input, in the order of rounding
    scales = torch.cat(all_scales, dim=1)
    return Codes(codes[:, place], scales, torch.full_like(scales, zero, dtype=torch.uint8), place // size)


def output_error(weight: torch.Tensor, quantised: torch.Tensor, hessian: torch.Tensor) -> float:
    """Size of the error in the layer's outputs over the calibration texts, relative to the outputs."""
    lost = (weight - quantised).float()
    of_error = (lost @ hessian * lost).sum().clamp_min(0)
    of_output = (weight.float() @ hessian * weight).sum()
    return float((of_error / of_output).sqrt()) if of_output > 0 else 0.0


def _inverse_factor(hessian: torch.Tensor, percdamp: float) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the dampened Hessian."""
    if not torch.isfinite(hessian).all():
        raise WeightsError("the calibration texts give activations that are not finite")
    diagonal = hessian.diagonal()
    unused = diagonal == 0  # inputs that are always zero: their weights are rounded, nothing else follows from them
    hessian = hessian + torch.diag(unused.to(hessian.dtype))
    mean = diagonal.mean() if not unused.all() else torch.ones((), device=hessian.device)
    dampening = percdamp
    while dampening <= _MAX_DAMPENING:
        dampened = hessian + torch.diag((dampening * mean).expand(len(hessian)))
        lower, failed = torch.linalg.cholesky_ex(dampened)
        if not failed:
            factor: torch.Tensor
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(factor).all():
                return factor
        dampening = max(dampening * 10, 1e-4)
        logger.info("the hessian is singular: dampening=%g", dampening)
    raise WeightsError(f"no dampening up to {_MAX_DAMPENING:g} makes a layer's Hessian invertible")
