"""The pools of a target and its drafter: made together, and copied together to the host's memory and back."""

from pathlib import Path

import torch

from funitel.model_server.kv_cache.pool import HostBlocks
from funitel.proto.step import BlockCopy
from funitel_testing.executors import load_executor
from funitel_testing.tiny import save_tiny


def test_blocks_of_both_come_back_elsewhere(tmp_path: Path) -> None:
    folder, other = save_tiny("llama", tmp_path / "target"), save_tiny("qwen2", tmp_path / "draft", num_hidden_layers=1)
    pools = load_executor(folder, speculate=2, draft_model=str(other)).runner.pools
    cache = pools.make(6)
    assert cache.companion is not None
    parts = [cache.pool, cache.companion.pool]
    assert cache.num_bytes == 6 * pools.bytes_per_block == sum(part.numel() * part.element_size() for part in parts)
    expected = []
    for part in parts:
        part.copy_(torch.rand(part.shape))
        expected.append(part[2].clone())
    host = HostBlocks(torch.empty(3 * pools.bytes_per_block, dtype=torch.uint8), 3, cache)
    copies = [BlockCopy(2, 1, is_load=False), BlockCopy(3, 2, is_load=False), BlockCopy(5, 1, is_load=True)]
    host.check(copies)
    for copy in copies:
        host.carry_out(copy)
    for part, values in zip(parts, expected, strict=True):
        assert torch.equal(part[5], values)


def test_a_drafters_blocks_stay_where_a_targets_are_wiped(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    cache = load_executor(folder, speculate=2, draft_model=str(folder)).runner.pools.make(4)
    assert cache.companion is not None
    cache.pool.fill_(1.0)
    cache.companion.pool.fill_(1.0)
    cache.wipe([2])
    assert not cache.pool[2].any()
    assert bool((cache.companion.pool == 1.0).all())
