"""Which code a GPU samples by: our kernels where this GPU and its compiler run them, and a probe finds them right."""

import logging

import numpy as np
import torch

from funitel.model_server.device.probe_or_fall_back import probe_or_fall_back, reason_of
from funitel.model_server.gpu_sampling.ops import Draws, Penalties, ScoreMaths, TorchMaths, TritonMaths
from funitel.model_server.gpu_sampling.row_subset import RowSubset
from funitel.model_server.sampling.gumbel_noise import mixed_seeds
from funitel.proto.step import SamplingParams

logger = logging.getLogger(__name__)

_PROBE_TOKENS, _PROBE_BOUND = 5000, 1e-3  # of the vocabulary; the relative error of scores and sums


def choose_maths(device: torch.device) -> ScoreMaths:
    """The kernels, or torch with a warning that says why."""

    def probe() -> ScoreMaths:
        maths = TritonMaths(torch.cuda.get_device_properties(device).multi_processor_count)
        check(maths, device)
        logger.info("sampling runs in Triton kernels")
        return maths

    def fall_back(error: Exception) -> ScoreMaths:
        logger.warning("sampling runs in torch, without the Triton kernels: %s", reason_of(error))
        return TorchMaths()

    return probe_or_fall_back(probe, fall_back)


def check(maths: ScoreMaths, device: torch.device) -> None:
    """Raise ValueError unless it penalises, filters and chooses as torch does; compiles the kernels on the way."""
    asked = [SamplingParams(temperature=0.7, top_k=40), SamplingParams(top_p=0.9, min_p=0.001)]
    found, expected = (_tried(each, asked, device) for each in (maths, TorchMaths()))
    for name, ours, theirs in zip(("tokens", "scores", "sums", "penalties"), found, expected, strict=True):
        if not torch.allclose(ours.float(), theirs.float(), rtol=_PROBE_BOUND, atol=_PROBE_BOUND):
            raise ValueError(f"of a probe {name} are not what torch computes")


def _tried(maths: ScoreMaths, asked: list[SamplingParams], device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(3, _PROBE_TOKENS, generator=generator) * 3).to(device)
    counts = torch.randint(0, 3, (1, 2, _PROBE_TOKENS), generator=generator, dtype=torch.int32).to(device)
    one = torch.full((1, 1), 1.3, device=device)
    some, drawn = RowSubset.of([1], 3, device), RowSubset.of([0, 2], 3, device)
    assert some is not None
    assert drawn is not None
    penalties = Penalties(some, torch.zeros(1, dtype=torch.int64, device=device), one, one, one, one)
    maths.penalise(scores, penalties, counts, 9 * one)
    penalised = scores.clone()
    keys = torch.tensor([[1, 0, 1], [7, 0, 8], [9, 0, 10]], dtype=torch.int32, device=device)
    draws = Draws(drawn, mixed_seeds(np.arange(2).tolist()), maths.lay_out(asked, device))
    chosen = maths.choose(scores, draws, keys)
    return chosen.tokens, chosen.scores, chosen.normalisers, penalised
