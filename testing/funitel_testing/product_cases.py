"""Quantised matrices and rows for kernels that multiply: shapes, groups and kinds, each drawn from a seed."""

from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.matmul_kernels import TritonProducts
from funitel.model_server.quantized.packed_matrix import CodeKind

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of a weight that is made in float32 and put in another precision; Triton's interpreter cuts bfloat16 off, cards round.
_WEIGHT_ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
_OUT_ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
_SUM_ROUNDING = 2.0**-23
_MIN_FLOAT16 = 2.0**-24


@dataclass(frozen=True)
class ProductCase:
    """Some rows times one or two matrices on the same input."""

    seed: int
    kind: CodeKind
    dtype: torch.dtype
    num_rows: int
    num_inputs: int
    outputs: tuple[int, ...]
    group_size: int  # -1 for one group
    first_input: int  # of a rank: groups are cut where it falls inside one
    is_reordered: bool
    is_symmetric: bool
    has_bias: bool
    num_processors: int

    def __str__(self) -> str:
        marks = ["reordered"] * self.is_reordered + ["symmetric"] * self.is_symmetric + ["bias"] * self.has_bias
        shape = f"{self.num_rows}x{self.num_inputs}x{'+'.join(map(str, self.outputs))}-g{self.group_size}"
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join([str(self.seed), self.kind.name.lower(), dtype, shape, f"from{self.first_input}", *marks])


def draw(seed: int, *, is_short: bool = False) -> ProductCase:
    """A case of its own for each seed; short ones take the interpreter a fraction of a second."""
    random = np.random.default_rng(seed)
    group_size = int(random.choice([16, 32, 64, 128, -1]))
    most_inputs, most_outputs = (200, 60) if is_short else (1500, 300)
    return ProductCase(
        seed=seed,
        kind=list(CodeKind)[seed % 4],
        dtype=DTYPES[seed // 4 % 3],
        num_rows=int(random.choice([1, 2, 5, 16, 17, 40] if is_short else [1, 3, 16, 31, 64, 100, 256, 257])),
        num_inputs=int(random.integers(20, most_inputs)),
        outputs=tuple(int(n) for n in random.integers(1, most_outputs, random.integers(1, 3))),
        group_size=group_size,
        first_input=int(random.integers(1, 150)) if random.random() < 0.3 else 0,
        is_reordered=bool(random.random() < 0.3),
        is_symmetric=bool(random.random() < 0.5),
        has_bias=bool(random.random() < 0.5),
        num_processors=int(random.choice([1, 16, 132])),
    )


def codes_of(case: ProductCase, num_outputs: int, groups: torch.Tensor, random: np.random.Generator) -> Codes:
    """A matrix of this kind over inputs of these groups."""
    num_groups = int(groups.max()) + 1
    scales = torch.from_numpy(random.uniform(0.5, 1.5, (num_outputs, num_groups)).astype(np.float32) / 16).half()
    zeros = torch.full((num_outputs, num_groups), case.kind.middle, dtype=torch.uint8)
    size = (num_outputs, len(groups))
    if case.kind is CodeKind.FLOAT8:
        codes = torch.from_numpy(random.standard_normal(size)).float() * 2.0 ** float(random.integers(-6, 6))
        return Codes(codes.clamp(-448, 448).to(torch.float8_e4m3fn), scales.float(), zeros, groups)
    if case.kind is CodeKind.FLOAT4:
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = torch.from_numpy(random.choice(numbers, size)).float()
        return Codes(codes.to(torch.float8_e4m3fn), scales.float(), zeros, groups)
    top = 1 << case.kind.bits
    if not case.is_symmetric:
        zeros = torch.from_numpy(random.integers(0, top, zeros.shape, dtype=np.uint8))
    return Codes(torch.from_numpy(random.integers(0, top, size, dtype=np.uint8)), scales, zeros, groups)


def excess(case: ProductCase, device: torch.device) -> float:
    """How far the product is off, in units of the largest error that rounding may make; infinite where it is no number.

    A weight is rounded once, a sum of n terms in float32 n times in whatever order, and the result once; a float16 of
    less than 2**-14 is rounded to a multiple of 2**-24.
    """
    random = np.random.default_rng(case.seed + 1)
    num_inputs = case.first_input + case.num_inputs
    groups = torch.arange(num_inputs) // (num_inputs if case.group_size == -1 else case.group_size)
    if case.is_reordered:
        groups = groups[torch.from_numpy(random.permutation(num_inputs))]
    groups = groups[case.first_input :]
    groups = groups - groups.min()
    parts = [codes_of(case, n, groups, random) for n in case.outputs]
    weights = torch.cat([part.dequantize(torch.float64) for part in parts])
    x = torch.from_numpy(random.standard_normal((case.num_rows, case.num_inputs))).to(case.dtype)
    bias = torch.from_numpy(random.standard_normal(sum(case.outputs))).to(case.dtype) if case.has_bias else None
    product = TritonProducts(case.num_processors).of(
        [part.to(device) for part in parts], None if bias is None else bias.to(device)
    )
    found = product(x.to(device)).cpu().double()
    expected, terms = x.double() @ weights.t(), x.double().abs() @ weights.abs().t()
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    least = _MIN_FLOAT16 if case.dtype is torch.float16 else 0.0
    bound = terms * (_WEIGHT_ROUNDING[case.dtype] + (case.num_inputs + 1) * _SUM_ROUNDING)
    bound += expected.abs() * _OUT_ROUNDING[case.dtype] + least * (1 + x.double().abs().sum(1, keepdim=True))
    excesses = (found - expected).abs() / (bound + 1e-30)
    return float(excesses.max()) if found.isfinite().all() else float("inf")
