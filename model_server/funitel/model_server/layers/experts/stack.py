"""Stack the weights of a layer's experts for kernels: gates and values in one tensor, down projections in another."""

from collections.abc import Sequence
from typing import Any

import torch

from funitel.model_server.layers.expert_ops import ExpertStack
from funitel.model_server.layers.linear import Matmul
from funitel.model_server.layers.mlp import Experts, Mlp
from funitel.model_server.quantized.matmul import Product

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def stack_experts(mixture: Experts) -> None:
    """Stack the weights of a mixture's experts, and have each expert find its own there.

    While one of the two tensors is filled, the device holds it twice.

    Raises:
        ValueError: kernels do not compute such experts; nothing has changed.
    """
    reason = refusal(mixture.experts)
    if reason is not None:
        raise ValueError(reason)
    gate_up = _stacked([mlp.up.matmul for mlp in mixture.experts])
    down = _stacked([mlp.down.matmul for mlp in mixture.experts])
    mixture.held_experts.stack = ExpertStack(gate_up, down, mixture.experts[0].activation)


def refusal(mlps: Sequence[Mlp]) -> str | None:
    """Why kernels do not compute such experts; None where they do."""
    if not mlps:
        return "this rank has no experts"
    if not all(mlp.is_gated and mlp.is_plain and mlp.scale == 1.0 for mlp in mlps):
        return "experts have no gates, or gates that are interleaved, limited or scaled"
    products: list[Any] = [layer.matmul for mlp in mlps for layer in (mlp.up, mlp.down)]
    if not all(isinstance(product, Matmul) and not product.is_packed for product in products):
        return "the weights of experts are quantised or repacked"
    if any(product.bias is not None for product in products):
        return "experts have biases"
    if len({product.weight.dtype for product in products}) > 1 or products[0].weight.dtype not in _DTYPES:
        return f"the weights of experts are {products[0].weight.dtype}"
    return None


def _stacked(products: Sequence[Product]) -> torch.Tensor:
    """The matrices of some products, [products, outputs, inputs]; those of the products become views of it."""
    plain = [product for product in products if isinstance(product, Matmul)]
    whole = plain[0].weight.new_empty((len(products), *plain[0].weight.shape))
    for product, own in zip(plain, whole, strict=True):
        product.weight = own.copy_(product.weight)
    return whole
