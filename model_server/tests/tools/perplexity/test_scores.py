"""Figures of made-up logits, against the formulas written out in NumPy."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from funitel.model_server.tools.perplexity import scores as module
from funitel.model_server.tools.perplexity.scores import Scores
from funitel.proto.errors import BrokenScores


def softmax(logits: torch.Tensor) -> np.ndarray:
    values = logits.double().numpy()
    exps = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities: np.ndarray = exps / exps.sum(axis=1, keepdims=True)
    return probabilities


def scored(logits: torch.Tensor, ids: torch.Tensor, against: torch.Tensor | None = None) -> Scores:
    found = Scores("model")
    found.add(logits, ids, against)
    return found


@pytest.mark.parametrize("chunk_bytes", [1, 16 << 20])
def test_figures_are_those_of_the_formulas(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(200, 50, generator=generator)
    logits = reference + torch.randn(200, 50, generator=generator)
    ids = torch.randint(50, (200,), generator=generator)
    of_model, of_reference = scored(logits, ids, reference), scored(reference, ids)
    p, q = softmax(reference), softmax(logits)
    losses, theirs = (-np.log(each[np.arange(200), ids]) for each in (q, p))
    found = of_model.likelihood(num_bytes=300)
    assert found.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-12)
    assert found.perplexity_error == pytest.approx(found.perplexity * losses.std(ddof=1) / math.sqrt(200), rel=1e-9)
    assert found.bits_per_byte == pytest.approx(np.log2(np.exp(losses)).sum() / 300, rel=1e-9)
    distance = of_model.distance(of_reference)
    kl = (p * np.log(p / q)).sum(axis=1)
    assert distance.kl_mean == pytest.approx(kl.mean(), rel=1e-9)
    assert distance.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-9)
    assert distance.kl_max == pytest.approx(kl.max(), rel=1e-9)
    assert distance.same_top_token == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert 0 < distance.same_top_token < 1
    assert distance.perplexity_ratio == pytest.approx(math.exp((losses - theirs).mean()), rel=1e-9)
    expected = distance.perplexity_ratio * (losses - theirs).std(ddof=1) / math.sqrt(200)
    assert distance.perplexity_ratio_error == pytest.approx(expected, rel=1e-9)


def test_a_model_beside_itself_has_no_distance() -> None:
    logits, ids = torch.randn(20, 30), torch.arange(20)
    distance = scored(logits, ids, logits.clone()).distance(scored(logits, ids))
    assert (distance.kl_mean, distance.kl_p99, distance.kl_max) == (0.0, 0.0, 0.0)
    assert (distance.same_top_token, distance.perplexity_ratio, distance.perplexity_ratio_error) == (1.0, 1.0, 0.0)


def test_tokens_that_both_models_exclude_add_nothing() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 3] = -torch.inf
    found = scored(logits, torch.tensor([0]), logits.clone())
    assert found.distance(scored(logits, torch.tensor([0]))).kl_mean == 0.0
    assert found.likelihood(0).perplexity == pytest.approx(3)
    assert found.likelihood(0).perplexity_error == 0.0  # one token has no spread


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ([0.0, math.nan, 0.0], "the logits are NaN or infinite"),
        ([0.0, math.inf, 0.0], "the logits are NaN or infinite"),
        ([-math.inf, 0.0, 0.0], "token 0 of the text has probability 0"),
        ([0.0, 0.0, -math.inf], "the KL divergence is infinite"),
    ],
)
def test_logits_that_give_no_figure_are_refused(broken: list[float], words: str) -> None:
    with pytest.raises(BrokenScores) as raised:
        scored(torch.tensor([broken]), torch.tensor([0]), torch.zeros(1, 3))
    assert raised.value.message.startswith("model: ")
    assert words in raised.value.message


def test_a_perplexity_beyond_a_float_is_refused() -> None:
    found = scored(torch.tensor([[-1e4, 0.0]]), torch.tensor([0]))
    with pytest.raises(BrokenScores, match=r"the mean negative log-likelihood of a token is 1e\+04"):
        found.likelihood(1)


MANY_PIECES = """
import resource, torch
from funitel.model_server.tools.perplexity.scores import Scores
torch.set_num_threads(1)
reference, model = Scores("reference"), Scores("model")
ids = torch.zeros(256, dtype=torch.int64)
peaks = []
for _ in range(8):
    expected, logits = torch.randn(256, 49152), torch.randn(256, 49152)
    reference.add(expected, ids)
    model.add(logits, ids, expected)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000)
print(peaks[-1] - peaks[1])
"""


def test_memory_does_not_grow_with_the_text() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_PIECES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200, "MB from the second piece to the eighth"
