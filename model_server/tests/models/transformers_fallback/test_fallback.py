"""Models of no row of the table say through transformers what transformers says, whatever shares their steps."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.pool_sizing import PoolRoom
from funitel.model_server.loading import transformers as loading
from funitel.model_server.loading.decoder import load
from funitel.model_server.models.transformers_fallback.cache_adapters import CacheAdapter, choose_adapter
from funitel.model_server.models.transformers_fallback.dynamic_rope import DynamicRope
from funitel.model_server.models.transformers_fallback.pool import FallbackPool
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError, Unsuited, UnsupportedModel, WeightsError
from funitel.proto.step import Generation, SequenceStart, WarmupLimits
from funitel_testing.executors import chunk, collect, decode, ids_of, num_sequences, prefill, run_alone, run_out, start
from funitel_testing.fallback import TOLERANCE, UNLISTED, on_two_ranks, split_form, worst_error
from funitel_testing.fallback import load as load_through_transformers
from funitel_testing.tiny import byte_tokenizer
from funitel_testing.zoo import ZOO, Tiny, by_steps

# One of each kind; `python -m funitel_testing.fallback` takes all of them, and more steps.
WAYS = dict.fromkeys(("exaone", "dots", "gpt-oss", "nemotron", "phimoe"), "packed")
WAYS |= dict.fromkeys(("codegen", "mamba", "falcon-h1"), "stacked") | {"rwkv": "alone"}
PROMPTS = [list(range(40, 63)), [7, 8, 9], list(range(100, 141))]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tensors are tiny


@pytest.mark.parametrize(("name", "way"), WAYS.items())
def test_logits_equal_transformers(name: str, way: str, tmp_path: Path) -> None:
    error, found = worst_error(UNLISTED[name], tmp_path, 4)
    assert (error < TOLERANCE, found) == (True, f"transformers-{way}")


def test_an_architecture_of_the_table_is_the_same_through_transformers(tmp_path: Path) -> None:
    error, way = worst_error(ZOO["llama"], tmp_path, 4)
    assert (way, error < TOLERANCE) == ("transformers-packed", True)


_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# Trained with 48 tokens.
BY_LENGTH = {
    "dynamic": replace(
        UNLISTED["arcee"],
        config={**UNLISTED["arcee"].config, "max_position_embeddings": 48, "rope_parameters": _DYNAMIC},
        oracle=by_steps,
    ),
    "longrope": UNLISTED["phimoe"],
}


@pytest.mark.parametrize("way", ["packed", "stacked", "alone"])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_a_sequence_turns_by_its_own_length(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Unsuited("not asked for")

    def choose_unpadded(*args: Any) -> CacheAdapter:
        adapter = choose_adapter(*args)
        adapter.takes_padding = False
        return adapter

    if way != "packed":
        monkeypatch.setattr(loading, "PackedModel", refuse)
    if way == "alone":
        monkeypatch.setattr(loading, "choose_adapter", choose_unpadded)
    for lengths in ((40, 60), (50, 60)):  # on both sides of that, and both beyond
        error, found = worst_error(BY_LENGTH[name], tmp_path, 3, lengths)
        assert (found, error < TOLERANCE) == (f"transformers-{way}", True)
    model = load_through_transformers(tmp_path)
    assert (model.takes_chunks, model.shares_prefixes) == (False, False)


def test_code_that_cannot_be_made_to_forget_sequences_is_refused(tmp_path: Path) -> None:
    given = {"full_attention": _DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    model = Tiny(
        kind="Gemma3Text", model="Gemma3ForCausalLM", config={**ZOO["gemma3"].config, "rope_parameters": given}
    )
    with pytest.raises(UnsupportedModel, match="rope_type dynamic is not supported through transformers for Gemma3"):
        DynamicRope.of(model.build())


def save(tiny: Tiny, folder: Path) -> Path:
    """A checkpoint with the tokenizer that shards want."""
    tiny.save(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=["arcee", "mamba", "falcon-h1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(UNLISTED[request.param], tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Executor:
    settings = ModelServerSettings(model_id=str(folder), device="cpu", block_size=4, num_threads=1)
    executor, _ = load(settings, folder)  # nobody names a precision: int8, the default, is not for these
    most = 200 * executor.options.block_size
    executor.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=most))
    return executor


@pytest.fixture
def executor(loaded: Executor) -> Executor:
    loaded.clear()
    return loaded


def sequence(executor: Executor, i: int, count: int, **fields: Any) -> SequenceStart:
    """One of the prompts with blocks of its own, which may be whole sequences."""
    each = -(-96 // executor.options.block_size)
    return start(i, PROMPTS[i], count, blocks=tuple(range(1 + i * each, 1 + (i + 1) * each)), **fields)


def by_generate(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy completion by transformers' own loop, without padding, which is not exact in every model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def test_a_batch_of_uneven_lengths_is_what_generate_says(executor: Executor, folder: Path) -> None:
    found: dict[int, list[Generation]] = {}
    counts = (20, 12, 16)  # rows leave one by one
    sequences = [sequence(executor, i, count) for i, count in enumerate(counts)]
    run_out(executor, prefill(executor, 1, sequences), found)
    for i, count in enumerate(counts):
        assert ids_of(found[i]) == by_generate(folder, PROMPTS[i], count)
    assert num_sequences(executor) == 0


def test_rows_that_join_and_are_recomputed_say_the_same(executor: Executor) -> None:
    alone = [ids_of(run_alone(executor, sequence(executor, i, 12))) for i in range(3)]
    found: dict[int, list[Generation]] = {}
    first = prefill(executor, 1, [sequence(executor, 0, 12)])
    collect(first, found)
    assert first.batch is not None
    both = prefill(executor, 2, [sequence(executor, 1, 12)], first.batch)
    collect(both, found)
    # The third comes back after it was preempted with five tokens, to other blocks, which hold what others left there.
    again = sequence(executor, 2, 12, output_ids=tuple(alone[2][:5]))
    assert both.batch is not None
    run_out(executor, prefill(executor, 3, [again], both.batch), found)
    assert [ids_of(found[0]), ids_of(found[1]), alone[2][:5] + ids_of(found[2])] == alone


def test_a_prompt_in_chunks_and_the_next_in_its_blocks_say_the_same(executor: Executor) -> None:
    expected = ids_of(run_alone(executor, sequence(executor, 2, 6)))
    for _ in range(2):
        found: dict[int, list[Generation]] = {}
        result = prefill(executor, 1, [sequence(executor, 2, 6, chunk_len=10)])
        while result.batch is not None and not result.generations:
            result = decode(executor, [result.batch], [chunk(2, 15)])
        run_out(executor, result, found)
        assert ids_of(found[2]) == expected


def test_a_state_is_not_taken_for_that_of_another(executor: Executor) -> None:
    if executor.runner.decoder.shares_prefixes:  # type: ignore[attr-defined]
        pytest.skip("it has no state")
    with pytest.raises(InvalidRequest, match="cache_len 10 must be 0: a model with a state"):
        prefill(executor, 1, [sequence(executor, 0, 4, cache_len=10)])
    assert num_sequences(executor) == 0


def settings(folder: Path, **given: Any) -> ModelServerSettings:
    return ModelServerSettings(model_id=str(folder), **{"device": "cpu", "block_size": 4, "num_threads": 1, **given})


def test_what_is_logged_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(UNLISTED["codegen"], tmp_path)
    with caplog.at_level(logging.INFO):
        _, info = load(settings(folder), folder)
    said = [record.message for record in caplog.records if "through transformers" in record.message]
    assert said == [
        "CodeGenForCausalLM runs through transformers (padded batches, what it keeps of sequences handed to it): no "
        "row of the table is for it; its weights are torch.float32, as int8 and blocks are for the table's models"
    ]
    assert "not computed in a faster way: its code does not use AttentionInterface" in caplog.text
    assert (info.dtype, info.support_chunking, info.use_prefix_caching) == ("torch.float32", True, True)
    size = sum(tensor.numel() * 4 for name, tensor in load_file(folder / "model.safetensors").items())
    assert info.weight_bytes >= size


def test_models_with_a_state_have_blocks_for_it_and_share_no_prefixes(tmp_path: Path) -> None:
    folders = {name: save(UNLISTED[name], tmp_path / name) for name in ("mamba", "falcon-h1")}
    loaded = {name: load(settings(folder), folder) for name, folder in folders.items()}
    for executor, info in loaded.values():
        assert (info.support_chunking, info.use_prefix_caching) == (False, False)
        assert info.block_size == executor.options.block_size
    assert loaded["mamba"][1].block_size == 8192  # all there is of a sequence
    executor, info = loaded["falcon-h1"]
    assert 4 < info.block_size < 256
    assert executor.runner.pools.bytes_per_block * 100 > executor.runner.pools.make(100).num_bytes * 0.99


def test_a_pool_of_small_states_is_no_larger_than_the_wire_can_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(UNLISTED["mamba"], tmp_path)
    executor, _ = load(settings(folder), folder)
    monkeypatch.setattr(executor.profiler.memory, "room", lambda _: PoolRoom(10**12, 10**12, None, "much", "much"))
    monkeypatch.setattr(
        type(executor.runner.pools), "make", lambda pools, num_blocks: FallbackPool(pools, min(num_blocks, 9))
    )
    result = executor.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64))
    assert result.pool_tokens is not None
    assert 2**30 < result.pool_tokens < 2**31


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"quantize": "int8"}, "--quantize int8 is not for models that run through transformers"),
        ({"rope_factor": 2.0}, "--rope-factor 2.0 is not for models that run through transformers"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path: Path, given: dict[str, Any], line: str) -> None:
    folder = save(UNLISTED["arcee"], tmp_path)
    with pytest.raises(SettingsError, match=line):
        load(settings(folder, **given), folder)


@pytest.mark.parametrize(
    ("name", "size", "line"),
    [
        (
            "mamba",
            2,
            "--num-shard 2: MambaForCausalLM runs through transformers [0-9.]*, which has no plan to split its",
        ),
        ("hunyuan", 2, "which has no plan to split its layers; give --num-replicas"),
        ("arcee", 2, "which shares heads out evenly: 6 query heads and 3 key-value heads do not go to 2 ranks"),
        ("exaone", 4, "which shares heads out evenly: 6 query heads and 3 key-value heads do not go to 4 ranks"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_ranks_meet(
    name: str, size: int, line: str, tmp_path: Path
) -> None:
    folder = save(UNLISTED[name], tmp_path)
    with pytest.raises(SettingsError, match=line) as raised:
        load(settings(folder, world_size=size, sharded=True), folder)
    assert "\n" not in raised.value.message


def test_a_plan_with_a_kind_that_is_not_supported_is_refused_by_it(tmp_path: Path) -> None:
    folder = changed(
        save(UNLISTED["arcee"], tmp_path), base_model_tp_plan={"layers.*.mlp.up_proj": "sequence_parallel"}
    )
    with pytest.raises(SettingsError, match="and its plan to split it has the kind 'sequence_parallel', not supported"):
        load(settings(folder, world_size=2, sharded=True), folder)


# A plain one whose hidden units do not divide, key-value heads that ranks have in common, norms of heads with windows,
# experts, and a state beside attention; `python -m funitel_testing.fallback` takes all that have a plan.
SPLIT = {"arcee": "packed", "ernie": "packed", "exaone": "packed", "dots": "packed", "qwen3-next": "stacked"}


def test_two_ranks_say_what_transformers_says(tmp_path: Path) -> None:
    runs = on_two_ranks(list(SPLIT), tmp_path, 4)
    for name, run in runs.items():
        assert (run.error < TOLERANCE, run.way) == (True, f"transformers-{SPLIT[name]}"), name
        alone = load_through_transformers(tmp_path / name)
        whole = alone.loaded.footprint.held_bytes
        for held, split, split_in_all in run.weights:
            assert held - split == whole - split_in_all, name  # the rest is whole on every rank
            assert held < 0.75 * whole, name
        assert sum(split for _, split, _ in run.weights) == run.weights[0][2], name
        shared = split_form(name).config["num_key_value_heads"] == 1
        assert run.bytes_per_block == alone.pools.bytes_per_block // (1 if shared or alone.pools.kept.states else 2)


def changed(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM is not supported: .*"
         "; transformers [0-9.]* does not know it either"),
        ({"model_type": "t5", "architectures": ["T5Encoder"]}, "in transformers [0-9.]* it is no causal language mo"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config of config.json: bits None is not"),
        ({"num_attention_heads": "six"}, "transformers [0-9.]* refuses its config.json: "),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, the checkpoint has [0-9]* tensors"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path, fields: dict[str, Any], line: str) -> None:
    folder = changed(save(UNLISTED["arcee"], tmp_path), **fields)
    with pytest.raises(UnsupportedModel, match=line) as raised:
        load(settings(folder), folder)
    assert "\n" not in raised.value.message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save(UNLISTED["arcee"], tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match="lacks 1 tensors of the model: model.layers.1.mlp.up_proj.weight"):
        load(settings(folder), folder)


def with_surplus(folder: Path, *names: str) -> Path:
    """The checkpoint with tensors of these names besides."""
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(4) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_surplus_tensor_is_refused_in_one_line(tmp_path: Path) -> None:
    names = ("model.layers.0.mlp.spare.weight", "model.layers.9.mlp.up_proj.weight")
    folder = with_surplus(save(UNLISTED["arcee"], tmp_path), *names)
    with pytest.raises(WeightsError, match="holds 2 tensors the model does not know: model.layers.0") as raised:
        load(settings(folder), folder)
    assert "\n" not in raised.value.message


def test_tensors_that_the_class_says_are_of_no_use_are_none_too_many(tmp_path: Path) -> None:
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.k_scale")
    folder = with_surplus(save(UNLISTED["arcee"], tmp_path), *names)
    load(settings(folder), folder)


_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_of_this_test"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    folder = save(ZOO["llama"], tmp_path / "checkpoint")
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    changed(folder, model_type="own_of_this_test", architectures=["OwnForCausalLM"], auto_map=code)
    (folder / "own.py").write_text(_CODE)
    with pytest.raises(UnsupportedModel, match="OwnForCausalLM needs code that comes with it: --trust-remote-code"):
        load(settings(folder), folder)
    executor, _ = load(settings(folder, trust_remote_code=True), folder)
    executor.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))
    assert executor.runner.decoder.name == "packed"  # type: ignore[attr-defined]
    model = transformers.LlamaForCausalLM.from_pretrained(changed(folder, model_type="llama"), dtype=torch.float32)
    expected = model.eval().generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert ids_of(run_alone(executor, sequence(executor, 0, 8))) == expected[0, len(PROMPTS[0]) :].tolist()
