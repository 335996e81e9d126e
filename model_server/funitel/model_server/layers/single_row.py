"""Whether a GPU multiplies single rows in our own kernels: if a check at start finds them right."""

import logging
from functools import cache
from importlib import import_module
from typing import Protocol

import torch
import torch.nn.functional as F

from funitel.model_server.device.probe_or_fall_back import check_probe, probe_or_fall_back, reason_of
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.spec.model_spec import Activation

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # elements: each row of a matrix begins where a thread may load several at once
_PROBES = ((48, 64), (24, 4816))  # outputs and inputs


class SingleRowProducts(Protocol):
    """Products of one row; `single_row_kernels` has them."""

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x @ weight.T + bias, of [1, inputs] and [outputs, inputs], in `dtype` or that of `x`."""

    def multiply_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        """The activated first half of the product times its second half, [1, outputs / 2]."""


def products_for(weight: torch.Tensor) -> SingleRowProducts | None:
    """Those with a matrix [outputs, inputs]; None where there are no kernels for it."""
    if weight.device.type != "cuda" or weight.dtype not in _DTYPES:
        return None
    if weight.dim() != 2 or weight.shape[1] % _ALIGNMENT or not weight.is_contiguous():
        return None
    return _checked(weight.device, weight.dtype)


@cache
def _checked(device: torch.device, dtype: torch.dtype) -> SingleRowProducts | None:
    """The kernels, or None and a warning where their check fails; once for each device and precision."""

    def probe() -> SingleRowProducts:
        # Triton: seconds to import, and there with torch's builds for GPUs only
        products: SingleRowProducts = import_module("funitel.model_server.layers.single_row_kernels")
        with torch.inference_mode():
            check(products, device, dtype)
        logger.info("single rows are multiplied in Triton kernels")
        return products

    def fall_back(error: Exception) -> None:
        logger.warning("single rows are multiplied by the library, without the Triton kernels: %s", reason_of(error))

    return probe_or_fall_back(probe, fall_back)


def check(products: SingleRowProducts, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless products of a row are torch's, for numbers drawn at random."""
    generator = seeded_generator(0, device)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    for num_outputs, num_inputs in _PROBES:
        x, weight = drawn(1, num_inputs) / num_inputs**0.5, drawn(num_outputs, num_inputs)
        for bias in (None, drawn(num_outputs)):
            whole = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
            gate, value = whole.to(dtype).float().chunk(2, dim=-1)
            check_probe(products.multiply(x, weight, bias), whole)
            check_probe(products.multiply(x, weight, bias, torch.float32), whole)
            check_probe(products.multiply_gated(x, weight, bias, Activation.SILU), F.silu(gate) * value)
