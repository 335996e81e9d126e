"""Products with bfloat16 weights: pairs of inputs, by the processor's own instruction or by two float32 products."""

import pytest
import torch

from funitel.model_server.cpu import compiler
from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import MatrixKind
from funitel.model_server.hub.resolve import cache_folder
from funitel_testing.products import product

SETS = [name for name, needs, _ in compiler.INSTRUCTION_SETS if needs <= cpu_flags()]


def bfloat16_product(weight: torch.Tensor, x: torch.Tensor, instruction_set: str) -> torch.Tensor:
    return product(load_library(cache_folder(None), instruction_set), MatrixKind.BFLOAT16, weight, x)


def random(num_rows: int, num_inputs: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("num_inputs", [1, 37, 128, 130, 576])
def test_a_product_is_that_of_both_sides_rounded(num_inputs: int, instruction_set: str) -> None:
    weight, x = random(48, num_inputs, 1), random(23, num_inputs, 2)
    weight[:, ::7] *= 100  # roundings of unequal size
    found = bfloat16_product(weight, x, instruction_set)
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    bound = x.bfloat16().double().abs() @ weight.bfloat16().double().abs().T
    assert ((found - exact).abs() <= 1e-6 * bound).all()


def test_every_instruction_set_gives_the_same_bits_in_any_company() -> None:
    weight, x = random(48, 331, 3), random(27, 331, 4)
    x[0] *= 1e30
    expected = bfloat16_product(weight, x, SETS[0])
    for instruction_set in SETS:
        for count in (1, 2, 3, 5, 12, 13, 27):
            found = bfloat16_product(weight, x[:count].contiguous(), instruction_set)
            assert torch.equal(found, expected[:count])


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("num_inputs", [32, 576])
def test_a_row_has_the_same_bits_in_any_company(num_inputs: int, instruction_set: str) -> None:
    """A multiple of 32 inputs, which AMX multiplies in tile registers, of as many rows as there are."""
    weight, x = random(80, num_inputs, 7), random(209, num_inputs, 8)
    expected = bfloat16_product(weight, x, instruction_set)
    for count in (1, 2, 15, 16, 17, 31, 33, 49, 96, 97, 128):
        assert torch.equal(bfloat16_product(weight, x[:count].contiguous(), instruction_set), expected[:count])
        last = x[-count:].contiguous()
        assert torch.equal(bfloat16_product(weight, last, instruction_set), expected[-count:])


def test_what_is_no_number_stays_so() -> None:
    weight, x = random(16, 32, 5), random(3, 32, 6)
    x[1, 7], x[2, 8] = float("nan"), float("inf")
    found = bfloat16_product(weight, x, SETS[0])
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()
