"""A model in parts within one process: the logits of its parts joined by hand, and of the model in one piece."""

from pathlib import Path

import pytest
import torch

from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel_testing import forward_worker
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, step_at_random
from funitel_testing.joined import join_by_hand
from funitel_testing.stages import Part, on_stages
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_blocks import SIZES, add_blocks
from funitel_testing.zoo import VOCAB_SIZE, ZOO

NUM_DECODE, SEED, TOLERANCE = 4, 5, 1e-4
# One of each data flow that parts pass on: tied, learned positions, keys of two kinds of layers, experts, latents.
FAMILIES = ("llama", "gpt2", "gemma3", "qwen2_moe", "deepseek_v2")
MIXES = {
    "torch+int8": (None, Tier.INT8),
    "int8+torch": (Tier.INT8, None),
    "float32+int8": (Tier.FLOAT32, Tier.INT8),
    "bfloat16+float16": (Tier.BFLOAT16, Tier.FLOAT16),
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (n + NUM_DECODE,), generator=generator).tolist() for n in (37, 5, 20)]


def in_stages(folder: Path, tiers: tuple[Tier | None, Tier | None]) -> list[torch.Tensor]:
    """Logits of both halves, each in a thread and with a pool of its own, with hidden states passed by a queue."""

    def work(parallel: TensorParallel, part: Part, link: StageLink) -> list[torch.Tensor]:
        spec = part(forward_worker.choose_spec(None, folder))
        tier = tiers[0 if spec.is_first else 1]
        return forward_worker.run(folder, parallel, prompts(), NUM_DECODE, tier, seed=SEED, part=part, link=link)

    return on_stages(2, 1, work)


def in_one_process(folder: Path, tiers: tuple[Tier | None, ...]) -> list[torch.Tensor]:
    return step_at_random(*join_by_hand(folder, tiers), prompts(), NUM_DECODE, SEED)


@pytest.mark.parametrize("mix", MIXES)
def test_parts_of_different_precision_give_every_bit_of_the_halves(mix: str, tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    assert all(map(torch.equal, in_one_process(tmp_path, MIXES[mix]), in_stages(tmp_path, MIXES[mix])))


def test_a_part_with_blocks_of_a_gguf_gives_every_bit_of_the_halves(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, **SIZES)
    add_blocks(tmp_path, lambda name: "Q8_0" if "proj" in name else None)
    tiers = None, Tier.GGUF
    forward, cache = join_by_hand(tmp_path, tiers)
    last = forward.parts[-1].decoder
    assert isinstance(last, FusedDecoder)
    assert last.has_blocks
    found = step_at_random(forward, cache, prompts(), NUM_DECODE, SEED)
    assert all(map(torch.equal, found, in_stages(tmp_path, tiers)))


@pytest.mark.parametrize("tiers", [(None, Tier.FLOAT32), (Tier.FLOAT32, None)], ids=["torch first", "fused first"])
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_parts_give_the_logits_of_the_model_in_one_piece(
    family: str, tiers: tuple[Tier | None, Tier | None], tmp_path: Path
) -> None:
    ZOO[family].save(tmp_path)
    expected = forward_worker.run(tmp_path, TensorParallel(), prompts(), NUM_DECODE, None, seed=SEED)
    found = in_one_process(tmp_path, tiers)
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max()) < TOLERANCE * float(theirs.abs().max())


def test_fused_parts_of_one_precision_change_no_bit(tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    expected = forward_worker.run(tmp_path, TensorParallel(), prompts(), NUM_DECODE, Tier.INT8, seed=SEED)
    assert all(map(torch.equal, in_one_process(tmp_path, (Tier.INT8, Tier.INT8)), expected))


def test_blocks_are_copied_and_wiped_in_every_part(tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    forward, cache = join_by_hand(tmp_path, (None, Tier.INT8))
    table = torch.arange(1, 3, dtype=torch.int32).numpy()
    batch = ForwardBatch.build([RowSpan(list(range(2 * BLOCK_SIZE)), 0, table)], BLOCK_SIZE, CPU)
    with torch.inference_mode():
        forward(batch, cache)
        cache.copy(1, 7)
        for pool in cache.parts:
            assert pool.pool[1].any()
            assert torch.equal(pool.pool[7], pool.pool[1])
        cache.wipe([1])
    assert not any(pool.pool[1].any() for pool in cache.parts)
    assert all(pool.pool[7].any() for pool in cache.parts)
    assert cache.num_bytes == sum(pool.pool.numel() * pool.pool.element_size() for pool in cache.parts)
    cache.free()
    assert cache.num_bytes == 0
