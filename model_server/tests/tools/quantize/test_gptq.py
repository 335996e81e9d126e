"""The rounding itself: GPTQ against rounding to the nearest, against a slow version of the paper, and its limits."""

import pytest
import torch

from funitel.model_server.quantized.bit_packing import Codes, round_int8, round_q4
from funitel.model_server.tools.quantize.gptq import Hessian, output_error, quantize_gptq
from funitel.model_server.tools.quantize.level_grid import full_range, searched
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
    """Optimal brain quantisation one input at a time, the inverse taken anew at every step; float64, no blocks.

    Returns codes; the levels are those that the fast version begins with.
    """
    weight, hessian = weight.double(), hessian.double()
    hessian = hessian + percdamp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    grid = searched(weight.float(), hessian.diagonal().float(), size, symmetric=False)
    weight = weight.clone()
    codes = torch.empty_like(weight)
    for i in range(weight.shape[1]):
        scale, zero = grid.scales[:, i // size].double(), grid.zeros[:, i // size].double()
        codes[:, i] = ((weight[:, i] / scale).round() + zero).clamp(0, 15)
        inverse = torch.linalg.inv(hessian[i:, i:])
        error = (weight[:, i] - (codes[:, i] - zero) * scale) / inverse[0, 0]
        weight[:, i:] -= error[:, None] * inverse[0][None, :]
    return codes


def test_the_hessian_is_the_mean_over_all_rows() -> None:
    inputs = correlated(100, 12)
    torch.testing.assert_close(hessian_of(inputs), inputs.t() @ inputs / 100)


@pytest.mark.parametrize("size", [16, 48, 64])
def test_it_is_the_algorithm_of_the_paper(size: int) -> None:
    weight, hessian = weights(6, 64), hessian_of(correlated(300, 64))
    found = quantize_gptq(weight, hessian, group_size=size, percdamp=0.01, act_order=False)
    assert torch.equal(found.codes, by_the_paper(weight, hessian, size, 0.01).to(torch.uint8))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 80, 256])
def test_it_beats_rounding_to_the_nearest_at_the_same_bits(group_size: int, act_order: bool, symmetric: bool) -> None:
    weight = weights(24, 192)
    inputs, held_out = correlated(1400, 192).split(1000)
    found = quantize_gptq(
        weight,
        hessian_of(inputs),
        group_size=group_size,
        percdamp=0.1,
        act_order=act_order,
        symmetric=symmetric,
    )
    rounded = full_range(weight, 192 if group_size == -1 else group_size, symmetric=symmetric).round(weight)
    assert found.scales.shape == rounded.scales.shape
    assert torch.equal(found.groups, rounded.groups)
    outputs = held_out @ weight.t()
    gptq_error = (held_out @ found.dequantize(torch.float32).t() - outputs).norm()
    rounding_error = (held_out @ rounded.dequantize(torch.float32).t() - outputs).norm()
    assert gptq_error < 0.8 * rounding_error


def test_few_texts_do_not_make_it_worse_than_rounding_on_others() -> None:
    """Twice as many rows as inputs, as the built-in texts are for a layer of thousands."""
    weight = weights(24, 192)
    inputs, held_out = correlated(1400, 192).split([384, 1016])
    hessian = hessian_of(held_out)
    found = quantize_gptq(weight, hessian_of(inputs), group_size=32, percdamp=0.1, act_order=True)
    rounded = full_range(weight, 32, symmetric=False).round(weight)
    error = output_error(weight, found.dequantize(torch.float32), hessian)
    assert error < 0.8 * output_error(weight, rounded.dequantize(torch.float32), hessian)


def test_beginning_with_the_largest_inputs_is_better_and_leaves_groups_in_order() -> None:
    weight, hessian = weights(24, 192), hessian_of(correlated(500, 192))
    errors = []
    for act_order in (True, False):
        codes = quantize_gptq(weight, hessian, group_size=16, percdamp=0.01, act_order=act_order)
        assert codes.groups.tolist() == [i // 16 for i in range(192)]
        errors.append(output_error(weight, codes.dequantize(torch.float32), hessian))
    assert errors[0] < errors[1]


@pytest.mark.parametrize("symmetric", [False, True])
def test_searched_levels_cost_no_more_than_those_of_the_full_range(symmetric: bool) -> None:
    weight, importance = weights(24, 200), correlated(50, 200).square().mean(0)

    def costs(codes: Codes) -> torch.Tensor:
        return ((codes.dequantize(torch.float32) - weight).square() * importance).sum(1)

    found = searched(weight, importance, 48, symmetric=symmetric)
    rounded = costs(full_range(weight, 48, symmetric=symmetric).round(weight))
    assert (costs(found.round(weight)) <= rounded).all()
    assert costs(found.round(weight)).sum() < 0.9 * rounded.sum()
    assert found.zeros.min() >= 1  # 0 is stored as 15, which some programs read as 16
    assert found.zeros.max() <= 15


def test_scales_fitted_to_the_codes_cost_less() -> None:
    weight, hessian = weights(24, 200), hessian_of(correlated(500, 200))
    grid = full_range(weight, 48, symmetric=False)
    codes = grid.round(weight)
    fitted = grid.refitted(codes.codes.float(), weight, hessian).codes(codes.codes.float())
    assert torch.equal(fitted.codes, codes.codes)
    assert torch.equal(fitted.zeros, codes.zeros)
    before, after = (output_error(weight, c.dequantize(torch.float32), hessian) for c in (codes, fitted))
    assert after < 0.99 * before


def test_on_inputs_that_do_not_correlate_it_is_rounding_to_the_nearest() -> None:
    weight = weights(8, 64)
    codes = quantize_gptq(weight, torch.eye(64), group_size=32, percdamp=0.01, act_order=False)
    nearest = searched(weight, torch.ones(64), 32, symmetric=False).round(weight)
    assert torch.equal(codes.codes, nearest.codes)


def test_inputs_that_are_always_zero_keep_their_weights() -> None:
    inputs = correlated(300, 64)
    inputs[:, 5] = 0
    weight = weights(8, 64)
    codes = quantize_gptq(weight, hessian_of(inputs), group_size=64, percdamp=0.01, act_order=False)
    steps = codes.scales.float().amax() * 3  # of a range that the search may have cut
    assert (codes.dequantize(torch.float32) - weight)[:, 5].abs().max() <= steps
    silent = quantize_gptq(weight, torch.zeros(64, 64), group_size=64, percdamp=0.01, act_order=False)
    assert torch.equal(silent.codes, searched(weight, torch.ones(64), 64, symmetric=False).round(weight).codes)


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
