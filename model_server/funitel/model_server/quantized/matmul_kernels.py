"""Triton kernels of x @ weight.T with weights of 4 or 8 bits: packed in memory, unpacked in registers.

`multiply` serves few rows. A program takes a tile of rows and of outputs and walks over the inputs, one chunk of words
a turn. Where tiles are fewer than the multiprocessors, inputs are cut into parts, each a program of its own, and
`_merge` adds these up in order. For many rows a tile would be unpacked again for each tile of rows, so `unpack` makes
floating point of the matrix once and the library multiplies.

A weight is rounded to the precision of the activations, as one that is unpacked when it is loaded; sums are float32. No
launch depends on what tensors hold, only on their shapes: a CUDA graph may replay it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from funitel.model_server.quantized.bit_packing import WORD_BITS, Codes
from funitel.model_server.quantized.config import Quantization
from funitel.model_server.quantized.matmul import Product
from funitel.model_server.quantized.packed_matrix import CodeKind, PackedMatrix, is_float4

_IS_INTERPRETED = triton.knobs.runtime.interpret  # Triton's interpreter multiplies bfloat16 as the integers they lie in
_MIN_CHUNKS = 4  # of a part: what a program reads to be worth its start
_MAX_PARTS = 16
_INT4 = tl.constexpr(int(CodeKind.INT4))
_FLOAT8 = tl.constexpr(int(CodeKind.FLOAT8))
_FLOAT4 = tl.constexpr(int(CodeKind.FLOAT4))
# 2**23 as a float32: an integer below 2**23 in its mantissa's place is that float32 more.
_MAGIC_BITS = tl.constexpr(0x4B000000)
_MAGIC = tl.constexpr(8388608.0)


def multiply(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, num_processors: int) -> torch.Tensor:
    """x [num_rows, inputs] @ weights.T + bias: [num_rows, outputs], of the type of x; rows of x are contiguous.

    `num_processors` are streaming multiprocessors that programs are to fill.
    """
    num_rows, num_outputs = x.shape[0], matrix.num_outputs
    out = x.new_empty((num_rows, num_outputs))
    if num_rows == 0:
        return out
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    outputs = 64 if rows == 16 else 128
    tiles = triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, outputs)
    num_chunks = matrix.words.shape[0] // matrix.span
    num_parts = _num_parts(tiles[0] * tiles[1], num_chunks, num_processors)
    sums = out if num_parts == 1 else x.new_empty((num_parts, num_rows, num_outputs), dtype=torch.float32)
    _multiply_tile[(*tiles, num_parts)](
        x,
        *_tensors(matrix),
        x if bias is None else bias,
        sums,
        num_rows,
        num_outputs,
        matrix.num_inputs,
        matrix.scales.shape[0],
        num_chunks,
        x.stride(0),
        **_constants(matrix),
        HAS_BIAS=bias is not None,
        NUM_PARTS=num_parts,
        ROWS=rows,
        OUTPUTS=outputs,
        IN_FLOAT32=x.dtype is torch.float32 or _IS_INTERPRETED,
        num_warps=4 if rows < 64 else 8,
    )
    if num_parts > 1:
        size = num_rows * num_outputs
        _merge[(triton.cdiv(size, 1024),)](
            sums, x if bias is None else bias, out, size, num_outputs, num_parts, HAS_BIAS=bias is not None, SIZE=1024
        )
    return out


def unpack(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The weights [inputs, outputs] in floating point."""
    num_inputs, num_outputs, outputs = matrix.num_inputs, matrix.num_outputs, 128
    weights = torch.empty((num_inputs, num_outputs), dtype=dtype, device=matrix.words.device)
    _unpack_tile[(matrix.words.shape[0] // matrix.span, triton.cdiv(num_outputs, outputs))](
        *_tensors(matrix),
        weights,
        num_outputs,
        num_inputs,
        matrix.scales.shape[0],
        **_constants(matrix),
        OUTPUTS=outputs,
        num_warps=4,
    )
    return weights


def _num_parts(num_tiles: int, num_chunks: int, num_processors: int) -> int:
    """Into how many parts to cut the inputs: a power of two, as each number is compiled."""
    parts = min(2 * num_processors // num_tiles, num_chunks // _MIN_CHUNKS, _MAX_PARTS)
    return 1 << (parts.bit_length() - 1) if parts > 1 else 1


def _tensors(matrix: PackedMatrix) -> tuple[torch.Tensor, ...]:
    """What a kernel reads of a matrix; the words stand in for what it does not have."""
    optional = (matrix.zeros, matrix.bases, matrix.order, matrix.groups)
    return (matrix.words, matrix.scales, *(matrix.words if each is None else each for each in optional))


def _constants(matrix: PackedMatrix) -> dict[str, int | bool]:
    return {
        "KIND": int(matrix.kind),
        "PER_WORD": WORD_BITS // matrix.kind.bits,
        "MIDDLE": matrix.middle,
        "SPAN": matrix.span,
        "GROUP_SPANS": matrix.group_spans,
        "HAS_ZEROS": matrix.zeros is not None,
        "HAS_BASES": matrix.bases is not None,
        "HAS_ORDER": matrix.order is not None,
    }


@triton.jit
def _values(word, place: tl.constexpr, KIND: tl.constexpr):
    """The codes at one place of words as float32: of e4m3 a 256th, of e2m1 a 2**14th, of integers 2**23 more."""
    if KIND == _FLOAT8:
        # Sign, exponent and mantissa in their places in a float16, where the exponent counts from 8 further below.
        code = word >> (8 * place)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == _FLOAT4:
        code = word >> (4 * place)
        bits = ((code & 0x8) << 12) | ((code & 0x7) << 9)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if KIND == _INT4:
            code = (word >> (4 * place)) & 0xF
        else:
            code = (word >> (8 * place)) & 0xFF
        return (code | _MAGIC_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _group_start(groups, span, num_groups, num_outputs, GROUP_SPANS: tl.constexpr):
    """Where the scales of a span's group begin."""
    if GROUP_SPANS > 0:
        group = tl.minimum(span // GROUP_SPANS, num_groups - 1)
    else:
        group = tl.load(groups + span)
    return group.to(tl.int64) * num_outputs


@triton.jit
def _weights(
    values,
    scales,
    zeros,
    bases,
    is_column,
    KIND: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BASES: tl.constexpr,
):
    """The weights [SPAN, OUTPUTS] of one span in float32, from its codes and what its group has."""
    scale = tl.load(scales, mask=is_column, other=0.0).to(tl.float32)
    if KIND == _FLOAT8:
        return values * (scale * 256.0)[None, :]
    elif KIND == _FLOAT4:
        return values * (scale * 16384.0)[None, :]
    elif HAS_BASES:
        base = tl.load(bases, mask=is_column, other=0.0).to(tl.float32)
        return (values - (MIDDLE + _MAGIC)) * scale[None, :] + base[None, :]
    elif HAS_ZEROS:
        zero = tl.load(zeros, mask=is_column, other=0).to(tl.float32) + _MAGIC
        return (values - zero[None, :]) * scale[None, :]
    else:
        return (values - (MIDDLE + _MAGIC)) * scale[None, :]


@triton.jit
def _inputs(order, span, num_inputs, SPAN: tl.constexpr, HAS_ORDER: tl.constexpr):
    """Where the inputs of a span come from, and which of them are any."""
    place = span * SPAN + tl.arange(0, SPAN)
    if HAS_ORDER:
        place = tl.load(order + place)
        return place, place >= 0
    else:
        return place, place < num_inputs


@triton.jit
def _multiply_tile(
    x,
    words,
    scales,
    zeros,
    bases,
    order,
    groups,
    bias,
    sums,
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,
    num_chunks,
    x_stride,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    MIDDLE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP_SPANS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BASES: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """One tile of rows and outputs, one part of the inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    is_row, is_column = row < num_rows, column < num_outputs
    row_places = x + row.to(tl.int64)[:, None] * x_stride
    begin = part * tl.cdiv(num_chunks, NUM_PARTS)
    end = tl.minimum(begin + tl.cdiv(num_chunks, NUM_PARTS), num_chunks)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for chunk in range(begin, end):
        lines = (chunk * SPAN + tl.arange(0, SPAN)).to(tl.int64)
        word = tl.load(words + lines[:, None] * num_outputs + column[None, :], mask=is_column[None, :], other=0)
        for place in tl.static_range(PER_WORD):
            span = chunk * PER_WORD + place
            source, is_input = _inputs(order, span, num_inputs, SPAN, HAS_ORDER)
            some = tl.load(row_places + source[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
            group = _group_start(groups, span, num_groups, num_outputs, GROUP_SPANS) + column
            values = _values(word, place, KIND)
            weights = _weights(
                values, scales + group, zeros + group, bases + group, is_column, KIND, MIDDLE, HAS_ZEROS, HAS_BASES
            ).to(some.dtype)
            if IN_FLOAT32:
                total = tl.dot(some.to(tl.float32), weights.to(tl.float32), total, input_precision="ieee")
            else:
                total = tl.dot(some, weights, total)
    places = row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    is_place = is_row[:, None] & is_column[None, :]
    if NUM_PARTS == 1:
        if HAS_BIAS:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        tl.store(sums + places, total.to(sums.dtype.element_ty), mask=is_place)
    else:
        first = part.to(tl.int64) * num_rows * num_outputs
        tl.store(sums + first + places, total, mask=is_place)


@triton.jit
def _merge(sums, bias, out, size, num_outputs, num_parts, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr):
    """Some of the products: the sums of their parts, and the bias."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_place = place < size
    total = tl.zeros([SIZE], tl.float32)
    for part in range(num_parts):
        total += tl.load(sums + part * size + place, mask=is_place, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + place % num_outputs, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)


@triton.jit
def _unpack_tile(
    words,
    scales,
    zeros,
    bases,
    order,
    groups,
    out,
    num_outputs,
    num_inputs,
    num_groups,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    MIDDLE: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP_SPANS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BASES: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """The weights of one chunk for some outputs, each line where its input belongs."""
    chunk = tl.program_id(0)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = column < num_outputs
    lines = (chunk * SPAN + tl.arange(0, SPAN)).to(tl.int64)
    word = tl.load(words + lines[:, None] * num_outputs + column[None, :], mask=is_column[None, :], other=0)
    for place in tl.static_range(PER_WORD):
        span = chunk * PER_WORD + place
        target, is_input = _inputs(order, span, num_inputs, SPAN, HAS_ORDER)
        group = _group_start(groups, span, num_groups, num_outputs, GROUP_SPANS) + column
        values = _values(word, place, KIND)
        weights = _weights(
            values, scales + group, zeros + group, bases + group, is_column, KIND, MIDDLE, HAS_ZEROS, HAS_BASES
        )
        places = target.to(tl.int64)[:, None] * num_outputs + column[None, :]
        tl.store(out + places, weights.to(out.dtype.element_ty), mask=is_input[:, None] & is_column[None, :])


_MAX_PACKED_ROWS = 256  # beyond, unpacking the matrix once costs less than unpacking it for each tile of rows


class PackedProduct:
    """Product with matrices on the same input that stay packed.

    Args:
        matrices: one's outputs come after the other's.
        bias: of all outputs.
        num_processors: streaming multiprocessors that programs are to fill.
    """

    def __init__(self, matrices: Sequence[PackedMatrix], bias: torch.Tensor | None, num_processors: int) -> None:
        self.bias = bias
        self.matrices = matrices
        sizes = [matrix.num_outputs for matrix in matrices]
        self._biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        self._num_processors = num_processors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [self._product(x, *each) for each in zip(self.matrices, self._biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _product(self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] <= _MAX_PACKED_ROWS:
            return multiply(x, matrix, bias, self._num_processors)
        weights = unpack(matrix, x.dtype)
        return x @ weights if bias is None else torch.addmm(bias, x, weights)


class TritonProducts:
    """See Products."""

    name = "triton"

    def __init__(self, num_processors: int, made: Quantization | None = None) -> None:
        self.made = made
        self._num_processors = num_processors

    def of(self, parts: Sequence[Codes], bias: torch.Tensor | None) -> Product:
        """See QuantizedMatmul. Matrices of the same kind with inputs grouped alike become one."""
        if all(torch.equal(part.groups, parts[0].groups) for part in parts) and len({*map(_form_of, parts)}) == 1:
            parts = [Codes.stacked(parts)]
        return PackedProduct([PackedMatrix.of(part, _kind_of(part)) for part in parts], bias, self._num_processors)


def _form_of(codes: Codes) -> tuple[CodeKind, torch.dtype | None]:
    """What must be alike of matrices that become one: the kind of the codes, and of the bases."""
    return _kind_of(codes), None if codes.bases is None else codes.bases.dtype


def _kind_of(codes: Codes) -> CodeKind:
    if codes.codes.dtype is not torch.uint8:
        return CodeKind.FLOAT4 if is_float4(codes.codes) else CodeKind.FLOAT8
    most = max(int(part.max()) if part.numel() else 0 for part in (codes.codes, codes.zeros))
    return CodeKind.INT4 if most < 1 << CodeKind.INT4.bits else CodeKind.INT8
