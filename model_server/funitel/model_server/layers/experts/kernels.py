"""Triton kernels of a mixture of experts: all chosen experts of a step in four launches.

The first sorts rows by expert (`layout`). The second multiplies the rows of each tile by the gates and values of its
expert, activates and multiplies these. The third multiplies by the down projection and by the share. The fourth sums
the results of a token in the order in which its experts were chosen. With few rows the reading of the chosen experts'
weights is all that counts: each is read once, by as many programs as there are tiles of units.

Sums are float32. No launch depends on what tensors hold, only on their shapes: a CUDA graph may replay it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from funitel.model_server.device.dependent_kernels import dependent, wait_for_previous
from funitel.model_server.device.probe_or_fall_back import check_probe
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.layers.elementwise_kernels import activated
from funitel.model_server.layers.expert_ops import HeldExperts, TorchExpertOps
from funitel.model_server.layers.experts.layout_kernels import ExpertLayout, lay_out

_IS_INTERPRETED = triton.knobs.runtime.interpret  # Triton's interpreter multiplies bfloat16 as the integers they lie in
_GROUP = 8  # tiles of rows that share a tile of weights while the cache has it
_SUMMED_AT_ONCE = 1024


class TileShape(NamedTuple):
    """Rows, outputs and inputs of a program, and how it is compiled."""

    rows: int
    units: int  # outputs of the first product: as many gates and as many values
    outputs: int  # of the second
    inputs: int  # of a turn of the loop
    num_warps: int
    num_stages: int

    def half(self) -> "TileShape":
        """The same rows with as many bytes of weights of 32 bits: their products take more registers."""
        return self._replace(units=self.units // 2, outputs=self.outputs // 2, inputs=self.inputs // 2)


TILE_SHAPES = (
    TileShape(16, 32, 64, 128, 4, 4),
    TileShape(32, 64, 64, 64, 4, 4),
    TileShape(64, 64, 128, 64, 4, 4),
    TileShape(128, 64, 128, 64, 8, 4),
)
"""By rows. Those of few rows have narrow tiles of units, so that one token's experts fill the multiprocessors."""


def tile_shape(num_pairs: int, num_experts: int, dtype: torch.dtype) -> TileShape:
    """A tile that most experts fill at most once: half as many rows again as one of all experts has on average."""
    average = 3 * num_pairs // (2 * num_experts)
    found = next((shape for shape in TILE_SHAPES if shape.rows >= average), TILE_SHAPES[-1])
    return found if dtype.itemsize == 2 else found.half()


@triton.jit
def _multiplied(a, b, total, IN_FLOAT32: tl.constexpr):
    """The sum of `total` and the product of two tiles."""
    if IN_FLOAT32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total)


