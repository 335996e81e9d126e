"""Every row of the table of GGUF architectures: a file as llama.cpp writes it gives transformers' logits."""

from pathlib import Path

import pytest
import torch

from funitel.model_server.convert.gguf import point_to_gguf
from funitel.model_server.convert.gguf_architectures import ARCHITECTURES
from funitel.model_server.cpu import build as building
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing import forward_worker
from funitel_testing.tiny_gguf import TINY_GGUFS
from funitel_testing.zoo import VOCAB_SIZE

NUM_DECODE = 3
FUSED = ("granitemoe", "glm4moe", "deepseek2", "deepseek3")  # mixtures, which the fused step computes too


def test_every_architecture_has_a_file() -> None:
    assert {tiny.name or key for key, tiny in TINY_GGUFS.items()} == set(ARCHITECTURES)


@pytest.mark.parametrize("key", TINY_GGUFS)
def test_a_file_gives_the_logits_of_the_model_it_was_made_of(key: str, tmp_path: Path) -> None:
    tiny = TINY_GGUFS[key]
    model = tiny.write(tmp_path / "tiny.gguf", tiny.name or key)
    folder = tmp_path / "converted"
    folder.mkdir()
    point_to_gguf(tmp_path / "tiny.gguf", folder)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist() for count in (31, 70)]
    with torch.inference_mode():
        expected = [tiny.tiny.oracle(model, ids, NUM_DECODE) for ids in prompts]
    found = forward_worker.run(folder, TensorParallel(), prompts, NUM_DECODE)
    assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True)) < 1e-4
    if key in FUSED and "avx2" in building.cpu_flags():
        fused = forward_worker.run(folder, TensorParallel(), prompts, NUM_DECODE, Tier.FLOAT32)
        assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(fused, expected, strict=True)) < 1e-3
