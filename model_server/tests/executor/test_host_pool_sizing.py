"""The pool of a host: its usual size, sizes that are asked for, and what limits them."""

import logging
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.device.host_memory import AvailableMemory
from funitel.model_server.executor import pool_sizing
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.pool_sizing import PoolDemand, PoolRoom, host_room, num_pool_blocks
from funitel.proto.errors import NotEnoughMemory
from funitel.proto.step import WarmupLimits, WarmupResult
from funitel_testing.executors import load_executor, start
from funitel_testing.tiny import save_tiny

GB = 10**9
MEMORY = AvailableMemory(8 * GB, "a test")
DEMAND = PoolDemand(context=8192, block_size=16, num_rows=128)


def test_a8_the_usual_pool_takes_a_quarter_of_the_memory_and_asked_ones_more() -> None:
    room = host_room(MEMORY, None, 1)
    assert (room.usual, room.most, room.contexts) == (2 * GB, int(7.2 * GB), 16)
    assert room.limit == "25% of the 8000 MB that a test leaves"
    assert host_room(MEMORY, None, 4).usual == GB // 2
    asked = host_room(MEMORY, 0.5, 1)
    assert (asked.usual, asked.contexts) == (2 * GB, None)
    assert host_room(MEMORY, None, 1, step_bytes=GB).most == int(7.2 * GB) - GB
    assert host_room(AvailableMemory(0, "a test"), None, 1, step_bytes=GB) == PoolRoom(
        0, 0, 16, "25% of the 0 MB that a test leaves", "0 MB that a test leaves"
    )


def test_a8_the_usual_pool_has_sixteen_contexts_unless_told_otherwise() -> None:
    room = host_room(MEMORY, None, 1)
    blocks, limit = num_pool_blocks(DEMAND, room, 10**6, 10**5)
    assert (blocks * 16, limit) == (
        16 * 8192,
        "16 contexts of 8192 tokens; --max-batch-total-tokens sets another size",
    )
    assert num_pool_blocks(DEMAND, room, 10**6, 50) == (50, room.limit)
    by_fraction = host_room(MEMORY, 1.0, 1)
    assert num_pool_blocks(DEMAND, by_fraction, 10**6, 10**5) == (10**5, by_fraction.limit)
    asked = PoolDemand(context=8192, block_size=16, num_rows=128, asked_tokens=1_600_000)
    assert num_pool_blocks(asked, room, 10**6, 10**5) == (100_000, "--max-batch-total-tokens")
    with pytest.raises(NotEnoughMemory, match=r"at most 16000 tokens fit in the 8000 MB that a test leaves"):
        num_pool_blocks(asked, room, 1000, 1000)


def test_a8_a_longest_request_that_was_asked_for_has_room() -> None:
    room = host_room(MEMORY, None, 1)
    longest = PoolDemand(context=8192, block_size=16, num_rows=128, longest=8000)
    assert num_pool_blocks(longest, room, 1000, 100) == (500, "--max-total-tokens 8000")
    assert num_pool_blocks(longest, room, 300, 100)[0] == 300  # refused later: the pool cannot hold it


def test_a8_every_sequence_has_a_block_where_a_block_is_a_context() -> None:
    state = PoolDemand(context=8192, block_size=8192, num_rows=128)
    assert num_pool_blocks(state, host_room(MEMORY, None, 1), 10**4, 10**4)[0] == 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


def warm(executor: Executor, **limits: Any) -> WarmupResult:
    return executor.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64, **limits))


def test_a8_a_model_has_a_pool_of_sixteen_contexts_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_sizing, "available_memory", lambda: MEMORY)
    executor = load_executor(folder)
    context = executor.spec.max_position_embeddings
    with caplog.at_level(logging.INFO):
        assert warm(executor).pool_tokens == 16 * context
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"contexts=16.0 limit=16 contexts of {context} tokens" in line for line in lines)
    assert any(line.startswith("memory idle resident_bytes=") for line in lines)
    assert warm(executor, max_batch_total_tokens=40 * context).pool_tokens == 40 * context
    told = warm(load_executor(folder, cuda_memory_fraction=0.001)).pool_tokens
    assert told is not None
    assert told > 16 * context


def test_a8_the_pool_stays_within_an_address_space(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = AvailableMemory(1_000_000, "RLIMIT_AS (ulimit -v)")
    executor, sibling = load_executor(folder), load_executor(folder, replicas_on_host=2)
    monkeypatch.setattr(pool_sizing, "available_memory", lambda: left)
    with caplog.at_level(logging.INFO):
        result = warm(executor)
    assert 0 < result.kv_bytes <= 250_000
    assert "limit=25% of the 1 MB that RLIMIT_AS (ulimit -v) leaves" in caplog.text
    assert warm(sibling).kv_bytes <= 125_000


def test_a8_a_pool_that_is_not_granted_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("Unable to allocate 9.99 GiB for an array")

    executor = load_executor(folder)
    monkeypatch.setattr(type(executor.runner.pools), "make", refuse)
    with pytest.raises(
        NotEnoughMemory, match=r"no memory for a KV pool of \d+ tokens \(\d+ bytes\): --max-batch-total"
    ):
        executor.profiler._make_pool(11, 160)
