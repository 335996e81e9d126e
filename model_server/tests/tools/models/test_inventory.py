"""`funitel models` says what the tables say, and of a model what loading it then finds."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.device.host_memory import AvailableMemory
from funitel.model_server.executor import pool_sizing
from funitel.model_server.executor.pool_sizing import USABLE
from funitel.model_server.loading.decoder import load
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.registry.decoders import FAMILIES
from funitel.model_server.registry.encoder_decoders import SEQ2SEQ
from funitel.model_server.registry.encoders import ENCODERS
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.registry.wrapped import WRAPPED
from funitel.model_server.settings import ModelServerSettings, ModelsSettings
from funitel.model_server.tools.models import decoder_estimate, needs
from funitel.model_server.tools.models.report import list_all, served_architectures, tell_needs
from funitel.proto.errors import SettingsError, WeightsError
from funitel.proto.settings.layer_parts import LayerParts
from funitel.proto.step import WarmupLimits
from funitel_testing.executors import start
from funitel_testing.fake_gpus import FakeGpu
from funitel_testing.fallback import UNLISTED, split_form
from funitel_testing.tiny import byte_tokenizer, save_tiny
from funitel_testing.tiny_seq2seq import FAMILIES as TINY_SEQ2SEQ
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq
from funitel_testing.zoo import ZOO

FREE = 10**9


@pytest.fixture(autouse=True)
def _known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "available_memory", lambda: AvailableMemory(FREE, "a test"))


def told(folder: Path, **given: Any) -> dict[str, Any]:
    text, fits = tell_needs(ModelsSettings(model_id=str(folder), device="cpu", block_size=4, json=True, **given))
    found: dict[str, Any] = json.loads(text)
    assert found["fits"] is fits
    return found


def test_the_list_has_every_row_of_the_tables_and_what_transformers_has_besides() -> None:
    found = json.loads(list_all(is_json=True))
    rows = {row["architecture"]: row for row in found["architectures"]}
    assert rows.keys() == {*FAMILIES, *WRAPPED, *SEQ2SEQ, *ENCODERS}
    assert rows["LlamaForCausalLM"]["fused"] == "yes"
    assert "int8" in rows["LlamaForCausalLM"]["precisions"]
    assert rows["Olmo2ForCausalLM"]["fused"] == "yes"
    assert rows["MixtralForCausalLM"]["fused"] == "yes"
    assert "int8" in rows["MixtralForCausalLM"]["precisions"]
    assert rows["BertModel"]["kind"] == "encoder"
    assert {"RwkvForCausalLM", "CodeGenForCausalLM"} <= set(found["through_transformers"])
    assert not rows.keys() & set(found["through_transformers"])
    assert "all-minilm-l6-v2" in found["catalogue"]
    text = list_all(is_json=False)
    assert all(name in text for name in (*FAMILIES, *SEQ2SEQ, *ENCODERS, *found["catalogue"]))
    assert all(name in text for name in found["through_transformers"])
    assert rows["MambaForCausalLM"]["fused"] == "no: layers with a state (mamba)"


@pytest.mark.parametrize("given", [{}, {"dtype": "float32"}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_takes_what_was_told(
    family: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(family, tmp_path)
    found = told(folder, **given)
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1, block_size=4, **given)
    executor, info = load(settings, folder)
    assert found["weights"] == [info.weight_bytes]
    assert found["blocks"] == [executor.runner.pools.bytes_per_block]
    assert found["precision"] == info.dtype.removeprefix("torch.")
    monkeypatch.setattr(pool_sizing, "available_memory", lambda: AvailableMemory(FREE - info.weight_bytes, "a test"))
    assert found["pool"] == executor.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64)).pool_tokens


@pytest.mark.parametrize("name", ["gemma3n", "gemma4_shared", "gemma4_moe", "glm_moe_dsa"])
def test_a_model_with_layers_that_differ_takes_what_was_told(name: str, tmp_path: Path) -> None:
    ZOO[name].save(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = told(tmp_path)
    settings = ModelServerSettings(model_id=str(tmp_path), device="cpu", num_threads=1, block_size=4)
    executor, info = load(settings, tmp_path)
    assert (found["weights"], found["blocks"]) == ([info.weight_bytes], [executor.runner.pools.bytes_per_block])
    assert executor.runner.pools.make(3).num_bytes == 3 * found["blocks"][0]
    assert found["served_by"] == "torch"
    halves = told(tmp_path, num_shard=2)
    assert len(halves["weights"]) == len(halves["blocks"]) == 2


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
}


def test_blocks_that_are_made_on_loading_take_what_was_told(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, **SIZES)
    found = told(folder, quantize="q3h")
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1, block_size=4, quantize="q3h")
    _, info = load(settings, folder)
    assert (found["weights"], found["precision"]) == ([info.weight_bytes], "q3h_b64t1")
    assert info.dtype == "q3h_b64t1"


def test_blocks_on_a_gpu_are_counted_in_4_or_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, card = save_tiny("llama", tmp_path, **SIZES, num_hidden_layers=1), torch.device("cuda", 0)
    monkeypatch.setattr(decoder_estimate, "choose_device", lambda *_: card)
    spec = choose_spec(None, folder)

    def linear_bits(quantize: str | None) -> float:
        settings = ModelsSettings(model_id=str(folder), quantize=quantize)
        (held,) = decoder_estimate.estimate_alone(settings, folder, spec)[0].weights
        return (held - bare) * 8 / num_weights

    num_weights, bare = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192, 0
    bare = int(linear_bits(None) * num_weights / 8) - 2 * num_weights  # what is no linear layer, in bfloat16
    bits = {name: linear_bits(name) for name in (None, "q3h", "q4", "q2", "q6", "q8", "a16w4_g64", "a8w8")}
    assert bits[None] == 16
    assert {name: each for name, each in bits.items() if name in ("q3h", "q4", "q2", "q6", "q8", "a16w4_g64")} == {
        "q3h": 4.5,
        "q4": 5.0,
        "q2": 5.0,
        "q6": 8.5,
        "q8": 8.5,
        "a16w4_g64": 4.75,
    }
    assert 8 < (bits["a8w8"] or 0) < 8.5


def test_ranks_share_weights_and_memory(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    whole, halves = told(folder), told(folder, num_shard=2)
    assert len(halves["weights"]) == len(halves["blocks"]) == 2
    assert halves["weights"][0] < whole["weights"][0]
    assert sum(halves["blocks"]) == whole["blocks"][0]
    with pytest.raises(SettingsError, match="--num-shard 7 is larger than the model's 6 query heads"):
        told(folder, num_shard=7)


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "lfm2", "kimi_linear", "falcon_h1", "minimax", "mamba"])
def test_states_are_counted_as_they_are_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ZOO[name].save(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = told(tmp_path, dtype="float32")
    settings = ModelServerSettings(model_id=str(tmp_path), device="cpu", num_threads=1, block_size=4, dtype="float32")
    executor, info = load(settings, tmp_path)
    assert (found["weights"], found["blocks"]) == ([info.weight_bytes], [executor.runner.pools.bytes_per_block])
    assert found["served_by"] == "torch"
    monkeypatch.setattr(pool_sizing, "available_memory", lambda: AvailableMemory(FREE - info.weight_bytes, "a test"))
    result = executor.warmup([start(0, range(20))], WarmupLimits(max_prefill_tokens=64))
    states = executor.runner.pool.state_pool
    assert states is not None
    assert states.num_bytes == found["states"][0] * states.num_slots
    assert (found["state_slots"], found["pool"]) == (result.state_slots, result.pool_tokens)
    assert sum(told(tmp_path, num_shard=2)["states"]) >= found["states"][0]


@pytest.mark.parametrize("name", ["arcee", "mamba", "falcon-h1"])
def test_a_model_through_transformers_takes_what_was_told(name: str, tmp_path: Path) -> None:
    UNLISTED[name].save(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = told(tmp_path)
    torch.set_num_threads(1)
    settings = ModelServerSettings(model_id=str(tmp_path), device="cpu", num_threads=1, block_size=4)
    executor, info = load(settings, tmp_path)
    assert (found["weights"], found["blocks"]) == ([info.weight_bytes], [executor.runner.pools.bytes_per_block])
    assert (found["block_size"], found["context"]) == (info.block_size, executor.spec.max_position_embeddings)


@pytest.mark.parametrize(("name", "is_kv_split"), [("exaone", True), ("ernie", False)])
def test_ranks_share_a_model_through_transformers(name: str, is_kv_split: bool, tmp_path: Path) -> None:
    split_form(name).save(tmp_path)
    whole, halves = told(tmp_path), told(tmp_path, num_shard=2)
    assert len(halves["weights"]) == len(halves["blocks"]) == 2
    assert max(halves["weights"]) < 0.75 * whole["weights"][0]
    assert sum(halves["blocks"]) == whole["blocks"][0] * (1 if is_kv_split else 2)
    with pytest.raises(SettingsError, match="which shares heads out evenly: 4 query heads"):
        told(tmp_path, num_shard=3)


@pytest.mark.parametrize("family", TINY_SEQ2SEQ)
def test_an_encoder_decoder_takes_what_was_told(family: str, tmp_path: Path) -> None:
    folder = save_tiny_seq2seq(family, tmp_path)
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1, block_size=4)
    executor, info = load_generator(settings, folder)
    found = told(folder)
    assert (found["weights"], found["blocks"]) == ([info.weight_bytes], [executor.runner.pools.bytes_per_block])
    assert len(told(folder, num_shard=2)["weights"]) == 2


def test_what_does_not_fit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path)
    monkeypatch.setattr(needs, "available_memory", lambda: AvailableMemory(1000, "a test"))
    text, fits = tell_needs(ModelsSettings(model_id=str(folder), device="cpu"))
    assert not fits
    assert text.splitlines()[-1].split() == ["fits", "no"]


@pytest.mark.parametrize("quantize", ["gptq", "awq", "compressed-tensors", "fp8", "marlin"])
def test_a_quantisation_that_the_checkpoint_does_not_have_is_refused_as_in_serving(
    quantize: str, tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(SettingsError, match=f"--quantize {quantize}: "):
        told(folder, quantize=quantize)


def test_a_path_that_is_none_is_one_line() -> None:
    with pytest.raises(WeightsError, match="^no such folder or file: /nowhere$"):
        tell_needs(ModelsSettings(model_id="/nowhere"))


# Mixtures that the fused step leaves to torch, and what of them.
LEFT_TO_TORCH = {
    "AfmoeForCausalLM": "no: has_output_gate True",
    "DeepseekV32ForCausalLM": "no: indexer",
    "Gemma4ForCausalLM": "no: has_value_norm True",
    "GlmMoeDsaForCausalLM": "no: indexer",
    "GptOssForCausalLM": "no: gate_limit 7.0",
    "GraniteMoeSWAForCausalLM": "no: has_sinks True",
    "HunYuanMoEV1ForCausalLM": "no: is_qk_norm_last True",
    "Llama4ForCausalLM": "no: qk_norm plain",
    "Mistral4ForCausalLM": "no: query_growth",
    "PhimoeForCausalLM": "no: experts.score sparsemixer",
    "GraniteMoeHybridForCausalLM": "no: layers with a state (mamba2)",
    "JambaForCausalLM": "no: layers with a state (mamba)",
    "KimiLinearForCausalLM": "no: layers with a state (delta_net)",
    "MiniMaxForCausalLM": "no: layers with a state (lightning)",
    "NemotronHForCausalLM": "no: layers with a state (mamba2)",
    "Qwen3NextForCausalLM": "no: layers with a state (delta_net)",
    "Qwen3_5MoeForCausalLM": "no: layers with a state (delta_net)",
}


def test_mixtures_of_experts_are_said_to_run_in_the_fused_step() -> None:
    mixtures = {name for name, row in FAMILIES.items() if "experts" in row.fields}
    found = {each.architecture: each for each in served_architectures() if each.architecture in mixtures}
    assert found.keys() == mixtures
    left = {name: found.pop(name).fused for name in LEFT_TO_TORCH}
    assert left == LEFT_TO_TORCH
    assert {each.fused for each in found.values()} == {"yes", "as configured"}  # some by themselves are no model
    assert all("int8" in each.precisions for each in found.values())


def test_parts_take_what_is_loaded_of_them(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    table = LayerParts("0=float32,1-2=int8")
    found = told(folder, layer_parts=table)
    executor, info = load(
        ModelServerSettings(model_id=str(folder), block_size=4, num_threads=1, layer_parts=table), folder
    )
    first, last = executor.runner.decoder.parts  # type: ignore[attr-defined]
    assert [part["weights"] for part in found["parts"]] == [
        first.decoder.program.held_bytes,
        last.decoder.program.held_bytes,
    ]
    assert found["weights"] == [info.weight_bytes]
    assert found["blocks"] == [executor.runner.pools.bytes_per_block]
    assert sum(part["block"] for part in found["parts"]) == found["blocks"][0]
    assert [(part["layers"], part["device"], part["precision"]) for part in found["parts"]] == [
        ("0-0", "cpu", "float32"),
        ("1-2", "cpu", "int8"),
    ]
    assert found["fits"]
    text, _ = tell_needs(ModelsSettings(model_id=str(folder), block_size=4, layer_parts=table))
    assert "layers 1-2      on cpu: " in text


def test_a_gpu_and_the_host_hold_parts_of_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What with_memory makes of a GPU with little memory beside a host with more."""
    parts = (
        needs.PartNeeds(layers="0-8", device="cpu", precision="int8", weights=9_000, block=900),
        needs.PartNeeds(layers="9-9", device="cuda", precision="bfloat16", weights=1_000, block=100),
    )
    facts = needs.Needs(
        architecture="x", served_by="both", precision="int8", context=64, weights=(10_000,), parts=parts
    )
    monkeypatch.setattr(needs, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(needs, "Gpu", lambda _: FakeGpu(100_000))
    pools = [SizedPools(16, 1_000)]
    found = needs.with_memory(facts, ModelsSettings(model_id="x"), pools)
    usable = int(100_000 * USABLE)
    assert found.free == FREE + 100_000
    assert found.pool == 16 * 16 * (64 // 16)  # contexts
    long = needs.with_memory(replace(facts, context=10**6), ModelsSettings(model_id="x"), pools)
    assert long.pool == 16 * (10 * (usable - 1_000) // 1_000 - 1)
    full = needs.with_memory(
        replace(facts, parts=(parts[0], replace(parts[1], weights=99_000))), ModelsSettings(model_id="x"), pools
    )
    assert not full.fits


@dataclass(frozen=True)
class SizedPools:
    block_size: int
    bytes_per_block: int
    state_layout: None = None


def test_parts_that_cannot_be_are_refused_as_in_serving(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(SettingsError, match=r"^--gpu-layers 2 needs a GPU: --device is cpu$"):
        told(folder, gpu_layers=2)
    with pytest.raises(SettingsError, match=r"cannot be used with --num-shard 2: one shard has all layers$"):
        ModelsSettings(model_id="x", layer_parts=LayerParts("0=cpu"), num_shard=2)
    with pytest.raises(SettingsError, match=r"^--layer-parts 0-0=cpu is not for --explain"):
        ModelsSettings(model_id="x", layer_parts=LayerParts("0=cpu"), explain=True)
