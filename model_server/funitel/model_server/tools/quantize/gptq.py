"""GPTQ: round a layer's weights one input at a time, and let the inputs still to come make up for each error.

Source: Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1, with act-order over groups in place (AutoGPTQ's
`static_groups`). Pure functions of tensors; `layer_walk` brings the activations.
"""

import logging

import torch

from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.tools.quantize.level_grid import LevelGrid, searched
from funitel.proto.errors import WeightsError

logger = logging.getLogger(__name__)

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
    weight: torch.Tensor,
    hessian: torch.Tensor,
    *,
    group_size: int,
    percdamp: float,
    act_order: bool,
    symmetric: bool = False,
) -> Codes:
    """Quantise weights [outputs, inputs] to 4 bits.

    The levels of every group are chosen before the first weight is rounded, so that groups hold inputs in their own
    order whatever the order of rounding, and their scales are fitted once more to the codes that came out.

    Args:
        weight: the layer's weights.
        hessian: [inputs, inputs], from `Hessian`.
        group_size: inputs that share a scale; -1 for one group.
        percdamp: dampening, as a share of the Hessian's mean diagonal.
        act_order: begin with the inputs that matter most.
        symmetric: the levels of a group lie around zero, else each group has a zero point.

    Raises:
        WeightsError: the activations are not finite, or no dampening makes the Hessian invertible.
    """
    num_inputs = weight.shape[1]
    weight = weight.float()
    size = num_inputs if group_size == -1 else group_size
    order = torch.arange(num_inputs, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    dampened, factor = _inverse_factor(hessian, order, percdamp)
    grid = searched(weight, dampened.diagonal(), size, symmetric=symmetric)
    codes = _rounded_in_order(weight[:, order], grid, order.tolist(), factor)[:, order.argsort()]
    return grid.refitted(codes, weight, dampened).codes(codes)


def _rounded_in_order(left: torch.Tensor, grid: LevelGrid, order: list[int], factor: torch.Tensor) -> torch.Tensor:
    """Codes of the columns of `left`, which are inputs `order`; it changes to what made up for others' errors."""
    codes = torch.empty_like(left)
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        errors = torch.empty_like(left[:, start:end])
        for i in range(start, end):
            codes[:, i], rounded = grid.round_column(left[:, i], order[i])
            error = (left[:, i] - rounded) / factor[i, i]
            left[:, i:end].addr_(error, factor[i, i:end], alpha=-1)
            errors[:, i - start] = error
        left[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    return codes


def output_error(weight: torch.Tensor, quantised: torch.Tensor, hessian: torch.Tensor) -> float:
    """Size of the error in the layer's outputs over the calibration texts, relative to the outputs."""
    lost = (weight - quantised).float()
    of_error = (lost @ hessian * lost).sum().clamp_min(0)
    of_output = (weight.float() @ hessian * weight).sum()
    return float((of_error / of_output).sqrt()) if of_output > 0 else 0.0


def _inverse_factor(hessian: torch.Tensor, order: torch.Tensor, percdamp: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The dampened Hessian, and the upper Cholesky factor of its inverse with inputs in `order`."""
    if not torch.isfinite(hessian).all():
        raise WeightsError("the calibration texts give activations that are not finite")
    diagonal = hessian.diagonal()
    unused = diagonal == 0  # inputs that are always zero: their weights are rounded, nothing else follows from them
    hessian = hessian + torch.diag(unused.to(hessian.dtype))
    mean = diagonal.mean() if not unused.all() else torch.ones((), device=hessian.device)
    dampening = percdamp
    while dampening <= _MAX_DAMPENING:
        dampened = hessian + torch.diag((dampening * mean).expand(len(hessian)))
        lower, failed = torch.linalg.cholesky_ex(dampened[order][:, order])
        if not failed:
            factor: torch.Tensor
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(factor).all():
                return dampened, factor
        dampening = max(dampening * 10, 1e-4)
        logger.info("the hessian is singular: dampening=%g", dampening)
    raise WeightsError(f"no dampening up to {_MAX_DAMPENING:g} makes a layer's Hessian invertible")