@triton.jit
def _weight_tile(places, inputs, NUM_INPUTS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """A tile [inputs, outputs] of weights; the last inputs are masked where a tile is not whole."""
    if IS_WHOLE:
        return tl.load(places)
    else:
        return tl.load(places, mask=(inputs < NUM_INPUTS)[:, None], other=0.0)


@triton.jit
def multiply_gate_up(
    x,
    weight,
    shares,
    pairs,
    tile_experts,
    gated,
    NUM_CHOSEN: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INPUT_SCALED: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A tile of rows of one expert and of its units: activated gates times values."""
    tile, column = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP)
    wait_for_previous(IS_DEPENDENT)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
        is_row = (pair >= 0)[:, None]
        token = tl.maximum(pair, 0) // NUM_CHOSEN
        unit = column * UNITS + tl.arange(0, UNITS)
        line = tl.minimum(unit, NUM_UNITS - 1)
        inputs = tl.arange(0, INPUTS)
        rows = x + token.to(tl.int64)[:, None] * NUM_INPUTS + inputs[None, :]
        own = weight + expert.to(tl.int64) * (2 * NUM_UNITS * NUM_INPUTS)
        gates = own + line.to(tl.int64)[None, :] * NUM_INPUTS + inputs[:, None]
        values = gates + NUM_UNITS * NUM_INPUTS
        if IS_INPUT_SCALED:
            share = tl.load(shares + pair, mask=pair >= 0, other=0.0)[:, None]
        gate = tl.zeros([ROWS, UNITS], tl.float32)
        value = tl.zeros([ROWS, UNITS], tl.float32)
        for at in range(0, NUM_INPUTS, INPUTS):
            some = tl.load(rows + at, mask=is_row & (at + inputs < NUM_INPUTS)[None, :], other=0.0)
            if IS_INPUT_SCALED:
                some = (some.to(tl.float32) * share).to(some.dtype)
            g = _weight_tile(gates + at, at + inputs, NUM_INPUTS, NUM_INPUTS % INPUTS == 0)
            v = _weight_tile(values + at, at + inputs, NUM_INPUTS, NUM_INPUTS % INPUTS == 0)
            gate = _multiplied(some, g, gate, IN_FLOAT32)
            value = _multiplied(some, v, value, IN_FLOAT32)
        product = activated(gate, ACTIVATION) * value
        places = gated + tl.maximum(pair, 0).to(tl.int64)[:, None] * NUM_UNITS + unit[None, :]
        tl.store(places, product.to(gated.dtype.element_ty), mask=is_row & (unit < NUM_UNITS)[None, :])


@triton.jit
def multiply_down(
    gated,
    weight,
    shares,
    pairs,
    tile_experts,
    results,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_INPUT_SCALED: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A tile of rows of one expert and of its outputs, times the shares unless the inputs had them."""
    tile, column = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP)
    wait_for_previous(IS_DEPENDENT)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
        is_row = (pair >= 0)[:, None]
        place = tl.maximum(pair, 0).to(tl.int64)[:, None]
        output = column * OUTPUTS + tl.arange(0, OUTPUTS)
        line = tl.minimum(output, NUM_OUTPUTS - 1)
        inputs = tl.arange(0, INPUTS)
        rows = gated + place * NUM_INPUTS + inputs[None, :]
        own = weight + expert.to(tl.int64) * (NUM_OUTPUTS * NUM_INPUTS)
        columns = own + line.to(tl.int64)[None, :] * NUM_INPUTS + inputs[:, None]
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for at in range(0, NUM_INPUTS, INPUTS):
            some = tl.load(rows + at, mask=is_row & (at + inputs < NUM_INPUTS)[None, :], other=0.0)
            w = _weight_tile(columns + at, at + inputs, NUM_INPUTS, NUM_INPUTS % INPUTS == 0)
            total = _multiplied(some, w, total, IN_FLOAT32)
        if not IS_INPUT_SCALED:
            total = total * tl.load(shares + pair, mask=pair >= 0, other=0.0)[:, None]
        places = results + place * NUM_OUTPUTS + output[None, :]
        tl.store(places, total.to(results.dtype.element_ty), mask=is_row & (output < NUM_OUTPUTS)[None, :])


@triton.jit(do_not_specialize=["first_held", "num_held"])
def add_chosen(
    results,
    chosen,
    shared,
    out,
    first_held,
    num_held,
    NUM_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Some elements of one token: what is shared and the results of its experts that are held, in their order."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_in = dims < SIZE
    wait_for_previous(IS_DEPENDENT)
    total = tl.zeros([AT_ONCE], tl.float32)
    if HAS_SHARED:
        total += tl.load(shared + token * SIZE + dims, mask=is_in, other=0.0).to(tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + i
        expert = tl.load(chosen + pair).to(tl.int32) - first_held
        size = tl.where((expert >= 0) & (expert < num_held), SIZE, 0)
        total += tl.load(results + pair * SIZE + dims, mask=dims < size, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + dims, total.to(out.dtype.element_ty), mask=is_in)


class TritonExpertOps:
    """Experts of a stack in the kernels of this module; the others as the reference computes them."""

    name = "triton"

    def __init__(self) -> None:
        self._reference = TorchExpertOps()

    def is_fixed(self, experts: HeldExperts) -> bool:
        """See ExpertOps."""
        return experts.stack is not None

    def add(
        self,
        experts: HeldExperts,
        x: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ExpertOps."""
        stack, (num_tokens, hidden_size), num_chosen = experts.stack, x.shape, chosen.shape[1]
        if stack is None or not num_tokens:
            return self._reference.add(experts, x, chosen, shares, shared)
        x, shares = x.contiguous(), shares.contiguous()
        shape = tile_shape(chosen.numel(), experts.num_experts, x.dtype)
        layout = lay_out(chosen, experts.held, shape.rows)
        num_units = stack.down.shape[2]
        gated = x.new_empty((chosen.numel(), num_units))
        results = x.new_empty((chosen.numel(), hidden_size))
        common = _common(shape, layout, x.dtype) | {"IS_INPUT_SCALED": experts.is_input_scaled}
        multiply_gate_up[(triton.cdiv(num_units, shape.units), len(layout.experts))](
            x,
            stack.gate_up,
            shares,
            layout.pairs,
            layout.experts,
            gated,
            NUM_CHOSEN=num_chosen,
            NUM_UNITS=num_units,
            NUM_INPUTS=hidden_size,
            UNITS=shape.units,
            ACTIVATION=stack.activation.value,
            **common,
        )
        multiply_down[(triton.cdiv(hidden_size, shape.outputs), len(layout.experts))](
            gated,
            stack.down,
            shares,
            layout.pairs,
            layout.experts,
            results,
            NUM_OUTPUTS=hidden_size,
            NUM_INPUTS=num_units,
            OUTPUTS=shape.outputs,
            **common,
        )
        out = torch.empty_like(x)
        add_chosen[(num_tokens, triton.cdiv(hidden_size, _SUMMED_AT_ONCE))](
            results,
            chosen,
            x if shared is None else shared.contiguous(),
            out,
            experts.held.start,
            len(experts.held),
            NUM_CHOSEN=num_chosen,
            SIZE=hidden_size,
            AT_ONCE=_SUMMED_AT_ONCE,
            HAS_SHARED=shared is not None,
            **dependent(),
        )
        return out


def _common(shape: TileShape, layout: ExpertLayout, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of both products."""
    return {
        "ROWS": layout.num_rows,
        "INPUTS": shape.inputs,
        "GROUP": _GROUP,
        "IN_FLOAT32": dtype is torch.float32 or _IS_INTERPRETED,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        **dependent(),
    }


def check_experts(experts: HeldExperts, num_chosen: int, hidden_size: int, device: torch.device) -> None:
    """Raise ValueError unless the kernels give what the reference gives with the weights of a stack.

    Numbers of tokens are such that tiles of every shape are compiled on the way, so that no request waits for them.
    """
    assert experts.stack is not None
    generator = seeded_generator(0, device)
    for shape in TILE_SHAPES:
        num_tokens = max(1, 2 * shape.rows * experts.num_experts // (3 * num_chosen))
        x = torch.randn((num_tokens, hidden_size), device=device, generator=generator).to(experts.stack.down.dtype)
        scores = torch.rand((num_tokens, experts.num_experts), device=device, generator=generator)
        shares, chosen = scores.topk(num_chosen)
        shared = torch.randn((num_tokens, hidden_size), device=device, generator=generator).to(x.dtype)
        expected = TorchExpertOps().add(experts, x, chosen, shares, shared.clone())
        check_probe(TritonExpertOps().add(experts, x, chosen, shares, shared), expected)
    # One token, with experts that are held: others leave nothing to compare.
    x, shares, chosen = x[:1], shares[:1], chosen[:1].clamp(experts.held.start, experts.held.stop - 1)
    expected = TorchExpertOps().add(experts, x, chosen, shares, None)
    check_probe(TritonExpertOps().add(experts, x, chosen, shares, None), expected)
