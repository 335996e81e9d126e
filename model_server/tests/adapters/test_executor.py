"""Adapters through executor and RPC: loading between steps, preemption, requests that name what is not there."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading import decoder as loading
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import Capability, Generation
from funitel_testing.executors import (
    chunk,
    decode,
    ids_of,
    load_executor,
    num_sequences,
    prefill,
    run_alone,
    run_out,
    start,
)
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import EIGHT, merge, save_adapter

PROMPT = tuple(range(40, 75))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("adapted")
    base = save_tiny("llama", work / "base")
    for i, made in enumerate(EIGHT[:3]):
        merge(base, save_adapter(base, work / f"a{i}", made, i), made, work / f"merged{i}")
    return work


@pytest.fixture(scope="module", params=["fused", "torch"])
def executor(request: pytest.FixtureRequest, folder: Path) -> Iterator[Executor]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(loading, "load_fused", lambda *_: None)
        yield load_executor(folder / "base")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    models = {"": "base", **{f"a{i}": f"merged{i}" for i in range(3)}}
    return {
        name: ids_of(run_alone(load_executor(folder / model), start(1, PROMPT, 12))) for name, model in models.items()
    }


def test_adapters_come_and_go_between_steps(executor: Executor, folder: Path, expected: dict[str, list[int]]) -> None:
    executor.clear()
    found: dict[int, list[Generation]] = {}
    result = prefill(executor, 1, [start(1, PROMPT, 12)])
    executor.load_adapter("a0", str(folder / "a0"))
    result = prefill(executor, 2, [start(2, PROMPT, 12, adapter_id="a0", chunk_len=10)], result.batch)
    executor.load_adapter("a1", str(folder / "a1"))
    result = prefill(executor, 3, [start(3, PROMPT, 12, adapter_id="a1")], result.batch, [chunk(2, 7)])
    executor.unload_adapter("a1")  # rows that have it keep it
    with pytest.raises(InvalidRequest, match="adapter_id a1 is not loaded"):
        prefill(executor, 4, [start(4, PROMPT, adapter_id="a1")], result.batch)
    run_out(executor, result, found)
    tokens = {number: ids_of(found[number]) for number in found}
    assert tokens[2] == expected["a0"]
    assert tokens[3] == expected["a1"]
    assert tokens[1] == expected[""][-len(tokens[1]) :]
    assert num_sequences(executor) == 0
    executor.unload_adapter("a0")


def test_a_resumed_sequence_goes_on_as_before(executor: Executor, folder: Path, expected: dict[str, list[int]]) -> None:
    executor.load_adapter("a2", str(folder / "a2"))
    begun = tuple(expected["a2"][:5])
    resumed = start(3, PROMPT, 12, adapter_id="a2", output_ids=begun)
    assert ids_of(run_alone(executor, resumed)) == expected["a2"][5:]
    executor.unload_adapter("a2")


def test_one_in_use_is_not_replaced(executor: Executor, folder: Path) -> None:
    executor.load_adapter("a", str(folder / "a0"))
    result = prefill(executor, 1, [start(1, PROMPT, 12, adapter_id="a")])
    with pytest.raises(InvalidRequest, match="adapter a is in use from"):
        executor.load_adapter("a", str(folder / "a1"))
    assert decode(executor, [result.batch]).generations
    executor.clear()
    assert executor.load_adapter("a", str(folder / "a1")).path == str(folder / "a1")
    executor.unload_adapter("a")


def test_another_router_finds_those_of_rows_without_a_read(executor: Executor, folder: Path) -> None:
    executor.clear()
    for name in ("a0", "a1"):
        executor.load_adapter(name, str(folder / name))
    before = executor.adapters.get("a0")
    prefill(executor, 1, [start(1, PROMPT, 12, adapter_id="a0")])
    for _ in range(2):  # routers, of which the first one ends before it has loaded any
        executor.hold()
        for name in ("a0", "a1"):
            with pytest.raises(InvalidRequest, match="is not loaded"):
                executor.adapters.get(name)
    assert executor.load_adapter("a0", str(folder / "a0")) is before
    executor.clear()
    left = weakref.ref(before)
    del before
    executor.hold()
    gc.collect()
    assert left() is None, "nothing holds it"


def test_the_weights_of_one_that_is_unloaded_are_freed(executor: Executor, folder: Path) -> None:
    executor.clear()
    weights = weakref.ref(executor.load_adapter("freed", str(folder / "a0")).weights)
    run_alone(executor, start(1, PROMPT, 4, adapter_id="freed"))
    executor.unload_adapter("freed")
    executor.clear()
    gc.collect()
    assert weights() is None


def test_a_shard_says_what_it_takes(folder: Path) -> None:
    def info_of(**settings: int) -> tuple[Executor, int, bool]:
        chosen = ModelServerSettings(model_id="tiny", device="cpu", num_threads=1, **settings)
        executor, info = load_generator(chosen, folder / "base")
        return executor, info.max_lora_rank, Capability.ADAPTERS in info.capabilities

    assert info_of()[1:] == (64, True)
    executor, *told = info_of(max_lora_rank=0)
    assert told == [0, False]
    with pytest.raises(InvalidRequest, match="adapter a cannot be loaded: --max-lora-rank is 0"):
        executor.load_adapter("a", str(folder / "a0"))
    executor, *told = info_of(max_lora_rank=3)
    assert told == [3, True]
    with pytest.raises(InvalidRequest, match="r is 4, above --max-lora-rank 3"):
        executor.load_adapter("a", str(folder / "a0"))


def test_the_pool_leaves_memory_for_adapters(folder: Path) -> None:
    alone = load_executor(folder / "base").options.reserved_bytes
    executor = load_executor(folder / "base", reserved_loras=3, max_lora_rank=16)
    whole = executor.load_adapter("a", str(folder / "a1")).weights.num_bytes
    assert alone == 0
    assert executor.options.reserved_bytes > 3 * whole
