"""A model in parts, loaded by its settings: what is where, its tokens, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.executor.executor import Executor
from funitel.model_server.kv_cache.joined_pools import JoinedCache
from funitel.model_server.loading import parts as loading
from funitel.model_server.loading.common import info_of, options_of
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.loading.parts import parts_of
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.joined import JoinedForward
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import FunitelError, InvalidRequest, SettingsError
from funitel.proto.settings.layer_parts import LayerParts
from funitel.proto.settings.partition import Partition
from funitel.proto.step import BlockCopy, StepResult, WarmupLimits
from funitel_testing.eagle3 import Eagle3Oracle
from funitel_testing.executors import (
    BLOCK_SIZE,
    chunk,
    decode,
    ids_of,
    load_executor,
    prefill,
    run_alone,
    run_out,
    start,
)
from funitel_testing.joined import first_part_in_torch
from funitel_testing.mtp import MtpOracle
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.tiny_adapters import TinyAdapter, save_adapter
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq
from funitel_testing.zoo import ZOO

CUDA = torch.device("cuda", 0)
PROMPT, COUNT = list(range(40, 58)), 8
PARTS = LayerParts("0-0=cpu,1-2=int8")  # of three layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(params=["torch+fused", "fused"])
def joined(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Executor:
    """The model with its first layer in float32, by torch or the fused step, and the others in int8."""
    if request.param != "fused":
        first_part_in_torch(monkeypatch)
    return load_executor(folder, layer_parts=PARTS)


def decoders_of(executor: Executor) -> list[Any]:
    assert isinstance(executor.runner.decoder, JoinedForward)
    return [part.decoder for part in executor.runner.decoder.parts]


def greedy(executor: Executor, **fields: Any) -> list[int]:
    return ids_of(run_alone(executor, start(1, PROMPT, COUNT, **fields)))


@pytest.mark.parametrize("is_in_torch", [True, False], ids=["torch first", "fused"])
def test_exact_parts_write_what_the_model_writes_in_one_piece(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_in_torch: bool
) -> None:
    expected = load_executor(folder)
    if is_in_torch:
        first_part_in_torch(monkeypatch)
    executor = load_executor(folder, layer_parts=LayerParts("0-0=cpu,1-2=float32"))
    first, last = decoders_of(executor)
    assert isinstance(first, Decoder if is_in_torch else FusedDecoder)
    assert isinstance(last, FusedDecoder)
    assert greedy(executor) == greedy(expected)
    ways: dict[str, Any] = {"do_sample": True, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    assert greedy(executor, **ways) == greedy(expected, **ways)


def test_each_part_is_loaded_in_its_precision_and_the_log_says_which(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ModelServerSettings(model_id="tiny", num_threads=1, layer_parts=LayerParts("0=bfloat16,1-2=int8"))
    with caplog.at_level(logging.INFO):
        executor, info = load_generator(settings, folder)
    assert [decoder.tier for decoder in decoders_of(executor)] == [Tier.BFLOAT16, Tier.INT8]
    assert info.dtype == "0-0=cpu:bfloat16,1-2=cpu:int8"
    assert "layers 0..0 of 3 device=cpu step=fused precision=torch.bfloat16 kv_dtype=bfloat16" in caplog.text
    assert "layers 1..2 of 3 device=cpu step=fused precision=int8 kv_dtype=bfloat16" in caplog.text
    held = [decoder.program.held_bytes for decoder in decoders_of(executor)]
    assert info.weight_bytes == sum(held)
    assert f"weight_bytes={held[0]}" in caplog.text
    assert f"weight_bytes={held[1]}" in caplog.text


def test_pools_of_the_parts_have_the_same_blocks_and_are_counted_together(joined: Executor) -> None:
    pool = joined.runner.pool
    assert isinstance(pool, JoinedCache)
    assert [each.num_blocks for each in pool.parts] == [pool.num_blocks] * 2
    assert pool.num_bytes == pool.num_blocks * joined.runner.pools.bytes_per_block
    result = joined.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=800))  # type: ignore[arg-type]
    assert (result.pool_tokens, result.kv_bytes) == (800, joined.runner.pool.num_bytes)


def test_chunks_and_company_change_no_token(joined: Executor) -> None:
    expected = greedy(joined)
    other = start(2, list(range(60, 70)), COUNT)
    alone = ids_of(run_alone(joined, other))
    found: dict[int, Any] = {}
    result = prefill(joined, 1, [start(1, PROMPT, COUNT, chunk_len=5), other])
    for count in (6, 7):
        for each in result.generations:
            found.setdefault(each.request_id, []).append(each)
        assert result.batch is not None
        result = decode(joined, [result.batch], [chunk(1, count)])
    run_out(joined, result, found)
    assert ids_of(found[1]) == expected
    assert ids_of(found[2]) == alone


def test_a_cached_prefix_and_a_preempted_sequence_give_the_same_tokens(joined: Executor) -> None:
    first = start(1, PROMPT, COUNT)
    expected = ids_of(run_alone(joined, first))
    full = len(PROMPT) // BLOCK_SIZE
    shared = start(3, PROMPT, COUNT)
    blocks = (*first.blocks[:full], *shared.blocks[: len(first.blocks) - full])
    again = start(3, PROMPT, COUNT, blocks=blocks, cache_len=full * BLOCK_SIZE)
    assert ids_of(run_alone(joined, again)) == expected
    half = expected[: COUNT // 2]  # preempted there: blocks of others, and what it had written is known
    resumed = start(5, PROMPT, COUNT, output_ids=tuple(half))
    assert ids_of(run_alone(joined, resumed)) == expected[COUNT // 2 :]


def test_a_fork_goes_on_from_a_copy_of_a_block_in_every_part(joined: Executor) -> None:
    expected = ids_of(run_alone(joined, start(1, [*PROMPT, 7, 9], COUNT)))
    first = start(2, PROMPT, 2)
    result = prefill(joined, 1, [first])
    assert result.batch is not None
    joined.clear(result.batch.id)
    full = len(PROMPT) // BLOCK_SIZE
    blocks = (*first.blocks[:full], 300, 301, 302, 303)
    fork = start(4, [*PROMPT, 7, 9], COUNT, blocks=blocks, cache_len=len(PROMPT))
    found: dict[int, Any] = {}
    copies = [BlockCopy(first.blocks[full], 0, is_load=False, to_block=300)]
    run_out(joined, joined.compute_prefill(2, [fork], copies=copies).describe(), found)
    assert ids_of(found[4]) == expected


def test_drafts_are_looked_up_and_change_no_token(folder: Path) -> None:
    prompt = [*PROMPT, *PROMPT]
    expected = ids_of(run_alone(load_executor(folder, layer_parts=PARTS), start(1, prompt, 20)))
    executor = load_executor(folder, layer_parts=PARTS, speculate=3)
    found: dict[int, Any] = {}
    result = prefill(executor, 1, [start(1, prompt, 20, speculate=3)])
    drafted = result.num_draft_tokens
    while result.batch is not None:
        run_step(result, found)
        result = decode(executor, [result.batch])
        drafted += result.num_draft_tokens
    run_step(result, found)
    assert ids_of(found[1]) == expected
    assert drafted > 0


def run_step(result: StepResult, into: dict[int, Any]) -> None:
    for each in result.generations:
        into.setdefault(each.request_id, []).append(each)


def test_a_draft_model_drafts_beside_the_parts(folder: Path, tmp_path: Path) -> None:
    draft = save_tiny("llama", tmp_path, num_hidden_layers=1)
    executor = load_executor(folder, layer_parts=PARTS, speculate=2, draft_model=str(draft))
    expected = greedy(load_executor(folder, layer_parts=PARTS))
    assert ids_of(run_alone(executor, start(1, PROMPT, COUNT, speculate=2))) == expected
    pool = executor.runner.pool
    assert len(pool.with_companion()) == 3
    assert pool.num_bytes == pool.num_blocks * executor.runner.pools.bytes_per_block


def test_drafters_that_read_hidden_states_are_refused(tmp_path: Path) -> None:
    target = save_tiny("llama", tmp_path / "target", num_hidden_layers=8)
    head, parts = tmp_path / "head", LayerParts("0=cpu,1-7=int8")
    Eagle3Oracle(head, target)
    with pytest.raises(SettingsError) as refused:
        load_executor(target, layer_parts=parts, speculate=2, draft_model=str(head))
    expected = f"--draft-model {head} cannot be used with --layer-parts {parts}: it reads hidden states"
    assert refused.value.message == expected


def test_an_mtp_layer_is_left_out_and_drafts_are_looked_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ZOO["glm4_moe"].save(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    MtpOracle(tmp_path)
    parts = LayerParts(f"0=float32,1-{choose_spec(None, tmp_path).num_layers - 1}=float32")
    with caplog.at_level(logging.INFO):
        executor = load_executor(tmp_path, dtype=None, layer_parts=parts, speculate=2)
    assert executor.speculator is not None
    assert executor.speculator.drafter.name == "ngram"
    assert "drafts are looked up: the MTP layer reads hidden states" in caplog.text


def test_a_shard_with_parts_sleeps_and_wakes(joined: Executor) -> None:
    expected = greedy(joined)
    assert joined.sleep(1) > 0
    joined.wake()
    joined.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))  # type: ignore[arg-type]
    assert greedy(joined) == expected


@pytest.mark.parametrize("is_in_torch", [True, False], ids=["torch first", "fused"])
def test_adapters_are_added_in_every_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_in_torch: bool
) -> None:
    targets = ["q_proj", "down_proj", "embed_tokens", "lm_head"]  # of both parts, and of their ends
    adapter = str(save_adapter(folder, tmp_path / "all", TinyAdapter(rank=4, targets=targets), seed=1))
    ends = str(save_adapter(folder, tmp_path / "ends", TinyAdapter(rank=4, targets=["lm_head"]), seed=2))
    whole = load_executor(folder)
    if is_in_torch:
        first_part_in_torch(monkeypatch)
    executor = load_executor(folder, layer_parts=LayerParts("0-0=cpu,1-2=float32"))
    answers = []
    for each in (whole, executor):
        held = [each.load_adapter("all", adapter).weights.num_bytes, each.load_adapter("ends", ends).weights.num_bytes]
        assert min(held) > 0
        found: dict[int, Any] = {}
        starts = [start(1, PROMPT, COUNT), start(2, PROMPT, COUNT, adapter_id="all")]
        run_out(each, prefill(each, 1, [*starts, start(3, PROMPT, COUNT, adapter_id="ends")]), found)
        answers.append([ids_of(found[number]) for number in (1, 2, 3)])
        each.unload_adapter("all")
        with pytest.raises(InvalidRequest, match="adapter_id all is not loaded"):
            prefill(each, 2, [start(4, PROMPT, adapter_id="all")])
    assert answers[0] == answers[1]
    assert len({tuple(ids) for ids in answers[0]}) == 3


def settings_of(folder: Path, **given: Any) -> ModelServerSettings:
    return ModelServerSettings(model_id=str(folder), **({"num_threads": 1} | given))


def test_gpu_layers_are_the_last_ones(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = choose_spec(None, folder)
    parts = parts_of(settings_of(folder, gpu_layers=2, dtype="float16"), spec, CUDA)
    assert parts is not None
    assert [(each.layers, each.device.type) for each in parts] == [(range(1), "cpu"), (range(1, 3), "cuda")]
    with caplog.at_level(logging.INFO):
        assert parts_of(settings_of(folder, gpu_layers=3), spec, CUDA) is None
        assert parts_of(settings_of(folder, gpu_layers=99), spec, CUDA) is None
    assert "--gpu-layers 99: all 3 layers are on the GPU" in caplog.text
    assert parts_of(settings_of(folder), spec, CUDA) is None


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_gpu"),
    [
        ({"dtype": "float16"}, ("float16", None, None), ("float16", None, None)),
        ({"quantize": "int8"}, (None, "int8", None), (None, "int8", None)),
        ({"quantize": "gguf"}, (None, "gguf", None), (None, None, None)),
        ({"quantize": "fp8"}, (None, None, None), (None, "fp8", None)),
        ({"kv_cache_dtype": "fp8_e5m2"}, (None, None, "fp8_e5m2"), (None, None, "fp8_e5m2")),
        ({"kv_cache_dtype": "uint4"}, (None, None, "uint4"), (None, None, None)),
    ],
)
def test_each_device_gets_the_precision_that_it_has(
    folder: Path, asked: dict[str, Any], on_cpu: tuple[str | None, ...], on_gpu: tuple[str | None, ...]
) -> None:
    parts = parts_of(settings_of(folder, gpu_layers=1, **asked), choose_spec(None, folder), CUDA)
    assert parts is not None
    found = [(each.settings.dtype, each.settings.quantize, each.settings.kv_cache_dtype) for each in parts]
    assert found == [on_cpu, on_gpu]


def test_layers_on_a_gpu_are_in_torch_with_a_pool_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loaders would put on a GPU, with meta tensors in place of one."""
    spec, meta = choose_spec(None, folder), torch.device("meta")
    parts = parts_of(settings_of(folder, gpu_layers=1), spec, CUDA)
    assert parts is not None
    real = loading.load_torch
    asked: list[torch.dtype] = []

    def load(settings: Any, own: Any, weights: Any, *given: Any) -> Any:
        asked.append(weights.dtype)
        weights.device = meta
        return real(settings, own, weights, *given)

    monkeypatch.setattr(loading, "load_torch", load)
    monkeypatch.setattr(
        "funitel.model_server.loading.torch_backend.choose_attention", lambda *_: TorchAttention(4, meta)
    )
    loaded = loading.load_parts(folder, spec, parts)
    assert asked == [torch.bfloat16]
    assert loaded.name == "fused+torch"
    assert loaded.precision == "0-1=cpu:int8,2-2=cuda:bfloat16"
    assert loaded.gpu_blocks is not None
    device, num_bytes = loaded.gpu_blocks
    assert device == CUDA
    assert num_bytes * 3 == loaded.pools.bytes_per_block  # type: ignore[union-attr]
    options = options_of(parts[0].settings, loading.HOST, loaded, frozenset())
    assert (options.device, options.memory_device, options.gpu_blocks) == (loading.HOST, CUDA, loaded.gpu_blocks)
    info = info_of(parts[0].settings, options, loaded, spec.vocab_size, keeps_states=False, has_parted_blocks=True)
    assert (info.device_type, info.layer_parts) == ("cuda", loaded.precision)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"gpu_layers": 2}, "--gpu-layers 2 needs a GPU: this machine has none that torch can use"),
        ({"gpu_layers": 2, "device": "cpu"}, "--gpu-layers 2 needs a GPU: --device is cpu"),
        ({"layer_parts": "0-1=int8,2-2=cuda"}, "--layer-parts 0-1=int8,2-2=cuda needs a GPU: this machine has none"),
        (
            {"layer_parts": "0-2=int8", "device": "cuda"},
            "--device cuda cannot be used with --layer-parts 0-2=int8, which",
        ),
        ({"layer_parts": "0-1=int8,2-3=cpu"}, "--layer-parts 0-1=int8,2-3=cpu places 4 layers, the model has 3"),
        ({"layer_parts": "0-2=gguf"}, "--quantize gguf: this model is no GGUF file"),
        ({"layer_parts": "0-2=int8", "cpu_offload_gb": 1.5}, "--cpu-offload-gb 1.5 cannot be used with --layer-parts"),
        ({"layer_parts": "0-2=int8", "kv_host_gb": 2.0}, "--kv-host-gb 2 cannot be used with --layer-parts 0-2=int8"),
        ({"layer_parts": "0-2=int8", "expert_parallel": True}, "--expert-parallel cannot be used with --layer-parts"),
        ({"layer_parts": "0-2=int8", "dtype": "float32"}, "--dtype float32 cannot be used with --layer-parts 0-2=int8"),
        ({"layer_parts": "0-2=int8", "quantize": "int8"}, "--quantize int8 cannot be used with --layer-parts 0-2=int8"),
        ({"layer_parts": "0-2=int8", "engine": "transformers"}, "is for decoders of the table of models, not models"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "layer_parts" in given:
        given = given | {"layer_parts": LayerParts(given["layer_parts"])}
    with pytest.raises(FunitelError) as refused:
        load_generator(settings_of(folder, **given), folder)
    assert line in refused.value.message
    assert "\n" not in refused.value.message


def test_all_layers_on_the_gpu_are_no_parts(folder: Path) -> None:
    table = LayerParts("0-1=cuda,2-2=cuda")
    with pytest.raises(SettingsError, match=r"0-1=cuda,2-2=cuda has all layers on the GPU: leave it out$"):
        parts_of(settings_of(folder, layer_parts=table), choose_spec(None, folder), CUDA)


def test_formats_of_some_matrices_are_for_layers_that_say_no_precision(folder: Path) -> None:
    table = LayerParts("0-0=cpu,1-1=int8,2-2=bfloat16")
    asked = settings_of(folder, layer_parts=table, quantize="q4", quantize_tensors="down_proj=q8")
    parts = parts_of(asked, choose_spec(None, folder), loading.HOST)
    assert parts is not None
    found = [(part.settings.quantize, part.settings.quantize_tensors) for part in parts]
    assert found == [("q4", "down_proj=q8"), ("int8", None), (None, None)]


def test_layers_on_a_gpu_have_no_blocks_in_a_file(folder: Path) -> None:
    for placed in ({"gpu_layers": 2}, {"layer_parts": LayerParts("0-0=int8,1-2=cuda")}):
        with pytest.raises(SettingsError, match=r"^--kv-disk-gb 2 cannot be used with --(gpu-layers|layer-parts) "):
            parts_of(settings_of(folder, kv_disk_gb=2.0, **placed), choose_spec(None, folder), CUDA)


def test_models_with_states_and_layers_that_share_keys_are_refused(tmp_path: Path) -> None:
    ZOO["qwen3_next"].save(tmp_path / "states")
    spec = choose_spec(None, tmp_path / "states")
    with pytest.raises(SettingsError, match=r"^--gpu-layers 1 is not for \w+, which keeps states of sequences$"):
        parts_of(settings_of(tmp_path, gpu_layers=1), spec, CUDA)
    ZOO["gemma3n"].save(tmp_path / "shared")
    spec = choose_spec(None, tmp_path / "shared")
    message = (
        rf"^--gpu-layers 1 has a part that begins with layer {spec.num_layers - 1}: layer \d+ has the keys and values"
    )
    with pytest.raises(SettingsError, match=message):
        parts_of(settings_of(tmp_path, gpu_layers=1), spec, CUDA)


def test_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    save_tiny_seq2seq("t5", tmp_path)
    with pytest.raises(SettingsError, match=r"^--layer-parts 0-2=int8 is for decoders of the table of models, not enc"):
        load_generator(settings_of(tmp_path, layer_parts=LayerParts("0-2=int8")), tmp_path)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"gpu_layers": 2, "layer_parts": LayerParts("0-2=int8")},
            "--gpu-layers 2 and --layer-parts 0-2=int8 both place the layers: give one",
        ),
        (
            {"gpu_layers": 2, "sharded": True, "world_size": 2},
            "--gpu-layers 2 cannot be used with --num-shard 2: one shard has all layers",
        ),
        (
            {"layer_parts": LayerParts("0=cpu"), "sharded": True, "world_size": 2, "partition": Partition("0;1")},
            "--layer-parts 0-0=cpu cannot be used with --partition 0;1: one shard has all layers",
        ),
        ({"gpu_layers": 0}, "--gpu-layers must be within 1..4096, given 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError) as refused:
        ModelServerSettings(model_id="x", **given)
    assert refused.value.message == line
