"""Products of single rows as Triton kernels: what torch computes, in the layers that use them.

Without a GPU they run in Triton's interpreter, so this proves what they compute and nothing about their speed.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from funitel.model_server.device.dependent_kernels import dependent
from funitel.model_server.layers import single_row, single_row_kernels
from funitel.model_server.layers.linear import ACTIVATIONS, ColumnLinear, Matmul
from funitel.model_server.layers.low_rank.ops import LowRankDelta, LowRankStep, TorchLowRankOps
from funitel.model_server.layers.single_row import check, products_for
from funitel.model_server.spec.model_spec import Activation
from funitel_testing.elementwise_cases import BOUNDS
from funitel_testing.random_weights import RandomWeights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GATES = [activation for activation in Activation if activation is not Activation.XIELU]
GPU_MATRIX = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "is_contiguous": lambda: True}


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_inputs", [16, 576, 4096, 4112, 9000 // 16 * 16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Fewer inputs than a turn of the loop takes, as many, and more, with a last turn that is not full."""
    x, weight = drawn(0, 1, num_inputs, dtype=dtype), drawn(1, 12, num_inputs, dtype=dtype)
    bias = drawn(2, 12, dtype=dtype) if has_bias else None
    whole = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = single_row_kernels.multiply(x, weight, bias)
    assert (found.dtype, found.shape) == (dtype, (1, 12))
    assert error_of(found, whole) <= BOUNDS[dtype]
    found = single_row_kernels.multiply(x, weight, bias, torch.float32)
    assert found.dtype is torch.float32
    assert error_of(found, whole) <= 1e-5


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products(activation: Activation, has_bias: bool) -> None:
    x, weight = drawn(0, 1, 4112, dtype=torch.bfloat16) / 64, drawn(1, 24, 4112, dtype=torch.bfloat16)
    bias = drawn(2, 24, dtype=torch.bfloat16) if has_bias else None
    gate, value = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=-1)
    found = single_row_kernels.multiply_gated(x, weight, bias, activation)
    assert (found.dtype, found.shape) == (torch.bfloat16, (1, 12))
    assert error_of(found, ACTIVATIONS[activation](gate) * value) <= 2 * BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_at_start_passes(dtype: torch.dtype) -> None:
    check(single_row_kernels, DEVICE, dtype)


def test_the_check_at_start_refuses_wrong_products() -> None:
    right = single_row_kernels
    wrong = SimpleNamespace(
        multiply=lambda x, weight, bias, dtype=None: right.multiply(x, weight, None, dtype),
        multiply_gated=right.multiply_gated,
    )
    with pytest.raises(ValueError, match="a probe is off by"):
        check(wrong, DEVICE, torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "changes", "has_products"),
    [
        ((48, 64), {}, True),
        ((48, 72), {}, False),  # rows begin where no thread can load several elements at once
        ((48, 64, 2), {}, False),
        ((48, 64), {"dtype": torch.float32}, False),
        ((48, 64), {"device": torch.device("cpu")}, False),
        ((48, 64), {"is_contiguous": lambda: False}, False),
    ],
)
def test_matrices_that_have_products(
    shape: tuple[int, ...], changes: dict[str, object], has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_row, "_checked", lambda device, dtype: single_row_kernels)
    weight = SimpleNamespace(shape=shape, dim=lambda: len(shape), **GPU_MATRIX | changes)
    assert products_for(weight) is (single_row_kernels if has_products else None)


def test_a_failed_check_leaves_rows_to_the_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a probe is off by 0.5")

    monkeypatch.setattr(single_row, "check", fail)
    with caplog.at_level(logging.WARNING):
        assert single_row._checked.__wrapped__(DEVICE, torch.bfloat16) is None
    assert "without the Triton kernels: ValueError: a probe is off by 0.5" in caplog.text


def test_a_layer_asks_for_single_rows_only() -> None:
    weight, bias = drawn(1, 24, 64, dtype=torch.bfloat16), drawn(2, 24, dtype=torch.bfloat16)
    plain, matmul = Matmul(weight, bias), Matmul(weight, bias)
    matmul.single_row = single_row_kernels
    for num_rows in (1, 2):
        x = drawn(num_rows, num_rows, 64, dtype=torch.bfloat16)
        assert error_of(matmul(x), plain(x)) <= BOUNDS[torch.bfloat16]
        assert error_of(matmul.in_float32(x), plain.in_float32(x)) <= 2 * BOUNDS[torch.bfloat16]
        assert matmul.in_float32(x).dtype is torch.float32
        assert (matmul.gated(x, Activation.SILU) is None) is (num_rows == 2)
        assert plain.gated(x, Activation.SILU) is None


@pytest.mark.parametrize("is_on", [False, True])
def test_gates_are_one_kernel_unless_a_row_of_the_step_has_an_adapter(is_on: bool) -> None:
    weights = RandomWeights(torch.bfloat16)
    layer = ColumnLinear(weights, [("up", 24, (0, 24))], 64, has_bias=False, is_transposed=False)
    assert isinstance(layer.matmul, Matmul)
    layer.matmul.single_row = single_row_kernels
    step = LowRankStep(TorchLowRankOps(), [layer.site])
    layer.delta = LowRankDelta(step, 0, layer.site)
    step.active = step.ops if is_on else None
    x = drawn(1, 1, 64, dtype=torch.bfloat16)
    assert (layer.gated(x, Activation.SILU) is None) is is_on


def test_the_interpreter_launches_nothing_early() -> None:
    if not torch.cuda.is_available():
        assert dependent() == {"IS_DEPENDENT": False}
