"""An adapter's outputs lie in the panels of the matrix they are added to."""

import pytest
import torch

from funitel.model_server.cpu.low_rank import PANEL_OUTPUTS, panels_of


@pytest.mark.parametrize("first_output", [0, 1, 15, 16, 40])
@pytest.mark.parametrize("count", [0, 1, 16, 17, 100])
@pytest.mark.parametrize("rank", [0, 1, 8])
def test_outputs_lie_in_panels(first_output: int, count: int, rank: int) -> None:
    b = torch.arange(1.0, count * rank + 1).view(count, rank)
    panels = panels_of(b, first_output)
    before = first_output % PANEL_OUTPUTS
    assert panels.shape == (-(-(before + count) // PANEL_OUTPUTS), rank, PANEL_OUTPUTS)
    outputs = panels.transpose(1, 2).reshape(len(panels) * PANEL_OUTPUTS, rank)
    assert torch.equal(outputs[before : before + count], b)
    assert not outputs[:before].any()
    assert not outputs[before + count :].any()
