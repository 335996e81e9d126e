"""A shard that sleeps: its memory falls, steps are refused, and after Wake and Warmup the text is the same."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.memory import process_memory
from funitel.model_server.device.parked_tensors import ParkedTensors, tensors_of
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor
from funitel.model_server.files.integrity import read_json
from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.model_server.loading.encoder import load_encoder
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, WrongState
from funitel.proto.step import CachedBatch, EncoderInput, EncoderTask, WarmupLimits
from funitel_testing.executors import BLOCK_SIZE, decode, ids_of, load_executor, prefill, run_alone, start
from funitel_testing.fallback import UNLISTED
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.tiny_adapters import EIGHT, save_adapter
from funitel_testing.tiny_encoders import save_tiny_encoder
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")
PROMPT = list(range(40, 60))
LIMITS = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000)


def warm_up(executor: Executor, num_tokens: int = 2000) -> None:
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=num_tokens)
    assert executor.warmup([start(0, PROMPT)], limits).pool_tokens == num_tokens


def text_of(executor: Executor) -> list[int]:
    return ids_of(run_alone(executor, start(1, PROMPT, 10)))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("model", ["llama", "int8", "bfloat16", "states", "t5", "transformers"])
def test_the_text_is_the_same_after_sleep(model: str, tmp_path: Path) -> None:
    tiers: dict[str, Any] = {"int8": {"quantize": "int8", "dtype": None}, "bfloat16": {"dtype": "bfloat16"}}
    if model == "t5":
        save_tiny_seq2seq("t5", tmp_path)
    elif model in ("states", "transformers"):
        (ZOO["qwen3_5"] if model == "states" else next(iter(UNLISTED.values()))).save(tmp_path)
        byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    else:
        save_tiny("llama", tmp_path)
    executor = load_executor(tmp_path, **tiers.get(model, {}))
    expected = text_of(executor)
    pool = executor.runner.pool
    executor.sleep(1)
    assert (pool.pool.numel(), len(pool.keys), pool.state_pool, executor.runner.cache) == (0, 0, None, None)
    executor.wake()
    with pytest.raises(InvalidRequest, match="^Warmup must come before the first step$"):
        prefill(executor, 1, [start(1, PROMPT)])
    warm_up(executor)
    assert text_of(executor) == expected


def test_resident_memory_falls_by_what_the_pool_had_touched(tmp_path: Path) -> None:
    executor = load_executor(save_tiny("llama", tmp_path))
    expected = text_of(executor)
    warm_up(executor, 400_000)
    pool = executor.runner.pool
    pool.pool.fill_(1.0)  # as sequences would in time
    before, pool_bytes = process_memory().resident_bytes, pool.num_bytes
    assert pool_bytes > 100e6
    freed = executor.sleep(1)
    assert freed == pytest.approx(pool_bytes, rel=0.1)
    assert before - process_memory().resident_bytes == pytest.approx(pool_bytes, rel=0.1)
    assert executor.sleep(1) == 0
    executor.wake()
    warm_up(executor, 4000)  # another size than before
    assert text_of(executor) == expected


def test_the_pool_of_a_draft_model_is_freed_too(tmp_path: Path) -> None:
    target = save_tiny("llama", tmp_path / "target")
    draft = save_tiny("llama", tmp_path / "draft", seed=1)
    executor = load_executor(target, speculate=3, draft_model=str(draft))
    sequence = start(1, PROMPT, 10, speculate=3)
    expected = ids_of(run_alone(executor, sequence))
    companion = executor.runner.pool.companion
    assert companion is not None
    executor.sleep(1)
    assert companion.pool.numel() == 0
    executor.wake()
    warm_up(executor)
    assert ids_of(run_alone(executor, sequence)) == expected


def test_what_is_asked_of_a_shard_that_sleeps_is_refused_in_one_line(executor: Executor) -> None:
    expected = text_of(executor)
    executor.sleep(1)
    calls = {
        "prefill": lambda: executor.compute_prefill(1, [start(1, PROMPT)]),
        "decode": lambda: executor.compute_decode([CachedBatch(1, (1,))]),
        "warmup": lambda: warm_up(executor),
        "adapter": lambda: executor.load_adapter("a", "/nowhere"),
    }
    for call in calls.values():
        with pytest.raises(WrongState, match=r"^the shard sleeps: Wake comes first, then Warmup$"):
            call()
    executor.clear()  # a router that comes says so before all else
    executor.wake()
    executor.wake()
    warm_up(executor)
    assert text_of(executor) == expected


def test_a_shard_with_sequences_does_not_sleep(executor: Executor) -> None:
    warm_up(executor)
    step = prefill(executor, 1, [start(1, PROMPT, 3), start(2, PROMPT, 1)])
    with pytest.raises(WrongState, match="^the shard cannot sleep: 2 sequences are here; finish them, or clear the ca"):
        executor.sleep(1)
    kept = executor.begin_filter(1, [1], is_ahead=False)()
    step = decode(executor, [kept])
    assert step.batch is not None
    step = decode(executor, [step.batch])
    assert step.batch is None
    with pytest.raises(InvalidRequest, match="^level must be 1, given 2: "):
        executor.sleep(2)
    executor.sleep(1)
    executor.wake()


def test_adapters_are_dropped(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base")
    folder = save_adapter(base, tmp_path / "adapter", EIGHT[1])
    executor = load_executor(base)
    executor.load_adapter("a", str(folder))
    expected = ids_of(run_alone(executor, start(1, PROMPT, 10, adapter_id="a")))
    executor.sleep(1)
    executor.wake()
    warm_up(executor)
    with pytest.raises(InvalidRequest, match="adapter_id a is not loaded"):
        prefill(executor, 1, [start(1, PROMPT, adapter_id="a")])
    executor.load_adapter("a", str(folder))
    assert ids_of(run_alone(executor, start(1, PROMPT, 10, adapter_id="a"))) == expected


def test_the_host_tier_is_let_go_of(tmp_path: Path) -> None:
    executor = load_executor(save_tiny("llama", tmp_path))
    runner = executor.runner
    runner.options = replace(runner.options, host_bytes=6 * runner.pools.bytes_per_block)
    warm_up(executor)
    assert runner.host is not None
    executor.sleep(1)
    assert (runner.host, executor.profiler._host_memory) == (None, None)
    executor.wake()
    warm_up(executor)
    assert runner.host is not None


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_whole_model_is_emptied_and_filled_again(name: str, tmp_path: Path) -> None:
    """As on a GPU: weights and what samples there, all that an executor refers to; a CPU stands for the device."""
    folder = save_tiny_seq2seq(name, tmp_path) if name == "t5" else save_tiny(name, tmp_path)
    loaded = load_executor(folder, dtype="bfloat16")
    runner, decoder = loaded.runner, loaded.runner.decoder
    if name == "llama":  # in torch, as on a GPU
        spec = spec_of(read_json(folder / "config.json"))
        weights = Weights(folder, torch.bfloat16, CPU, spec.names.prefix)
        decoder = Decoder(spec, weights, TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
    sampling = partial(AsyncSampling, maths=TorchMaths(), copy=Known)
    parts = loaded.spec, decoder, runner.pools, loaded.codec, loaded.parallel, loaded.options
    executor = Executor(*parts, sampling, runner.rules)
    warm_up(executor)
    expected = text_of(executor)
    executor.sleep(1)
    found = tensors_of(executor, CPU)
    assert sum(tensor.numel() for tensor in found) > 10_000
    parked = ParkedTensors(found, CPU)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in found)
    parked.restore()
    executor.wake()
    warm_up(executor)
    assert text_of(executor) == expected


class Known:
    """A copy to the host that is there at once."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.clone()

    def wait(self) -> Any:
        return self._numbers.numpy()


def test_an_encoder_sleeps_too(tmp_path: Path) -> None:
    folder = save_tiny_encoder("Bert", "Model", tmp_path)
    executor, info = load_encoder(ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1), folder)
    assert info.capabilities == frozenset({"sleep"})
    texts = [EncoderInput(input_ids=(2, 3, 4))]
    expected = executor.encode(EncoderTask.EMBED, texts).values
    assert executor.sleep(1) < 50e6  # weights stay, and there is no pool
    with pytest.raises(WrongState, match="^the shard sleeps"):
        executor.encode(EncoderTask.EMBED, texts)
    executor.wake()
    assert executor.encode(EncoderTask.EMBED, texts).values == expected
