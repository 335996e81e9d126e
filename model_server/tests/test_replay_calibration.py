"""The coefficients of the replay tool: measured on steps of the shapes they are said to be of, and fitted."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.executor.interface import ComputedStep, PendingStep
from funitel.proto.step import StepResult
from funitel_testing.executors import BLOCK_SIZE, load_executor, num_sequences
from funitel_testing.tiny import save_tiny

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

calibration = import_module("replaying.calibration")
costs = import_module("replaying.costs")

COSTS = costs.StepCosts(base=0.01, prompt_token=1e-3, decode_row=2e-3, context_token=1e-6, prompt_pair=3e-7)


def sample(shape: Any) -> Any:
    """A sample as `COSTS` would have it."""
    pairs = shape.chunk * (shape.computed + shape.chunk / 2)
    context = shape.num_rows * shape.context
    seconds = COSTS.seconds(shape.chunk, pairs, shape.num_rows, context)
    return calibration.Sample(shape.chunk, pairs, shape.num_rows, context, seconds)


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    samples = [sample(shape) for shape in calibration.SHAPES]
    found = calibration.fit(samples)
    for name in calibration.COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-6)
    assert calibration.relative_error(found, samples) < 1e-6


def test_no_coefficient_is_negative() -> None:
    cheaper = [calibration.Sample(0, 0, rows, 1000 * rows, 0.1 - 0.001 * rows) for rows in range(1, 20)]
    found = calibration.fit(cheaper)
    assert min(getattr(found, name) for name in calibration.COEFFICIENTS) >= 0
    assert found.base > 0.05


def test_a_shape_is_measured_on_steps_that_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load_executor(save_tiny("llama", tmp_path))
    monkeypatch.setattr(calibration, "BLOCK_SIZE", BLOCK_SIZE)
    steps: list[StepResult] = []
    compute_decode = executor.compute_decode

    def spy(*arguments: Any) -> PendingStep:
        step = compute_decode(*arguments)
        assert isinstance(step, ComputedStep)
        steps.append(step.result)
        return step

    monkeypatch.setattr(executor, "compute_decode", spy)
    found = calibration.measure(executor, calibration.Shape(num_rows=3, context=10, chunk=5, computed=8), num_steps=4)
    assert len(steps) == 4 + calibration.SETTLING_STEPS
    assert [step.num_forward_tokens for step in steps] == [3 + 5] * len(steps)
    assert (found.prompt_tokens, found.decode_rows) == (5, 3)
    assert found.context_tokens == 3 * (10 + 1 + 2 + 1.5)
    assert found.prompt_pairs == 5 * (8 + 5 * 3.5 + 3)
    assert 0 < found.seconds < 10
    assert num_sequences(executor) == 0
