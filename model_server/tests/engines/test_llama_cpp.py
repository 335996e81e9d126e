"""llama.cpp behind our executor: its tokens are its own, and whatever is asked of a sequence is kept."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from funitel.model_server.convert.gguf_description import point_or_describe
from funitel.model_server.engines.llama_cpp import library
from funitel.model_server.engines.llama_cpp.load import load_llama_cpp
from funitel.model_server.executor.executor import Executor
from funitel.model_server.files.gguf_refusal import refuse_described
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import LLAMA_CPP, ModelServerSettings
from funitel.proto.errors import FunitelError, InvalidRequest, SettingsError, UnsupportedModel, WeightsError
from funitel.proto.step import Capability, SamplingParams, SequenceStart, ShardInfo, StoppingParams, WarmupLimits
from funitel_testing.executors import collect, decode, keep_rows, num_sequences, prefill
from funitel_testing.executors import start as start_with

MakeGguf = Callable[..., Any]
BLOCK_SIZE = 4
PROMPTS = ([3, 5, 7, 9, 11, 13], [4, 6], [12, 3, 14, 15, 9, 2, 6, 5, 3, 5])


def start(request_id: int, prompt: Sequence[int], max_new_tokens: int = 8, **fields: Any) -> SequenceStart:
    """A sequence with blocks of its own, as many as the context of the model has room for."""
    first = 1 + 16 * (request_id % 20)
    return start_with(
        request_id, tuple(prompt), max_new_tokens, **({"blocks": tuple(range(first, first + 16))} | fields)
    )


@pytest.fixture(scope="session")
def llama_cpp() -> ModuleType:
    return pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_gguf: MakeGguf) -> Path:
    """The folder of a tiny random Llama in float32."""
    return _pointed(tmp_path_factory.mktemp("model"), make_gguf, "llama")


def _pointed(folder: Path, make_gguf: MakeGguf, architecture: str) -> Path:
    make_gguf(folder / "tiny.gguf")
    target = folder / "made"
    target.mkdir()
    point_or_describe(_rewritten(folder / "tiny.gguf", architecture), target)
    return target


def _rewritten(path: Path, architecture: str) -> Path:
    """The same model under the name of an architecture with the same tensors, with a token for every embedding."""
    reader, target = GGUFReader(path), path.with_name(f"{architecture}.gguf")
    num_tokens = int(next(each for each in reader.tensors if each.name == "token_embd.weight").shape[1])
    more = {"tokens": lambda i: f"<unused{i}>", "scores": lambda i: -1e3, "token_type": lambda i: 5}
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        key = name.replace("llama.", f"{architecture}.", 1) if name.startswith("llama.") else name
        sub_type = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        value, last = field.contents(), name.rpartition(".")[2]
        if last in more:
            value += [more[last](i) for i in range(len(value), num_tokens)]
        writer.add_key_value(key, value, field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _settings(folder: Path, **given: Any) -> ModelServerSettings:
    chosen: dict[str, Any] = {"engine": LLAMA_CPP, "block_size": BLOCK_SIZE, "num_threads": 1} | given
    return ModelServerSettings(model_id=str(folder), **chosen)


def _loaded(folder: Path, max_tokens: int = 2000, **given: Any) -> tuple[Executor, ShardInfo]:
    executor, info = load_llama_cpp(_settings(folder, enable_prefill_logprobs=True, **given), folder)
    warm = SequenceStart(
        request_id=0, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=1), inputs="x" * 20
    )
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=max_tokens, max_batch_size=8)
    result = executor.warmup([warm], limits)
    assert result.pool_tokens == max_tokens
    assert result.state_slots == 8
    return executor, info


@pytest.fixture
def executor(folder: Path, llama_cpp: ModuleType) -> Executor:
    return _loaded(folder)[0]


def _run(executor: Executor, *starts: SequenceStart) -> dict[int, list[int]]:
    """All tokens of sequences that run beside each other."""
    found: dict[int, list[Any]] = {}
    result = prefill(executor, 1, list(starts))
    collect(result, found)
    while result.batch is not None:
        result = decode(executor, [result.batch])
        collect(result, found)
    return {key: [token for each in value for token in each.tokens.ids] for key, value in found.items()}


def test_greedy_tokens_are_those_of_llama_cpp_itself(executor: Executor, folder: Path, llama_cpp: ModuleType) -> None:
    path = str(folder.parent / "llama.gguf")
    model = llama_cpp.Llama(path, n_ctx=64, n_threads=1, verbose=False)
    for i, prompt in enumerate(PROMPTS):
        own, tokens = [], model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        for _, token in zip(range(8), tokens, strict=False):
            own.append(int(token))
        assert _run(executor, start(i, prompt)) == {i: own}


def test_logits_are_those_of_our_own_engine(executor: Executor, folder: Path) -> None:
    other, _ = load_generator(ModelServerSettings(model_id=str(folder), device="cpu", dtype="float32"), folder)
    spans = [
        RowSpan(prompt, 0, np.arange(1 + 4 * i, 5 + 4 * i, dtype=np.int32), "all", row_index=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    batch = ForwardBatch.build(spans, 16, torch.device("cpu"))
    ours = other.runner.decoder(batch, other.runner.pools.make(20))
    theirs = executor.runner.decoder(ForwardBatch.build(spans, BLOCK_SIZE, torch.device("cpu")), executor.runner.pool)
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(theirs, ours, atol=0.02, rtol=0.02)  # its keys and values are float16


def test_sequences_beside_each_other_are_what_they_are_alone(executor: Executor) -> None:
    alone = {}
    for i, prompt in enumerate(PROMPTS):
        alone |= _run(executor, start(i, prompt))
    assert _run(executor, *(start(i, prompt) for i, prompt in enumerate(PROMPTS))) == alone
    assert num_sequences(executor) == 0


def test_seeds_penalties_and_masks_are_ours(executor: Executor) -> None:
    drawn = [_run(executor, start(1, PROMPTS[0], do_sample=True, seed=7, temperature=2.0)) for _ in range(2)]
    other = _run(executor, start(1, PROMPTS[0], do_sample=True, seed=8, temperature=2.0))
    assert drawn[0] == drawn[1] != other
    allowed = _run(executor, start(2, PROMPTS[0], allowed_token_ids=(5, 6)))[2]
    assert set(allowed) <= {5, 6}
    biased = _run(executor, start(3, PROMPTS[0], logit_bias=((9, 100.0),)))[3]
    assert set(biased) == {9}


def test_a_sequence_resumes_by_its_tokens(executor: Executor) -> None:
    whole = _run(executor, start(1, PROMPTS[2], 8))[1]
    resumed = _run(executor, start(2, PROMPTS[2], 8, output_ids=tuple(whole[:3])))[2]
    assert resumed == whole[3:]


def test_a_prompt_in_chunks_is_the_prompt(executor: Executor) -> None:
    whole = _run(executor, start(1, PROMPTS[2]))[1]
    assert _run(executor, start(2, PROMPTS[2], chunk_len=3))[2] == whole


def test_prompt_log_probabilities_are_told(executor: Executor) -> None:
    result = prefill(executor, 1, [start(1, PROMPTS[0], prefill_logprobs=True, top_n_tokens=2)])
    (generation,) = result.generations
    assert generation.prefill_tokens is not None
    scores = generation.prefill_tokens.logprobs
    assert len(scores) == len(PROMPTS[0])
    assert all(score < 0 for score in scores[1:])
    assert generation.top_tokens[0].ids[0] == generation.tokens.ids[0]
    executor.clear()


def test_room_of_a_cancelled_sequence_is_free_at_once(folder: Path, llama_cpp: ModuleType) -> None:
    executor, _ = _loaded(folder, max_tokens=256)  # least that a context of llama.cpp has
    prompt = (PROMPTS[0] * 12)[:60]
    blocks = tuple(range(1, 17))
    for i in range(12):  # of 60 tokens each: without room given back the fifth would find none
        result = prefill(executor, i, [start(i, prompt, 4, blocks=blocks), start(100 + i, [3], 4, blocks=(40, 41))])
        assert result.batch is not None
        kept = keep_rows(executor, result.batch.id, [100 + i])
        assert kept.request_ids == (100 + i,)
        context = executor.runner.pool.context  # type: ignore[attr-defined]
        assert sum(context.length(place) for place in range(8)) == 1
        executor.clear(kept.id)
        assert sum(context.length(place) for place in range(8)) == 0


def test_no_more_sequences_than_there_is_room_for(executor: Executor) -> None:
    with pytest.raises(InvalidRequest, match="room for the states of 8 sequences"):
        prefill(executor, 1, [start(i, [3], blocks=(1 + 2 * i, 2 + 2 * i)) for i in range(9)])
    assert num_sequences(executor) == 0


def test_the_router_is_told_what_it_can_do(folder: Path, llama_cpp: ModuleType) -> None:
    _, info = _loaded(folder)
    assert info.attention_impl == "llama.cpp"
    assert info.dtype == "gguf"
    assert not info.use_prefix_caching
    assert info.weight_bytes > 0
    assert info.max_lora_rank == 0 or Capability.ADAPTERS not in info.capabilities
    absent = {Capability.ADAPTERS, Capability.SPECULATION, Capability.BLOCK_FORKS, Capability.STATE_SLOTS}
    assert not info.capabilities & absent
    assert {Capability.STEP_SEQ, Capability.TOKEN_IDS, Capability.GRAMMARS} <= info.capabilities


def test_an_architecture_without_a_row_runs_by_llama_cpp_alone(
    tmp_path: Path, make_gguf: MakeGguf, folder: Path, llama_cpp: ModuleType
) -> None:
    other = _pointed(tmp_path, make_gguf, "ernie4_5")
    with pytest.raises(UnsupportedModel, match=r"architecture ernie4_5 .*; --engine llama_cpp runs"):
        refuse_described(other)
    with pytest.raises(UnsupportedModel, match=r"architecture ernie4_5 .*; --engine llama_cpp runs"):
        load_generator(ModelServerSettings(model_id=str(other), device="cpu"), other)
    found = _run(_loaded(other)[0], start(1, PROMPTS[2]))
    assert found == _run(_loaded(folder)[0], start(1, PROMPTS[2]))


def test_what_llama_cpp_does_not_know_is_one_line(tmp_path: Path, make_gguf: MakeGguf, llama_cpp: ModuleType) -> None:
    other = _pointed(tmp_path, make_gguf, "nonesuch")
    with pytest.raises(WeightsError, match="llama.cpp cannot load .*nonesuch.gguf: .*") as caught:
        load_llama_cpp(_settings(other), other)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cuda"}, "--device cuda: --engine llama_cpp runs on a CPU"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 is not for --engine llama_cpp"),
        ({"quantize": "int8"}, "--quantize int8 is not for --engine llama_cpp"),
        ({"speculate": 2}, "--speculate 2 is not for --engine llama_cpp"),
        ({"kv_host_gb": 1.0}, "--kv-host-gb 1 is not for --engine llama_cpp"),
        ({"sharded": True, "world_size": 2}, "--num-shard 2: --engine llama_cpp runs on one shard"),
        ({"reserved_loras": 1}, "--lora-adapters and --lora-folder are not for --engine llama_cpp"),
    ],
    ids=str,
)
def test_settings_that_it_does_not_honour_are_refused(folder: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_llama_cpp(_settings(folder, **given), folder)


def test_only_a_gguf_is_computed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="--engine llama_cpp computes GGUF files, and .* has none"):
        load_llama_cpp(_settings(tmp_path), tmp_path)


def test_without_the_extra_one_line_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr("funitel.proto.extras.find_spec", lambda name: None)
    with pytest.raises(FunitelError, match=r"--engine llama_cpp needs .*: pip install 'funitel\[llama-cpp\]'"):
        load_llama_cpp(_settings(folder), folder)
