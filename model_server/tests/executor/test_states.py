"""Sequences with states through the executor: any batch, chunks, joins, preemption, bounds and accounts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from funitel.model_server.device.host_memory import AvailableMemory
from funitel.model_server.executor import pool_sizing
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.pool_sizing import PoolDemand, PoolRoom, num_pool_blocks, num_state_slots
from funitel.model_server.kv_cache.state_pool import StateLayout
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, NotEnoughMemory, SettingsError
from funitel.proto.step import Capability, Generation, RowUpdate, StateSave, WarmupLimits
from funitel_testing.executors import chunk, collect, decode, ids_of, load_executor, prefill, run_alone, run_out, start
from funitel_testing.tiny import byte_tokenizer
from funitel_testing.zoo import ZOO

PROMPTS = {1: list(range(40, 60)), 2: list(range(100, 133)), 3: list(range(5, 12))}
COUNT = 12


@pytest.fixture(scope="module", params=["qwen3_5", "bamba", "lfm2", "falcon_h1", "mamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    ZOO[request.param].save(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def executor(folder: Path) -> Executor:
    return load_executor(folder)


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Completion by transformers, recomputing everything for each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    return {i: greedy(folder, prompt, COUNT) for i, prompt in PROMPTS.items()}


def test_sequences_in_turn_use_the_same_slots(executor: Executor, expected: dict[int, list[int]]) -> None:
    for i in (1, 2, 3, 2):
        assert ids_of(run_alone(executor, start(i, PROMPTS[i], COUNT))) == expected[i]


def test_joins_chunks_and_preemption_change_no_text(executor: Executor, expected: dict[int, list[int]]) -> None:
    found: dict[int, list[Generation]] = {}
    first = prefill(executor, 1, [start(1, PROMPTS[1], COUNT)])
    collect(first, found)
    second = prefill(executor, 2, [start(2, PROMPTS[2], COUNT, chunk_len=7)], first.batch)
    collect(second, found)
    third = decode(executor, [second.batch], [chunk(2, 9)])
    collect(third, found)
    # The first is preempted, and resumed with the tokens that it has, in another place of the table.
    given = tuple(ids_of(found[1]))
    assert given == tuple(expected[1][: len(given)])
    left = executor.begin_filter(1, [2], is_ahead=False)()
    joined = prefill(executor, 3, [start(3, PROMPTS[3], COUNT)], left)
    collect(joined, found)
    resumed: dict[int, list[Generation]] = {}
    last = prefill(executor, 4, [start(1, PROMPTS[1], COUNT, output_ids=given)], joined.batch)
    run_out(executor, last, resumed)
    for i in (2, 3):
        assert ids_of(found.get(i, [])) + ids_of(resumed[i]) == expected[i]
    assert list(given) + ids_of(resumed[1]) == expected[1]


def test_a_prefix_without_its_state_is_refused(executor: Executor) -> None:
    with pytest.raises(
        InvalidRequest, match="cache_len 4 needs state_from, the slot of the state after so many tokens"
    ):
        prefill(executor, 1, [start(1, PROMPTS[1], cache_len=4)])
    with pytest.raises(InvalidRequest, match="slot 999 is outside the state pool of"):
        prefill(executor, 1, [start(1, PROMPTS[1], state_slot=999)])
    first = prefill(executor, 1, [start(1, PROMPTS[1])])
    with pytest.raises(InvalidRequest, match="slot 999 is outside the state pool of"):
        decode(executor, [first.batch], [RowUpdate(1, (), None, (StateSave(21, 999),))])
    executor.clear()


def test_a_saved_state_is_where_another_sequence_begins(executor: Executor, expected: dict[int, list[int]]) -> None:
    prompt = PROMPTS[2]
    blocks = tuple(range(1, 13))
    saved = StateSave(16, 7)
    first = start(2, prompt, COUNT, blocks=blocks, state_slot=3, state_saves=(saved,))
    assert ids_of(run_alone(executor, first)) == expected[2]
    for source, slot in ((7, 4), (7, 5), (7, 7)):  # the last uses it up
        again = start(2, prompt, COUNT, blocks=blocks, cache_len=16, state_slot=slot, state_from=source)
        assert ids_of(run_alone(executor, again)) == expected[2]


def test_a_state_is_saved_while_a_sequence_decodes(executor: Executor, expected: dict[int, list[int]]) -> None:
    prompt, blocks = PROMPTS[1], tuple(range(1, 13))
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [start(1, prompt, COUNT, blocks=blocks, state_slot=3)])
    collect(result, found)
    for position in range(len(prompt) + 1, 29):
        updates = [RowUpdate(1, (), None, (StateSave(28, 6),))] if position == 28 else []
        result = decode(executor, [result.batch], updates)
        collect(result, found)
    executor.clear()
    given = tuple(expected[1][: len(ids_of(found[1]))])
    assert given == tuple(ids_of(found[1]))
    again = start(1, prompt, COUNT, output_ids=given, blocks=blocks, cache_len=28, state_slot=5, state_from=6)
    assert [*given, *ids_of(run_alone(executor, again))] == expected[1]


def served(folder: Path, **settings: Any) -> Any:
    chosen: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_threads": 1} | settings
    return load_generator(ModelServerSettings(model_id=str(folder), **chosen), folder)


def test_the_router_is_told_of_the_slots_and_of_the_prefix_cache(folder: Path) -> None:
    executor, info = served(folder, prefix_caching=True)
    assert (info.use_prefix_caching, info.support_chunking, info.block_size) == (False, True, 4)
    assert Capability.STATE_SLOTS in info.capabilities  # and use_prefix_caching is for routers that know of no states
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000, max_batch_size=2)
    result = executor.warmup([start(1, PROMPTS[1])], limits)
    layout = StateLayout.of(executor.spec, 1, 0)
    states = executor.runner.pool.state_pool
    num_slots = 1 + 2 + pool_sizing.MIN_CHECKPOINTS
    assert (result.state_slots, result.pool_tokens) == (num_slots - 1, 2000)
    assert states.num_bytes == num_slots * layout.bytes_per_slot
    spec = executor.spec
    elements = 4 * 2 * spec.num_kv_heads * spec.head_dim * len(spec.attention_layers)
    assert result.kv_bytes == 501 * 4 * max(elements, 1)


def test_without_a_prefix_cache_there_are_no_slots_for_checkpoints(folder: Path) -> None:
    executor, info = served(folder, prefix_caching=False)
    assert (info.use_prefix_caching, Capability.STATE_SLOTS in info.capabilities) == (False, False)
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000, max_batch_size=3)
    assert executor.warmup([start(1, PROMPTS[1])], limits).state_slots == 3


def test_more_ranks_than_heads_of_states_are_refused() -> None:
    spec = spec_of({"architectures": ["Qwen3NextForCausalLM"]})
    with pytest.raises(SettingsError, match="--num-shard 33 is larger than the 32 heads of layers with a state"):
        StateLayout.of(spec, 33, 0)


def test_no_more_sequences_are_taken_than_have_a_slot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_sizing, "MIN_CHECKPOINTS", 0)
    executor, _ = served(folder)
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000, max_batch_size=1)
    assert executor.warmup([start(1, PROMPTS[1])], limits).state_slots == 2
    first = prefill(executor, 1, [start(1, PROMPTS[1]), start(2, PROMPTS[2])])
    with pytest.raises(InvalidRequest, match="has room for the states of 2 sequences, all of it is taken"):
        prefill(executor, 2, [start(3, PROMPTS[3])], first.batch)
    executor.clear()
    assert len(executor.batches.table) == 0


def test_states_take_their_share_of_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, _ = served(folder)
    each = executor.runner.pools.state_layout.bytes_per_slot
    # A quarter of the available memory is for the pool, and half of that for states.
    monkeypatch.setattr(pool_sizing, "available_memory", lambda: AvailableMemory(8 * 10 * each, "a test"))
    limits = WarmupLimits(max_prefill_tokens=64, max_total_tokens=40)
    result = executor.warmup([start(1, PROMPTS[1])], limits)
    assert (result.state_slots, executor.runner.pool.state_pool.num_slots) == (9, 10)
    monkeypatch.setattr(pool_sizing, "available_memory", lambda: AvailableMemory(8 * each, "a test"))
    with pytest.raises(NotEnoughMemory, match=f"the states of a sequence take {each} bytes"):
        executor.warmup([start(1, PROMPTS[1])], limits)


def test_accounts_are_right_at_published_sizes() -> None:
    spec = spec_of({"architectures": ["Qwen3NextForCausalLM"]})
    layout = StateLayout.of(spec, 1, 0)
    assert layout is not None
    # 36 layers: 32 matrices of 128 x 128, and three tokens of 2 * 16 * 128 + 32 * 128 channels.
    assert layout.bytes_per_slot == 36 * (32 * 128 * 128 + 3 * 8192) * 4 == 79_036_416
    halves = [StateLayout.of(spec, 2, rank) for rank in range(2)]
    assert sum(half.bytes_per_slot for half in halves if half is not None) == layout.bytes_per_slot
    room = PoolRoom(20_000_000_000, 20_000_000_000, None, "", "")
    assert num_state_slots(room, layout.bytes_per_slot, 4) == 1 + 4 + pool_sizing.MIN_CHECKPOINTS
    assert num_state_slots(room, layout.bytes_per_slot, 62) == 126
    assert num_state_slots(room, layout.bytes_per_slot, 64, has_prefix_cache=False) == 65
    assert room.without(125 * layout.bytes_per_slot).usual == 20_000_000_000 - 125 * 79_036_416
    assert num_state_slots(room, layout.bytes_per_slot, 1000) == 126


def test_blocks_that_keep_nothing_are_as_many_as_some_contexts_take() -> None:
    room = PoolRoom(1 << 30, 1 << 30, None, "a test", "memory of a test")
    demand = PoolDemand(context=1000, block_size=16, num_rows=4)
    assert num_pool_blocks(demand, room, 1 << 20, 1 << 20)[0] == 1 << 20
    empty = num_pool_blocks(replace(demand, empty=True), room, 1 << 20, 1 << 20)[0]
    assert empty == pool_sizing.USUAL_CONTEXTS * 63
