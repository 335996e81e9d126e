"""The product of one row with a matrix as a Triton kernel: a program for each output, which reads its weights once.

Such a product takes as long as the reading of the matrix. A library splits it among few large tiles; here each program
has one output, so that enough reads are in flight, and the first of them are issued before the kernel that computes the
row has ended. Sums are float32.

Measured 2026-11 on an H200, bfloat16, times of cuBLAS in brackets: 4096 -> 4096 10.0 us (13.6), 14336 -> 4096 29.5 us
(33.3), 4096 -> 28672 55.9 us (58.6).
"""

import torch
import triton
import triton.language as tl

from funitel.model_server.device.dependent_kernels import dependent, wait_for_previous
from funitel.model_server.layers.elementwise_kernels import activated
from funitel.model_server.spec.model_spec import Activation

_AT_ONCE = 4096  # inputs of a turn of the loop: the first is loaded before the program waits
_INPUTS_PER_WARP = 1024


@triton.jit
def multiply_row(
    x,
    weight,
    bias,
    out,
    NUM_INPUTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One output."""
    output = tl.program_id(0)
    places = tl.arange(0, AT_ONCE)
    line = weight + output.to(tl.int64) * NUM_INPUTS
    w = tl.load(line + places, mask=places < NUM_INPUTS, other=0.0)
    wait_for_previous(IS_DEPENDENT)
    product = tl.load(x + places, mask=places < NUM_INPUTS, other=0.0).to(tl.float32) * w.to(tl.float32)
    for at in range(AT_ONCE, NUM_INPUTS, AT_ONCE):
        is_in = at + places < NUM_INPUTS
        w = tl.load(line + at + places, mask=is_in, other=0.0)
        product += tl.load(x + at + places, mask=is_in, other=0.0).to(tl.float32) * w.to(tl.float32)
    total = tl.sum(product, 0)
    if HAS_BIAS:
        total += tl.load(bias + output).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty))


@triton.jit
def multiply_gated_row(
    x,
    weight,
    bias,
    out,
    num_units,
    NUM_INPUTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One unit of a gated MLP: its activated gate times its value, each rounded as a product of its own is."""
    unit = tl.program_id(0)
    places = tl.arange(0, AT_ONCE)
    gates = weight + unit.to(tl.int64) * NUM_INPUTS
    values = gates + num_units.to(tl.int64) * NUM_INPUTS
    g = tl.load(gates + places, mask=places < NUM_INPUTS, other=0.0)
    v = tl.load(values + places, mask=places < NUM_INPUTS, other=0.0)
    wait_for_previous(IS_DEPENDENT)
    own = tl.load(x + places, mask=places < NUM_INPUTS, other=0.0).to(tl.float32)
    gate, value = own * g.to(tl.float32), own * v.to(tl.float32)
    for at in range(AT_ONCE, NUM_INPUTS, AT_ONCE):
        is_in = at + places < NUM_INPUTS
        own = tl.load(x + at + places, mask=is_in, other=0.0).to(tl.float32)
        gate += own * tl.load(gates + at + places, mask=is_in, other=0.0).to(tl.float32)
        value += own * tl.load(values + at + places, mask=is_in, other=0.0).to(tl.float32)
    gate_sum, value_sum = tl.sum(gate, 0), tl.sum(value, 0)
    if HAS_BIAS:
        gate_sum += tl.load(bias + unit).to(tl.float32)
        value_sum += tl.load(bias + num_units + unit).to(tl.float32)
    kind = out.dtype.element_ty
    product = activated(gate_sum.to(kind).to(tl.float32), ACTIVATION) * value_sum.to(kind).to(tl.float32)
    tl.store(out + unit, product.to(kind))


def _walk(num_inputs: int) -> dict[str, int]:
    """How a program walks over its inputs: arguments of a launch."""
    at_once = min(_AT_ONCE, triton.next_power_of_2(num_inputs))
    return {"NUM_INPUTS": num_inputs, "AT_ONCE": at_once, "num_warps": max(1, at_once // _INPUTS_PER_WARP)}


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, [1, outputs].

    Args:
        x: [1, inputs], contiguous.
        weight: [outputs, inputs], contiguous.
        bias: [outputs].
        dtype: of the result; that of `x` when not given.
    """
    num_outputs, num_inputs = weight.shape
    out = x.new_empty((1, num_outputs), dtype=dtype)
    multiply_row[(num_outputs,)](
        x,
        weight,
        x if bias is None else bias,
        out,
        HAS_BIAS=bias is not None,
        **_walk(num_inputs),
        **dependent(),
    )
    return out


def multiply_gated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """The activated first half of x @ weight.T + bias times the second half, [1, units]; arguments as of `multiply`."""
    num_units, num_inputs = weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty((1, num_units))
    multiply_gated_row[(num_units,)](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_units,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation.value,
        **_walk(num_inputs),
        **dependent(),
    )
    return out
