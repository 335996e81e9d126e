"""GPTQ against plain rounding at equal bits, on the demo model and a text that calibrated nothing."""

from pathlib import Path

import pytest
import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.tools.quantize import job
from funitel.model_server.tools.quantize.calibration import calibration_texts, tokenize
from funitel.model_server.tools.quantize.command import quantize
from funitel.model_server.tools.quantize.gptq import output_error, quantize_gptq
from funitel.model_server.tools.quantize.layer_walk import Walk, inputs_of
from funitel.model_server.tools.quantize.level_grid import full_range
from funitel_testing import forward_worker

HELDOUT = Path(__file__).parents[4] / "benchmarks" / "heldout.txt"
GROUP_SIZE, PERCDAMP = 32, 0.1


@torch.inference_mode()
def test_every_matrix_of_a_layer_is_better_than_rounded(demo_model: Path) -> None:
    spec = spec_of(read_json(demo_model / "config.json"))
    weights = Weights(demo_model, torch.float32, torch.device("cpu"), spec.names.prefix, is_shown=False)
    codec = TextCodec(demo_model)
    held_out = Walk(spec, weights, tokenize(codec, [HELDOUT.read_text(encoding="utf-8")], 2, 256))
    calibration = Walk(spec, weights, tokenize(codec, calibration_texts(None), 8, 256))
    layer = calibration.load(0)
    for inputs in inputs_of(spec, weights.prefix, 0):
        parts = [weights.read_linear(name, num_outputs, inputs.num_inputs) for name, num_outputs in inputs.parts]
        weight = torch.cat(parts)
        codes = quantize_gptq(
            weight,
            calibration.hessian(layer, inputs),
            group_size=GROUP_SIZE,
            percdamp=PERCDAMP,
            act_order=True,
        )
        rounded = full_range(weight, GROUP_SIZE, symmetric=False).round(weight)
        hessian = held_out.hessian(layer, inputs)
        error, rounded_error = (
            output_error(weight, some.dequantize(torch.float32), hessian) for some in (codes, rounded)
        )
        assert error < 0.9 * rounded_error, inputs.parts[0][0]


@pytest.mark.slow
def test_its_perplexity_is_no_higher_than_that_of_rounding(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def just_rounded(weight: torch.Tensor, hessian: torch.Tensor, **choices: object) -> Codes:
        return full_range(weight, GROUP_SIZE, symmetric=False).round(weight)

    def written(name: str) -> float:
        settings = QuantizeSettings(
            model_id=str(demo_model), output_dir=str(tmp_path / name), device="cpu", num_threads=1
        )
        quantize(settings, demo_model)
        return perplexity(tmp_path / name)

    by_gptq = written("gptq")
    monkeypatch.setattr(job, "quantize_gptq", just_rounded)
    assert by_gptq < written("rounded")


def perplexity(folder: Path) -> float:
    """Perplexity of the held-out text."""
    ids = TextCodec(folder).encode(HELDOUT.read_text(encoding="utf-8"), add_special_tokens=True)
    (logits,) = forward_worker.run(folder, TensorParallel(), [ids], 0)
    targets = torch.tensor(ids[1:])
    return float(torch.nn.functional.cross_entropy(logits[: len(targets)].float(), targets).exp())
