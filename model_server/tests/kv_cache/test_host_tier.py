"""Blocks in the host's memory: what comes back is what was computed, whatever lay in the pool meanwhile."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading import common
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError
from funitel.proto.step import BlockCopy, WarmupLimits
from funitel_testing.executors import BLOCK_SIZE, ids_of, load_executor, num_sequences, run_alone, run_out, start
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq

PROMPT = list(range(40, 60))
NUM_FULL = 4  # blocks of the prompt but for its last token
WARM = [start(0, range(20))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


def with_host(folder: Path, num_blocks: int, dtype: str = "float32") -> Executor:
    """An executor on a CPU that has slots all the same."""
    executor = load_executor(folder, dtype=dtype)
    runner = executor.runner
    runner.options = replace(runner.options, host_bytes=num_blocks * runner.pools.bytes_per_block)
    for _ in range(2):  # a router may warm up again
        result = executor.warmup(WARM, WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))
        assert result.host_blocks == num_blocks
    return executor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_come_back_elsewhere(folder: Path, dtype: str) -> None:
    executor = with_host(folder, 6, dtype)
    expected = ids_of(run_alone(executor, start(1, PROMPT, 10)))
    own = start(1, PROMPT).blocks
    saves = [BlockCopy(block, slot, is_load=False) for slot, block in enumerate(own[:NUM_FULL], 1)]
    other = executor.compute_prefill(7, [start(2, PROMPT[::-1], 2, blocks=own)], copies=saves).describe()
    run_out(executor, other, {})  # has written over all of them
    into = tuple(range(300, 300 + NUM_FULL))
    loads = [BlockCopy(block, slot, is_load=True) for slot, block in enumerate(into, 1)]
    back = start(3, PROMPT, 10, blocks=(*into, *own[:10]), cache_len=NUM_FULL * BLOCK_SIZE)
    first = executor.compute_prefill(8, [back], copies=loads).describe()
    assert first.num_forward_tokens == len(PROMPT) - NUM_FULL * BLOCK_SIZE
    found = {}
    run_out(executor, first, found)
    assert ids_of(found[3]) == expected


def test_copies_are_carried_out_in_their_order(folder: Path) -> None:
    executor = with_host(folder, 1)
    pool = executor.runner.pool.pool
    pool[5], pool[6] = 5.0, 6.0
    chain = [BlockCopy(5, 0, False), BlockCopy(6, 0, True), BlockCopy(6, 0, False), BlockCopy(7, 0, True)]
    prefill = executor.compute_prefill(1, [start(11, PROMPT)], copies=chain)
    assert prefill.describe().batch is not None
    assert torch.equal(pool[6], pool[5])
    assert torch.equal(pool[7], pool[5])
    executor.clear()


@pytest.mark.parametrize("copy", [BlockCopy(0, 0, True), BlockCopy(501, 0, False), BlockCopy(3, 2, True)])
def test_copies_beyond_pool_or_slots_are_refused_and_change_nothing(folder: Path, copy: BlockCopy) -> None:
    executor = with_host(folder, 2)
    with pytest.raises(InvalidRequest, match="is outside the 501 blocks of the pool and 2 slots of the host"):
        executor.compute_prefill(1, [start(1, PROMPT)], copies=[BlockCopy(4, 0, False), copy])
    assert num_sequences(executor) == 0
    plain = load_executor(folder)
    with pytest.raises(InvalidRequest, match="1 copies of blocks: this shard keeps none"):
        plain.compute_prefill(1, [start(1, PROMPT)], copies=[copy])


def test_how_much_memory_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = ModelServerSettings(model_id="x", kv_host_gb=1.5)
    assert common.host_bytes(settings, torch.device("cuda")) == 3 << 29
    assert common.host_bytes(settings, torch.device("cpu")) == 0
    assert common.host_bytes(replace(settings, prefix_caching=False), torch.device("cuda")) == 0
    assert "--kv-host-gb 1.5 changes nothing without --prefix-caching" in caplog.text


def test_what_it_is_not_for(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load_generator(ModelServerSettings(model_id=str(folder), device="cpu", kv_host_gb=2.0), folder)
    assert "--kv-host-gb 2.0 changes nothing: the model runs on a CPU" in caplog.text
    other = save_tiny_seq2seq("t5", tmp_path)
    with pytest.raises(SettingsError, match="--kv-host-gb 2 is not for encoder-decoders"):
        load_generator(ModelServerSettings(model_id=str(other), device="cpu", kv_host_gb=2.0), other)
