"""The Triton kernels multiply by packed weights as torch does by dequantised ones, over matrices drawn at random.

Without a GPU they run in Triton's interpreter, so this proves what they compute and nothing about their speed.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.matmul import Product
from funitel.model_server.quantized.matmul_kernels import TritonProducts, unpack
from funitel.model_server.quantized.packed_matrix import CodeKind, PackedMatrix
from funitel.model_server.quantized.select import check
from funitel_testing.product_cases import ProductCase, codes_of, draw, excess

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASE = replace(draw(0), is_symmetric=False)


@pytest.mark.parametrize("case", [draw(seed, is_short=True) for seed in range(12)], ids=str)
def test_as_dequantised(case: ProductCase) -> None:
    assert excess(case, DEVICE) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [draw(seed) for seed in range(300)], ids=str)
def test_as_dequantised_over_many_shapes(case: ProductCase) -> None:
    assert excess(case, DEVICE) <= 1


def matrix_of(
    kind: CodeKind, groups: torch.Tensor, num_outputs: int = 24, **changes: bool
) -> tuple[Codes, PackedMatrix]:
    random = np.random.default_rng(3)
    codes = codes_of(replace(CASE, kind=kind, **changes), num_outputs, groups, random)
    return codes, PackedMatrix.of(codes.to(DEVICE), kind)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(CodeKind.INT4, 32), (CodeKind.INT4, 512), (CodeKind.INT8, 64), (CodeKind.FLOAT8, 128), (CodeKind.FLOAT4, 16)],
)
def test_bits_of_the_weights(kind: CodeKind, size: int) -> None:
    """Unpacked, they are what loading would have made of them, bit for bit; words take the bits and nothing more."""
    codes, matrix = matrix_of(kind, torch.arange(512) // size)
    assert torch.equal(unpack(matrix, torch.float32).cpu(), codes.dequantize(torch.float32).t())
    assert matrix.words.numel() * 32 == codes.codes.numel() * kind.bits
    assert matrix.order is None
    assert matrix.groups is None


def test_every_float8_is_itself() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[~every.view(torch.float8_e4m3fn).float().isnan()]
    codes = Codes(
        every.view(torch.float8_e4m3fn)[None],
        torch.ones(1, 1),
        torch.zeros(1, 1, dtype=torch.uint8),
        torch.zeros(len(every), dtype=torch.int64),
    )
    found = unpack(PackedMatrix.of(codes.to(DEVICE), CodeKind.FLOAT8), torch.float32).cpu()[:, 0]
    assert torch.equal(found, every.view(torch.float8_e4m3fn).float())


def test_zero_points_are_kept_only_where_they_differ() -> None:
    assert matrix_of(CodeKind.INT4, torch.zeros(64, dtype=torch.int64), is_symmetric=True)[1].zeros is None
    assert matrix_of(CodeKind.INT4, torch.zeros(64, dtype=torch.int64), is_symmetric=False)[1].zeros is not None


def test_an_order_costs_no_more_than_the_ends_of_groups() -> None:
    shuffled = torch.arange(1024)[torch.randperm(1024, generator=torch.Generator().manual_seed(1))] // 128
    codes, matrix = matrix_of(CodeKind.INT4, shuffled)
    assert matrix.words.numel() * 8 == codes.codes.numel()  # whole groups are multiples of a span
    halved = shuffled[:512]  # of two ranks the first
    codes, matrix = matrix_of(CodeKind.INT4, halved)
    assert codes.codes.numel() < matrix.words.numel() * 8 <= codes.codes.numel() * 1.5


def test_a_row_is_the_same_in_company() -> None:
    """Whatever shares the tile; the number of rows may decide how inputs are cut into parts, so that is fixed."""
    codes, _ = matrix_of(CodeKind.INT4, torch.arange(256) // 64)
    product = TritonProducts(1).of([codes.to(DEVICE)], None)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(product(x)[:1], product(x[:1]))


def test_no_rows() -> None:
    codes, _ = matrix_of(CodeKind.INT8, torch.zeros(64, dtype=torch.int64))
    assert TritonProducts(16).of([codes.to(DEVICE)], None)(torch.zeros(0, 64, device=DEVICE)).shape == (0, 24)


class Wrong(TritonProducts):
    """Is off by a tenth where rows are many."""

    def of(self, parts: list[Codes], bias: torch.Tensor | None) -> Product:  # type: ignore[override]
        right = super().of(parts, bias)

        class _Wrong:
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return right(x) * (1.1 if len(x) > 256 else 1.0)

        wrong = _Wrong()
        wrong.bias = None  # type: ignore[attr-defined]
        return wrong  # type: ignore[return-value]


def test_the_probe_passes_what_is_right_and_names_what_is_not() -> None:
    check(TritonProducts(132), DEVICE, torch.float16)
    with pytest.raises(ValueError, match=r"a probe of 300 rows with 4 bits is off by 0\.1 of what torch computes"):
        check(Wrong(132), DEVICE, torch.float16)
