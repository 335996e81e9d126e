"""The Triton kernels attend as the torch reference does, over shapes, contexts and block tables drawn at random.

Without a GPU they run in Triton's interpreter, so this proves what they compute and nothing about their speed.
"""

import pytest
import torch

pytest.importorskip("triton")

from funitel_testing.attention_cases import BOUNDS, Case, draw, error_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("case", [draw(seed, is_short=True) for seed in range(24)], ids=str)
def test_as_the_reference(case: Case) -> None:
    assert error_of(case, DEVICE) <= BOUNDS[case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("case", [draw(seed) for seed in range(300)], ids=str)
def test_as_the_reference_over_many_shapes(case: Case) -> None:
    assert error_of(case, DEVICE) <= BOUNDS[case.dtype]
