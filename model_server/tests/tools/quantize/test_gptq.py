"""The rounding itself: GPTQ against rounding to the nearest, against a slow version of the paper, and its limits."""

import pytest
import torch

from funitel.model_server.quantized.bit_packing import round_int8, round_q4, round_symmetric
from funitel.model_server.tools.quantize.gptq import Hessian, output_error, quantize_gptq
from funitel.proto.errors import WeightsError

CPU = torch.device("cpu")


def correlated(num_rows: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Inputs that lie near a space of few dimensions, as activations do, some of them far larger than others."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(num_rows, num_inputs // 4, generator=generator)
    mixing = torch.randn(num_inputs // 4, num_inputs, generator=generator)
    noise = torch.randn(num_rows, num_inputs, generator=generator)
    sizes = torch.randn(num_inputs, generator=generator).exp()
    return (factors @ mixing + 0.3 * noise) * sizes


def hessian_of(inputs: torch.Tensor) -> torch.Tensor:
    hessian = Hessian(inputs.shape[1], CPU)
    for part in inputs.split(37):
        hessian.add(part)
    return hessian.mean


def weights(num_outputs: int, num_inputs: int) -> torch.Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(9)) * 0.1


def by_the_paper(weight: torch.Tensor, hessian: torch.Tensor, size: int, percdamp: float) -> torch.Tensor:
    """Optimal brain quantisation one input at a time, the inverse taken anew at every step; float64, no blocks."""
    weight, hessian = weight.double(), hessian.double()
    hessian = hessian + percdamp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    weight = weight.clone()
    out = torch.empty_like(weight)
    for i in range(weight.shape[1]):
        if i % size == 0:
            scales = (2 * weight[:, i : i + size].abs().amax(dim=1) / 15).half().double()
        out[:, i] = ((weight[:, i] / scales).round() + 8).clamp(0, 15).sub(8) * scales
        inverse = torch.linalg.inv(hessian[i:, i:])
        error = (weight[:, i] - out[:, i]) / inverse[0, 0]
        weight[:, i:] -= error[:, None] * inverse[0][None, :]
    return out


def test_the_hessian_is_the_mean_over_all_rows() -> None:
    inputs = correlated(100, 12)
    torch.testing.assert_close(hessian_of(inputs), inputs.t() @ inputs / 100)


@pytest.mark.parametrize("size", [16, 48, 64])
def test_it_is_the_algorithm_of_the_paper(size: int) -> None:
    weight, hessian = weights(6, 64), hessian_of(correlated(300, 64))
    found = quantize_gptq(weight, hessian, group_size=size, percdamp=0.01, act_order=False)
    expected = by_the_paper(weight, hessian, size, 0.01)
    torch.testing.assert_close(found.dequantize(torch.float32), expected.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 96, 256])
def test_it_beats_rounding_to_the_nearest_at_the_same_bits(group_size: int, act_order: bool) -> None:
    weight = weights(24, 192)
    inputs, held_out = correlated(1400, 192).split(1000)
    found = quantize_gptq(weight, hessian_of(inputs), group_size=group_size, percdamp=0.01, act_order=act_order)
    rounded = round_symmetric(weight, 4, 192 if group_size == -1 else group_size)
    assert found.scales.shape == rounded.scales.shape
    outputs = held_out @ weight.t()
    gptq_error = (held_out @ found.dequantize(torch.float32).t() - outputs).norm()
    rounding_error = (held_out @ rounded.dequantize(torch.float32).t() - outputs).norm()
    assert gptq_error < 0.8 * rounding_error


def test_act_order_scatters_groups_and_starts_with_the_largest_inputs() -> None:
    hessian = hessian_of(correlated(500, 64))
    codes = quantize_gptq(weights(8, 64), hessian, group_size=16, percdamp=0.01, act_order=True)
    assert sorted(codes.groups.tolist()) == [i // 16 for i in range(64)]
    largest = hessian.diagonal().argsort(descending=True)[:16]
    assert codes.groups[largest].tolist() == [0] * 16


def test_on_inputs_that_do_not_correlate_it_is_rounding_to_the_nearest() -> None:
    weight = weights(8, 64)
    codes = quantize_gptq(weight, torch.eye(64), group_size=32, percdamp=0.01, act_order=False)
    assert torch.equal(codes.codes, round_symmetric(weight, 4, 32).codes)


def test_inputs_that_are_always_zero_keep_their_weights() -> None:
    inputs = correlated(300, 64)
    inputs[:, 5] = 0
    weight = weights(8, 64)
    codes = quantize_gptq(weight, hessian_of(inputs), group_size=64, percdamp=0.01, act_order=False)
    steps = codes.scales.float().amax()
    assert (codes.dequantize(torch.float32) - weight)[:, 5].abs().max() <= steps
    silent = quantize_gptq(weight, torch.zeros(64, 64), group_size=64, percdamp=0.01, act_order=False)
    assert torch.equal(silent.codes, round_symmetric(weight, 4, 64).codes)


def test_fewer_rows_than_inputs_are_dampened() -> None:
    inputs = correlated(5, 64)
    codes = quantize_gptq(weights(8, 64), hessian_of(inputs), group_size=32, percdamp=0.0, act_order=False)
    assert output_error(weights(8, 64), codes.dequantize(torch.float32), hessian_of(inputs)) < 0.2


def test_activations_that_are_not_finite_are_an_error() -> None:
    inputs = correlated(50, 64)
    inputs[3, 3] = torch.inf
    with pytest.raises(WeightsError, match="not finite"):
        quantize_gptq(weights(8, 64), hessian_of(inputs), group_size=32, percdamp=0.01, act_order=False)


def test_the_output_error_is_that_of_the_outputs() -> None:
    inputs, weight = correlated(200, 32), weights(4, 32)
    other = weight + 0.01 * torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    expected = (inputs @ (weight - other).t()).norm() / (inputs @ weight.t()).norm()
    assert output_error(weight, other, hessian_of(inputs)) == pytest.approx(float(expected), rel=1e-3)
    assert output_error(torch.zeros(4, 32), torch.zeros(4, 32), hessian_of(inputs)) == 0


# A scale that bfloat16 rounds down leaves the largest weight up to 127 / 512 of a step beyond the last level.
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 0.501), (torch.bfloat16, 0.751)])
def test_int8_is_within_half_a_step(dtype: torch.dtype, steps: float) -> None:
    weight = weights(5, 40) * torch.tensor([1.0, 100.0, 1e-3, 0.0, 3.0])[:, None]
    codes = round_int8(weight, dtype)
    assert codes.scales.dtype == dtype
    assert ((codes.dequantize(torch.float32) - weight).abs() <= steps * codes.scales.float()).all()
    assert codes.dequantize(torch.float32)[3].eq(0).all()


def test_q4_keeps_the_weight_furthest_from_zero() -> None:
    weight = weights(6, 96)
    weight[2, 32:64] = 0
    codes = round_q4(weight, torch.float32)
    restored = codes.dequantize(torch.float32)
    blocks, found = weight.unflatten(1, (3, 32)), restored.unflatten(1, (3, 32))
    furthest = blocks.abs().argmax(dim=2, keepdim=True)
    torch.testing.assert_close(found.gather(2, furthest), blocks.gather(2, furthest), rtol=1e-6, atol=0)
    assert found[2, 1].eq(0).all()
    # The level opposite the furthest weight is one short: there, and only there, the error may reach a whole step.
    assert ((restored - weight).abs() <= codes.scales.abs()[:, codes.groups] * 1.001).all()
    assert codes.codes.min() >= 0
    assert codes.codes.max() <= 15
